"""The benchmark of samplers runs, and pairs what it compares."""

import json
import sys

from bench import samplers
from bench.samplers import CASES, SAMPLERS, compare


def test_every_sampler_is_compared_with_its_neighbour_in_time(monkeypatch):
    rates = iter(range(1, 100))
    monkeypatch.setattr(samplers, "bare_rate", lambda *args: lambda slice_s: next(rates))
    monkeypatch.setattr(samplers, "sampler_rate", lambda *args: lambda slice_s: next(rates))
    found = compare(CASES[0], num_rounds=2, slice_s=0.02)
    assert [each.name for each in found] == [f"CartPole, 8: {name} over bare" for name in SAMPLERS]
    # Four warm up; then each is measured right behind the bare ones.
    first = sorted((6 / 5, 12 / 11))
    assert [found[0].smallest, found[0].largest] == first


def test_what_was_asked_for_is_written(tmp_path, monkeypatch):
    flags = ["--only", "computes", "--rounds", "1", "--slice-s", "0.02", "--write", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench.samplers", *flags])
    assert samplers.main() == 0
    written = json.loads((tmp_path / "samplers.json").read_text())
    # It has no vector code.
    names = [f"computes 1 ms, 8: {name} over bare" for name in SAMPLERS if name != "vector"]
    assert [each["name"] for each in written["figures"]] == names
    assert all(each["median"] > 0 for each in written["figures"])
