"""The benchmark of stragglers pairs runs of one seed, and counts cut rows beside those sent."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from bench import stragglers
from bench.probes import Straggler


def report(env_steps, time_s, rows_cut=0):
    reached = {"mean_return_100": 100.0, "lockstep/rows_cut": rows_cut}
    return {**reached, "updates": 1, "env_steps_trained": env_steps, "time_s": time_s} | {
        "learner/wall_s": time_s
    }


def test_a_round_is_a_seed_and_both_go_as_far(monkeypatch, tmp_path, capsys):
    begun = []

    def one_run(config, settings, num_ranks):
        is_cut = "pace.cut_share=0.5" in settings
        begun.append((is_cut, settings[-1], num_ranks, "stop.env_steps=150000" in settings))
        reports = [{"updates": 0}, report(0, 1.0), report(150_000, 3.0 if is_cut else 6.0, 50_000)]
        run = SimpleNamespace(moments=lambda every_s: iter(()), reports=lambda: reports)
        return nullcontext(run)

    monkeypatch.setattr(stragglers, "one_run", one_run)
    monkeypatch.setattr("sys.argv", ["x", "--rounds", "2", "--write", str(tmp_path)])
    assert stragglers.main() == 0
    assert sorted(begun) == [
        (is_cut, f"seed={seed}", 2, True) for is_cut in (False, True) for seed in range(2)
    ]
    figures = json.loads((tmp_path / "stragglers.json").read_text())["figures"]
    found = {each["name"]: each["median"] for each in figures}
    assert found["env steps/s, cut over whole"] == pytest.approx(2.5)
    assert found["return, cut over whole"] == 1.0
    assert found["rows cut, of those that were sent or cut"] == 0.25


@pytest.mark.parametrize(("rank", "times"), [(None, 1), ("0", 1), ("1", 10)])
def test_rank_1_is_ten_times_slower(monkeypatch, rank, times):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    env = Straggler(step_s=0.5)
    env.reset(seed=0)
    env.step(0)
    env.close()
    assert slept == [0.5 * times]
