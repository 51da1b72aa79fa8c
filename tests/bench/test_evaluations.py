"""The benchmark of evaluations trains in turns with and without them, and holds a limit."""

import json
import sys

from bench import evaluations


def test_trainings_with_and_without_are_compared_round_by_round(tmp_path, monkeypatch):
    trained = []

    def train(case, settings=()):
        trained.append((case.name, settings))
        return {"per_s": 97.0 if settings else 100.0, "evaluations": 5, "took_s": 0.5}

    monkeypatch.setattr(evaluations, "train", train)
    for only, code in (("sleeps", 1), ("CartPole", 0)):
        flags = ["--only", only, "--rounds", "2", "--write", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["bench", *flags])
        # A fiftieth is the limit where cores are idle.
        assert evaluations.main() == code
        written = json.loads((tmp_path / "evaluations.json").read_text())["figures"]
        assert [each["median"] for each in written] == [100.0, 97.0, 0.97, 5, 0.5]
    kinds = [(), ("evaluate.every_s=2.0",)] * 2
    assert trained == [(name, kind) for name in ("sleeps 1 ms", "CartPole") for kind in kinds]


def test_a_training_is_measured(monkeypatch):
    for name, value in (("AFTER_S", 0.0), ("COUNTED_S", 3.0)):
        monkeypatch.setattr(evaluations, name, value)
    measured = evaluations.train(evaluations.CASES[1])
    assert measured.pop("per_s") > 1
    assert measured == {"evaluations": 0, "took_s": 0.0}
