"""The benchmark of samplers runs, and pairs what it compares."""

import json
import sys
from pathlib import Path

import pytest

from bench import samplers
from bench.burning import Burning
from bench.samplers import CASES, SAMPLERS, compare, line


def test_every_sampler_is_compared_with_its_neighbour_in_time() -> None:
    rows = compare(CASES[0], num_rounds=2, slice_s=0.02)
    assert [row["sampler"] for row in rows] == list(SAMPLERS)
    for row in rows:
        pairs = zip(row["rows_per_s"], row["bare_rows_per_s"], strict=True)
        assert row["ratios"] == [ours / theirs for ours, theirs in pairs]
        assert len(row["ratios"]) == 2
        assert line(row).startswith(f"| CartPole, 8 | {row['sampler']} | ")


def test_what_was_asked_for_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.json"
    flags = ["--only", "computes", "--rounds", "1", "--slice-s", "0.02", "--json", str(target)]
    monkeypatch.setattr(sys, "argv", ["bench.samplers", *flags])
    assert samplers.main() == 0
    written = json.loads(target.read_text())
    # It has no vector code.
    assert [row["sampler"] for row in written["rows"]] == [n for n in SAMPLERS if n != "vector"]
    assert written["machine"]["cores"] >= 1


def test_burning_takes_a_core_for_as_long_as_it_says() -> None:
    import time

    env = Burning(step_s=0.01)
    env.reset(seed=0)
    before = time.thread_time()
    env.step(0)  # type: ignore[arg-type]
    assert time.thread_time() - before >= 0.01
