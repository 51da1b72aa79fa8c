"""The benchmark of passes compares auto with the best number, in each environment."""

import json
import sys

import pytest

from bench import passes


def test_auto_is_held_against_the_best_number(tmp_path, monkeypatch):
    seconds = {"1": 9.0, "2": 5.0, "4": 4.0, "8": 6.0, "16": 8.0}
    trained = []

    def train(settings, num, seeds):
        trained.append((num, next(seeds)))
        return {"goal_s": seconds[num], "passes": 3.5}

    monkeypatch.setattr(passes, "train", train)
    monkeypatch.setattr(
        sys, "argv", [*["bench", "--rounds", "2", "--only", "waits", "--write"], str(tmp_path)]
    )
    for auto_s, code in ((4.4, 0), (4.5, 1)):
        seconds["auto"] = auto_s
        assert passes.main() == code
    figures = json.loads((tmp_path / "passes.json").read_text())["figures"]
    assert figures[-1]["name"] == "CartPole that waits: auto over the best, 4"
    assert figures[-1]["median"] == pytest.approx(1.125)
    assert trained[:12] == [(num, seed) for seed in (0, 1) for num in passes.PASSES]


def test_a_training_is_measured(monkeypatch):
    monkeypatch.setattr(passes, "SETTINGS", (*passes.SETTINGS[:4], "stop.env_steps=3000"))
    measured = passes.train(passes.CASES["CartPole that waits"], "auto", iter([3]))
    assert measured["goal_s"] > 0
    assert measured["passes"] >= 1
