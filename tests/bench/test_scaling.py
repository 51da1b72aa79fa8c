"""The benchmark of scaling starts as many actors as it says, and pairs within a round."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import scaling
from bench.scaling import ASLEEP, Case, measure


@pytest.mark.e2e
def test_real_actors_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "COUNTED_S", 0.5)
    verdicts: dict[str, str] = {}
    sample = measure(ASLEEP, 1, "one", verdicts)
    # Eight environments that sleep 1 ms in turn: a thousand rows per second at the very best.
    assert 20 < sample["per_s"] < 1000
    assert verdicts.keys() == {"one"}


@pytest.mark.e2e
def test_a_run_that_never_has_all_actors_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "SETTINGS", ("stop.updates=1",))
    with pytest.raises(RuntimeError, match="one: the run ended before it was measured"):
        measure(Case("CartPole", ASLEEP.config), 1, "one", {})


def test_every_number_is_measured_in_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[str, int]] = []

    def measured(case: Case, num: int, name: str, verdicts: dict[str, str]) -> dict[str, float]:
        order.append((case.name, num))
        verdicts[name] = "learner: it is busy"
        return {"per_s": 100.0 * num * (1 if len(order) <= 5 else 3)}

    monkeypatch.setattr(scaling, "measure", measured)
    flags = ["--rounds", "2", "--only", "sleeps", "--write", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench", *flags])
    assert scaling.main() == 0
    assert order == [("sleeps 1 ms", num) for num in (1, 2, 4, 8, 16)] * 2
    figures = read(tmp_path / "scaling.json")
    assert figures["sleeps 1 ms, 1 actor: env steps/s"]["largest"] == 300
    over = figures["sleeps 1 ms, 8 actors: over 1 actor"]
    assert (over["smallest"], over["largest"]) == (8, 8)
    assert "- sleeps 1 ms, 16 actors: learner: it is busy" in (tmp_path / "scaling.md").read_text()


def read(path: Path) -> dict[str, Any]:
    return {each["name"]: each for each in json.loads(path.read_text())["figures"]}
