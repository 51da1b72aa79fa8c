"""What a GPU does while something is measured, by `nvidia-smi dmon`, which looks once a second."""

import contextlib
import statistics
import subprocess
from collections.abc import Iterator

import torch

from bench.one_run import end_with_parent

# What dmon calls it, what it is called here, and how much of its unit is one of ours.
COLUMNS = {
    "sm": ("sm_share", 100.0),
    "rxpci": ("pcie_in_gb_s", 1000.0),
    "txpci": ("pcie_out_gb_s", 1000.0),
}


@contextlib.contextmanager
def watched(device: torch.device) -> Iterator[dict[str, float]]:
    """At the end it holds the means of `COLUMNS`; of another device than a GPU nothing."""
    means: dict[str, float] = {}
    if device.type != "cuda":
        yield means
        return
    command = ["nvidia-smi", "dmon", "-s", "ut", "-i", str(device.index or 0)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent
    ) as monitor:
        try:
            yield means
        finally:
            monitor.terminate()
            said, _ = monitor.communicate()
    means |= means_of(said)


def means_of(said: str) -> dict[str, float]:
    """Of a table whose first line, behind a #, names its columns."""
    head, *lines = (line.split() for line in said.splitlines() if line.strip())
    names = head[1:]
    rows = [dict(zip(names, line, strict=True)) for line in lines if line[0] != "#"]
    if not rows:
        raise RuntimeError(f"nvidia-smi dmon told nothing within the time:\n{said}")
    return {
        ours: statistics.fmean(float(row[theirs]) for row in rows) / unit
        for theirs, (ours, unit) in COLUMNS.items()
    }
