"""Measurements beside SB3 are kept and gone on with, and the page compares medians."""

import pytest

from bench.learning import beside_sb3
from bench.learning.beside_sb3 import Result, main, read, row
from bench.peers.one_turn import Progress, Turn

TASK = "CartPole-v1"


def test_a_measurement_goes_on_where_it_was_ended(tmp_path, monkeypatch):
    trained = []

    def train(system, task, seed, venvs):
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append((system, task, seed))
        return Result(system, task, seed, [(1.0, 10, 5.0)], f"c{seed}", f"machine {seed}")

    monkeypatch.setattr(beside_sb3, "train", train)
    flags = ["--write", str(tmp_path), "--only", "cartpole", "--seeds", "0-1"]
    with pytest.raises(KeyboardInterrupt):
        main(flags)
    assert trained == [("ours", TASK, 0), ("sb3", TASK, 0), ("ours", TASK, 1)]
    trained.clear()
    assert main(flags) == 0
    assert trained == [("sb3", TASK, 1)]
    assert len(read(tmp_path / "beside_sb3.jsonl")) == 4
    page = (tmp_path / "beside_sb3.md").read_text()
    assert f"| {TASK} | 150,000 |" in page
    assert "Commits c0, c1, on machine 0 and machine 1" in page
    assert "machine 0 and machine 1:" in page


def test_a_row_has_the_time_to_the_other_s_return():
    ours = [Result("ours", TASK, n, [(1.0, 0, 5.0), (4.0, 1, 90.0), (9.0, 2, 100.0 + n)])
            for n in range(3)]  # fmt: skip
    theirs = [Result("sb3", TASK, 0, [(20.0, 1, 10.0), (36.0, 2, 90.0)])]
    assert "**101** (100, 101, 102) |  | 90 (1) | 36 | 4 | 9.0 |" in row(TASK, ours + theirs)
    # A seed that was trained again has its last return, and both times.
    again = [Result("ours", TASK, 2, [(8.0, 2, 95.0)]), Result("ours", TASK, 1, [(6.0, 2, 99.0)])]
    found = row(TASK, [*ours, *again, *theirs])
    assert "**99** (100, 99, 95) |  | 90 (1) | 36 | 4 | 9.0 |" in found
    other = Result("sb3", TASK, 0, [(20.0, 1, 10.0), (60.0, 2, 90.0)])
    assert "| 90 (1) | 48 | 4 | 12.0 |" in row(TASK, [*ours, *again, *theirs, other])
    # The seconds of other commits than the returns' have their names.
    newer = [Result("ours", TASK, n, [(1.0, 2, 99.0)], "new", "another") for n in range(3)]
    assert "| 36 | 4 (old) | 9.0 |" in row(
        TASK, [*(each._replace(commit="old") for each in ours), *newer, *theirs]
    )
    # There is nothing to compare where our first point is there.
    nothing = [Result("sb3", TASK, 0, [(36.0, 2, 4.0)])]
    assert row(TASK, ours + nothing).endswith("| 36 | 1 | - |")
    theirs = [Result("sb3", TASK, 0, [(36.0, 2, 200.0)])]
    assert row(TASK, ours + theirs).endswith("| inf | not reached |")
    theirs = [Result("sb3", TASK, 0, [(36.0, 2, 90.0)], "", "another")]
    assert row(TASK, ours + theirs).endswith("| 90 (1) | | | |")
    theirs += [Result("sb3", TASK, 1, [(8.0, 2, 90.0)])]
    assert row(TASK, ours + theirs).endswith("| 90 (2) | 8 | 4 | 2.0 |")
    assert row(TASK, ours) is row("Acrobot-v1", ours + theirs) is None
    assert Result("ours", TASK, 0, []).final == float("-inf")


def test_the_end_of_a_training_is_its_result(monkeypatch, tmp_path):
    told = [Progress(n / 10, n * 1000, None if n < 7 else n / 3) for n in range(260)]

    def run_turn(command, is_enough, limit_s):
        assert command[1:] == ["-m", "bench.peers.run_defaults", "ours", TASK, "150000", "3"]
        assert not is_enough(Turn(told[:150]))
        assert is_enough(Turn(told[:151]))
        return Turn(told)

    monkeypatch.setattr(beside_sb3, "run_turn", run_turn)
    result = beside_sb3.train("ours", TASK, 3, tmp_path)
    assert result.curve[-1] == (25.9, 259_000, 86.333)
    assert 100 <= len(result.curve) <= 200
    monkeypatch.setattr(beside_sb3, "run_turn", lambda *_: Turn(told[:5]))
    with pytest.raises(RuntimeError, match="without an end"):
        beside_sb3.train("ours", TASK, 3, tmp_path)
