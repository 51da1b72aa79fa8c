"""The figures of a GPU are read off the table of a program, which a script stands in for here."""

import contextlib
import os
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.gpu import means_of, watched
from tests.e2e.harness import wait_until

CUDA = torch.device("cuda")
TABLE = """# gpu     sm    mem    enc    dec    jpg    ofa  rxpci  txpci
# Idx      %      %      %      %      %      %   MB/s   MB/s
    0     90     40      0      0      0      0   2000     10
    0    100     42      0      0      0      0   3000     30
"""
SHORT = "# gpu   sm rxpci txpci\n# Idx    %  MB/s  MB/s\n  0  50  1000  0\n"


def test_means_are_of_the_columns_by_their_names():
    for table, means in (
        (TABLE, (0.95, 2.5, 0.02)),
        # Heads that come again, and other columns.
        (SHORT + SHORT.replace("50", "70"), (0.6, 1.0, 0.0)),
        # The last line is cut off.
        (TABLE[:-30], (0.95, 2.0, 0.01)),
        # A value that is not told is left out.
        (TABLE.replace("2000", "-").replace("3000", "-"), (0.95, None, 0.02)),
        ("\n".join(TABLE.splitlines()[:2]), (None, None, None)),
        ("", (None, None, None)),
    ):
        names = "sm_share", "pcie_in_gb_s", "pcie_out_gb_s"
        told = dict(zip(names, means, strict=True))
        assert means_of(table) == {name: mean for name, mean in told.items() if mean is not None}


@pytest.fixture
def put(tmp_path, monkeypatch):
    """Puts a program of that name where programs are looked for first; it notes its flags."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu, "uuid_of", lambda device: "GPU-7")

    def put(does):
        script, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
        script.write_text(f"#!/bin/sh\necho $$ $@ > {asked}\n{does}\n")
        script.chmod(0o755)
        return asked

    return put


def test_it_is_watched_for_as_long_as_is_measured(put, monkeypatch, capsys):
    asked = put(f"sleep 0.2\ncat <<'EOF'\n{TABLE}EOF")
    with watched(torch.device("cpu"), 1.0) as of_a_cpu:
        assert not asked.exists()
    with watched(CUDA, 8.0) as means:
        assert means == {}
    assert means["sm_share"] == 0.95
    assert asked.read_text().split()[1:] == ["dmon", "-s", "ut", "-c", "8", "-i", "GPU-7"]
    # It is not left behind where a benchmark fails meanwhile.
    asked.unlink()
    put("exec sleep 60")
    with contextlib.suppress(TimeoutError), watched(CUDA, 8.0):
        wait_until("it is asked", lambda: asked.exists() and asked.read_text())
        raise TimeoutError
    assert not Path(f"/proc/{asked.read_text().split()[0]}").exists()
    monkeypatch.setenv("PATH", "/nowhere")
    with watched(CUDA, 1.0) as without_it:
        pass
    assert of_a_cpu == without_it == {}
    assert "nvidia-smi" in capsys.readouterr().err
