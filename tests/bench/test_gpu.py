"""The figures of a GPU are read off the table of a program, which a script stands in for here."""

import os
import time
from pathlib import Path

import pytest
import torch

from bench.gpu import means_of, watched

TABLE = """# gpu     sm    mem    enc    dec    jpg    ofa  rxpci  txpci
# Idx      %      %      %      %      %      %   MB/s   MB/s
    0     90     40      0      0      0      0   2000     10
    0    100     42      0      0      0      0   3000     30
"""


def test_means_are_of_the_columns_by_their_names() -> None:
    means = means_of(TABLE)
    assert means == {"sm_share": 0.95, "pcie_in_gb_s": 2.5, "pcie_out_gb_s": 0.02}


def test_heads_that_come_again_and_other_columns_do_no_harm() -> None:
    short = "# gpu   sm rxpci txpci\n# Idx    %  MB/s  MB/s\n  0  50  1000  0\n"
    assert means_of(short + short.replace("50", "70")) == {
        "sm_share": 0.6,
        "pcie_in_gb_s": 1.0,
        "pcie_out_gb_s": 0.0,
    }


def test_a_table_without_a_row_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="told nothing"):
        means_of("\n".join(TABLE.splitlines()[:2]))


def test_it_is_watched_from_the_beginning_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(
        f"#!/bin/sh\necho $$ $@ > {tmp_path}/asked\ncat <<'EOF'\n{TABLE}EOF\nexec sleep 60\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with watched(torch.device("cuda:1")) as means:
        assert means == {}
        give_up_at = time.monotonic() + 10
        while not (tmp_path / "asked").exists():
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        # What it says after that is read at the end.
        time.sleep(0.2)
    assert means["sm_share"] == 0.95
    pid, *asked = (tmp_path / "asked").read_text().split()
    assert asked == ["dmon", "-s", "ut", "-i", "1"]
    assert not Path(f"/proc/{pid}").exists()


def test_on_a_cpu_there_is_nothing_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with watched(torch.device("cpu")) as means:
        pass
    assert means == {}
