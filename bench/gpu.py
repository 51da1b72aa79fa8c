"""Watch a GPU while something is measured, by `nvidia-smi dmon`, which looks once a second."""

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Iterator

import torch

from bench.one_run import end_with_parent

# The name of dmon, the name here, and how much of its unit is one of ours.
COLUMNS = {
    "sm": ("sm_share", 100.0),
    "rxpci": ("pcie_in_gb_s", 1000.0),
    "txpci": ("pcie_out_gb_s", 1000.0),
}
# Beyond the time for which it was told to look.
LATE_S = 5.0


@contextlib.contextmanager
def watched(device: torch.device, seconds: float) -> Iterator[dict[str, float]]:
    """At the end it holds the means of `COLUMNS` over so many seconds, as far as dmon told them.

    It stays empty for another device than a GPU, and where there is no dmon.
    """
    means: dict[str, float] = {}
    if device.type != "cuda":
        yield means
        return
    looks = str(max(1, int(seconds)))
    command = ["nvidia-smi", "dmon", "-s", "ut", "-c", looks, "-i", uuid_of(device)]
    try:
        monitor = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent
        )
    except OSError as error:
        print(f"nothing is known of the GPU itself: {error}", file=sys.stderr)
        yield means
        return
    with monitor:
        try:
            yield means
            said, _ = monitor.communicate(timeout=LATE_S)
        finally:
            monitor.terminate()
    means |= means_of(said)


def uuid_of(device: torch.device) -> str:
    """Its numbers are others for torch, where CUDA_VISIBLE_DEVICES says so."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def means_of(said: str) -> dict[str, float]:
    """The means of a table. Its first line, behind a #, names its columns; "-" is no value."""
    head, *lines = [line.split() for line in said.splitlines() if line.strip()] or [[]]
    rows = [dict(zip(head[1:], line, strict=False)) for line in lines if line[0] != "#"]
    means = {}
    for theirs, (ours, unit) in COLUMNS.items():
        values = [float(row[theirs]) for row in rows if row.get(theirs, "-") != "-"]
        if values:
            means[ours] = statistics.fmean(values) / unit
    return means
