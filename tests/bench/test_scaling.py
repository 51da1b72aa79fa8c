"""The benchmark of scaling starts as many actors as it says, and pairs within a round."""

import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from bench import scaling
from bench.scaling import ASLEEP, measure


def test_what_is_counted_begins_when_all_are_there(monkeypatch):
    def measured(*num_actors):
        told = [
            {"time_s": n, "learner/wall_s": n, "env_steps_trained": n**2, "weights/bytes": 3 * n**2}
            | {"updates": 1, "num_actors": num, "bottleneck": "learner: it is busy"}
            for n, num in enumerate(num_actors)
        ]
        run = SimpleNamespace(moments=lambda every_s: told, last_report=iter(told).__next__)
        monkeypatch.setattr(scaling, "one_run", lambda *args: nullcontext(run))
        return measure(ASLEEP, 2, "two", {})

    with pytest.raises(RuntimeError, match="two: the run ended before it was measured"):
        measured(1, 2, 2)
    monkeypatch.setattr(scaling, "COUNTED_S", 2.0)
    for num_actors, per_s in (((1, 1, 2, 2, 2), 6.0), ((2, 2, 1, 2, 2, 2), 8.0)):
        assert measured(*num_actors) == {"per_s": per_s, "weights_bytes_per_step": 3.0}


def test_every_number_is_measured_in_every_round(tmp_path, monkeypatch):
    order = []

    def measured(case, num, name, verdicts):
        order.append((case.name, num))
        verdicts[name] = "learner: it is busy"
        return {"per_s": 100.0 * num * (1 if len(order) <= 5 else 3)}

    monkeypatch.setattr(scaling, "measure", measured)
    flags = ["--rounds", "2", "--only", "sleeps", "--write", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench", *flags])
    assert scaling.main() == 0
    numbers = {
        "sleeps 1 ms": (1, 2, 4, 8, 16),
        # Each rank has one at least.
        "sleeps 1 ms, 2 ranks": (2, 4, 8, 16),
        "sleeps 1 ms, lockstep": (1, 2, 4, 8, 16),
        "sleeps 1 ms, lockstep, 2 ranks": (2, 4, 8, 16),
    }
    assert order == [(name, num) for name in numbers for num in numbers[name] * 2]
    written = json.loads((tmp_path / "scaling.json").read_text())["figures"]
    figures = {each["name"]: each for each in written}
    assert figures["sleeps 1 ms, 1 actor: env steps/s"]["largest"] == 300
    shared = figures["sleeps 1 ms, lockstep, 2 ranks, 8 actors: over 2 actors"]
    assert (shared["smallest"], shared["largest"]) == (4, 4)
    # Eight times the actors, of whom nothing waits for another.
    assert figures["sleeps 1 ms, lockstep: serial share, of 16 actors"]["median"] == 0
    over = figures["sleeps 1 ms, 8 actors: over 1 actor"]
    assert (over["smallest"], over["largest"]) == (8, 8)
    assert "- sleeps 1 ms, 16 actors: learner: it is busy" in (tmp_path / "scaling.md").read_text()
