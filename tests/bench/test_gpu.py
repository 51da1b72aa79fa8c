"""The figures of a GPU are read off the table of a program, which a script stands in for here."""

import os
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.gpu import means_of, watched

CUDA = torch.device("cuda")
TABLE = """# gpu     sm    mem    enc    dec    jpg    ofa  rxpci  txpci
# Idx      %      %      %      %      %      %   MB/s   MB/s
    0     90     40      0      0      0      0   2000     10
    0    100     42      0      0      0      0   3000     30
"""


SHORT = "# gpu   sm rxpci txpci\n# Idx    %  MB/s  MB/s\n  0  50  1000  0\n"


@pytest.mark.parametrize(
    ("table", "means"),
    [
        (TABLE, {"sm_share": 0.95, "pcie_in_gb_s": 2.5, "pcie_out_gb_s": 0.02}),
        # Heads that come again, and other columns.
        (
            SHORT + SHORT.replace("50", "70"),
            {"sm_share": 0.6, "pcie_in_gb_s": 1.0, "pcie_out_gb_s": 0.0},
        ),
        # What is not told is left out.
        ("", {}),
        ("\n".join(TABLE.splitlines()[:2]), {}),
        (
            TABLE.replace("2000", "-").replace("3000", "-"),
            {"sm_share": 0.95, "pcie_out_gb_s": 0.02},
        ),
        # The last line is cut off.
        (TABLE[:-30], {"sm_share": 0.95, "pcie_in_gb_s": 2.0, "pcie_out_gb_s": 0.01}),
    ],
)
def test_means_are_of_the_columns_by_their_names(table, means):
    assert means_of(table) == means


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The only one in which programs are looked for first."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu, "uuid_of", lambda device: "GPU-7")
    return tmp_path


def put(folder, does):
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\necho $$ $@ > {folder}/asked\n{does}\n")
    script.chmod(0o755)


def test_it_is_watched_for_as_long_as_is_measured(folder):
    put(folder, f"sleep 0.2\ncat <<'EOF'\n{TABLE}EOF")
    with watched(CUDA, 8.0) as means:
        assert means == {}
    assert means["sm_share"] == 0.95
    _, *asked = (folder / "asked").read_text().split()
    assert asked == ["dmon", "-s", "ut", "-c", "8", "-i", "GPU-7"]


def test_who_fails_meanwhile_does_not_leave_it_behind(folder):
    put(folder, "exec sleep 60")
    asked = folder / "asked"

    def fail():
        with watched(CUDA, 8.0):
            while not asked.exists() or not asked.read_text():
                pass
            raise OSError("something else")

    with pytest.raises(OSError, match="something else"):
        fail()
    pid = asked.read_text().split()[0]
    assert not Path(f"/proc/{pid}").exists()


def test_without_that_program_or_a_gpu_there_are_no_figures(folder, monkeypatch, capsys):
    put(folder, "exit 1")
    with watched(torch.device("cpu"), 1.0) as means:
        pass
    assert means == {}
    assert not (folder / "asked").exists()
    (folder / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(folder))
    with watched(CUDA, 1.0) as means:
        pass
    assert means == {}
    assert "nvidia-smi" in capsys.readouterr().err
