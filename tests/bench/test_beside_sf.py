"""Sample Factory trains for as long as we did, and what it said later does not count."""

import pytest

from bench.learning import beside_sf
from bench.learning.beside_sb3 import Result, read, result_of
from bench.learning.beside_sf import main, row
from bench.peers.one_turn import Progress, Turn

TASK = "LunarLander-v3"


def test_a_pair_is_measured_once_and_put_on_the_page(tmp_path, monkeypatch):
    trained = []

    def ours(system, task, seed, venvs):
        trained.append((system, task, seed))
        return Result(system, task, seed, [(9.0 + seed, 600_000, 250.0)], f"c{seed}", "a machine")

    def run_turn(command, is_enough, limit_s):
        trained.append(tuple(command[2:]))
        told = [Progress(n, n * 1000, float(n) if n > 2 else None) for n in range(40)]
        first = next(n for n in range(40) if is_enough(Turn(told[: n + 1])))
        return Turn(told[: first + 5])

    monkeypatch.setattr(beside_sf, "train_ours", ours)
    monkeypatch.setattr(beside_sf, "run_turn", run_turn)
    flags = ["--write", str(tmp_path), "--only", "lunar", "--seeds", "0-1"]
    assert main(flags) == main(flags) == 0
    theirs = ("bench.peers.run_defaults", "sf", "LunarLander-v2", "1000000000")
    assert trained == [("ours", TASK, 0), (*theirs, "0"), ("ours", TASK, 1), (*theirs, "1")]
    kept = read(tmp_path / "beside_sf.jsonl")
    assert [each.final for each in kept] == [250.0, 9.0, 250.0, 10.0]
    line = f"| {TASK} | 10 | 600,000 | **250** (250, 250) | 9,500 | **9.5** (9, 10) |"
    page = (tmp_path / "beside_sf.md").read_text()
    assert line in page
    assert "Commits c0, c1, on " in page


def test_no_hundred_episodes_are_no_return():
    ours = Result("ours", TASK, 0, [(9.0, 600_000, 250.0)])
    turn = Turn([Progress(1.0, 4096, None), Progress(9.0, 70_000, None)])
    theirs = result_of(turn, "sf", TASK, 0)
    assert row(TASK, [ours, theirs]).endswith("| 70,000 | **-inf** (-inf) |")
    # Results of before do not say so much.
    unknown = theirs._replace(num_steps=None)
    assert row(TASK, [ours, unknown]).endswith("| - | **-inf** (-inf) |")
    assert row("CartPole-v1", [ours]) is None


@pytest.mark.parametrize("task", beside_sf.IDS)
def test_every_task_has_its_steps(task):
    assert task in beside_sf.TASKS
