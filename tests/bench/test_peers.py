"""The peers' benchmark reads what runners say, ends all they started, and names who is missing."""

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.peers import measure
from bench.peers.measure import A2C, OURS, RLLIB_APPO, SF, solving, speed_of
from bench.peers.one_turn import Progress, Tail, Turn, run_turn
from bench.peers.say import LAUNCHED_AT, mean_of, say
from bench.peers.table import goal_rows, speed_rows

# Says something, and leaves an orphan in a session of its own that does not listen to SIGTERM.
RUNNER = """
import os, signal, sys, time
from bench.peers.say import say
print("a banner")
with open(f"/dev/shm/torch_{os.getpid()}_1_2", "w"), open(sys.argv[1] + ".parent", "w") as file:
    file.write(str(os.getpid()))
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        with open(sys.argv[1], "w") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(60)
    os._exit(0)
for trained in range(0, 10_000, 100):
    say(trained, trained / 10 if trained >= 200 else None)
    time.sleep(0.02)
"""
TOLD = [(2.0, 0, None), (3.0, 100, None), (4.0, 200, 20.0), (6.0, 800, 480.0), (8.0, 1200, 470.0)]
TURN = Turn([Progress(*told) for told in TOLD], peak_bytes=2_000_000_000)


def test_figures_of_a_turn(monkeypatch):
    assert TURN.start_s() == 3.0
    # From 3 s, when the first was trained, and 1 s to warm up.
    assert TURN.rate(warm_s=1.0) == (1200 - 200) / (8.0 - 4.0)
    assert [TURN.reached_s(goal) for goal in (475, 490)] == [6.0, None]
    assert [TURN.has_trained(for_s) for for_s in (4.5, 5.0)] == [True, False]
    assert Turn(TURN.progress[:1]).start_s() is None
    monkeypatch.setattr(measure, "WARM_S", 1.0)
    assert speed_of(TURN, "it") == {"per_s": 250.0, "start_s": 3.0, "rss_gb": 2.0}
    with pytest.raises(RuntimeError, match="SF has trained on nothing"):
        speed_of(Turn(TURN.progress[:2]), "SF")


def test_all_that_a_runner_started_ends_with_its_turn(tmp_path):
    path = tmp_path / "orphan"
    runner = [sys.executable, "-c", RUNNER, str(path)]
    turn = run_turn(runner, lambda turn: path.exists() and turn.has_trained(0.1), limit_s=30)
    assert not psutil.pid_exists(int(path.read_text()))
    parent = path.with_suffix(".parent").read_text()
    assert not Path(f"/dev/shm/torch_{parent}_1_2").exists()
    assert [each.trained for each in turn.progress[:3]] == [0, 100, 200]
    assert turn.progress[0].elapsed_s > 0
    assert turn.peak_bytes > 1_000_000


def test_a_turn_has_its_time_and_a_runner_that_fails_is_quoted():
    began = time.monotonic()
    turn = run_turn([sys.executable, "-c", "input()"], lambda turn: False, limit_s=0.1)
    assert list(turn.progress) == []
    assert time.monotonic() - began < 10
    with pytest.raises(RuntimeError, match=r"ended with 1:\n(.|\n)*no such thing"):
        run_turn([sys.executable, "-c", "raise OSError('no such thing')"], lambda turn: False, 30)


def test_a_runner_s_words_are_read_by_whole_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(LAUNCHED_AT, str(time.monotonic() - 5))
    say(12, mean_of([1.0] * 50 + [3.0] * 100))
    said = json.loads(capsys.readouterr().out)
    assert 5 <= said["elapsed_s"] < 10
    assert (said["trained"], said["mean_return"]) == (12, 3.0)
    assert mean_of([3.0] * 99) is None
    tail = Tail(tmp_path / "said")
    assert tail.new_lines() == []
    with (tmp_path / "said").open("w") as file:
        for piece, lines in (("one\ntw", ["one"]), ("o", []), ("\n\n", ["two", ""])):
            file.write(piece)
            file.flush()
            assert tail.new_lines() == lines


def test_each_seed_once_and_the_limit_for_one_that_takes_longer(monkeypatch):
    seeds = []
    monkeypatch.setattr(measure, "run_turn", lambda command, *_: seeds.append(command[-1]) or TURN)
    in_six = solving(A2C, Path("/venvs"), limit_s=6.0)
    assert in_six() == in_six() == {"goal_s": 6.0, "in_time": True}
    assert solving(A2C, Path("/venvs"), limit_s=5.0)() == {"goal_s": 5.0, "in_time": False}
    assert seeds == ["0", "1", "0"]


def test_rows_of_speed_and_of_the_goal():
    def samples(*rates):
        return [{"per_s": rate, "start_s": 4.0, "rss_gb": 1.0} for rate in rates]

    rows = speed_rows("CartPole", {OURS.name: samples(90, 50), SF.name: samples(10, 10)})
    by_name = {row.name: row for row in rows}
    assert by_name["CartPole, Sample Factory APPO"].median == 10
    over = by_name["CartPole: impala_async over Sample Factory APPO"]
    assert (over.median, over.smallest, over.largest, over.at_least) == (7, 5, 9, 9)
    assert by_name["CartPole, impala_async: memory"].median == 1.0
    # Without ours there is nothing to compare.
    assert len(speed_rows("Pong", {SF.name: samples(10)})) == 3
    ours = [{"goal_s": 6.0, "in_time": True}] * 2
    late = [{"goal_s": 120.0, "in_time": False}, {"goal_s": 60.0, "in_time": True}]
    goals = goal_rows({OURS.name: ours, A2C.name: ours, RLLIB_APPO.name: late}, 120.0)
    assert [row.name.removeprefix("CartPole to 475") for row in goals] == [
        *(", impala_async", ", SB3 A2C", ", RLlib APPO, 1 of 2 not in 120 s"),
        *(": impala_async over SB3 A2C", ": impala_async over RLlib APPO"),
    ]
    assert (goals[3].is_held, goals[3].at_most) == (True, 1.0)
    assert (goals[4].smallest, goals[4].largest, goals[4].at_most) == (0.05, 0.1, None)
