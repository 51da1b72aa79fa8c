"""The end of a run: its summary, quantiles of a histogram, the table, the picture."""

import errno
import json
import os
import subprocess
import sys
import threading
import tracemalloc
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot as plt

from impala_async import output
from impala_async.metrics.names import DROP_REASONS
from impala_async.metrics.report import ADVICE
from impala_async.output import Wait
from impala_async.runs import summary as summary_module
from impala_async.runs.folder import RunFolder
from impala_async.runs.summary import (
    DRAWN,
    describe,
    draw_at_end,
    lag_quantiles,
    read_reports,
    summarise,
)
from tests.learner.columns import small_schema
from tests.learner.server_harness import config_of

ENDED = {"env_id": "A $b$ c$", "mean_return": None, "episodes": 0}
REPORT = {
    "env_steps_trained": 900,
    "updates": 9,
    "time_s": 5.5,
    "mean_return": 1.5,
    "episodes/count": 12,
    "trajectories/rejected": 3,
    "rejected/nonfinite": 2,
    "rejected/stale": 1,
    "rejected/invalid": 0,
    "learner/starved_total_s": 0.25,
    "num_actors": 2,
    **{f"dropped/{reason}": number for number, reason in enumerate(DROP_REASONS)},
}


def summary_of(env_id="tests:None", config=None, report=REPORT, **changes):
    arguments = {
        "exit_reason": "env_steps",
        "wall_s": 4.0,
        "env_steps_since": 600,
        "lag_histogram": [1, 1],
        "mean_return": 475.5,
        "best_evaluated": None,
        "verdict": "learner: busy",
    }
    config = config or config_of(small_schema(), env={"id": env_id})
    return summarise(config, report, **{**arguments, **changes})


def table_of(summary, goal=None, is_resumed=False):
    return describe(summary, goal, is_resumed=is_resumed)


def test_a_start_that_had_nothing_to_learn_was_held_up_by_nobody():
    for reason, wall_s, says in (
        ("mean_return", 0.0, "nothing: the run had come to its end before this start"),
        ("mean_return", 4.0, "learner: busy"),
        ("terminated", 0.0, "learner: busy"),
    ):
        assert summary_of(exit_reason=reason, wall_s=wall_s)["bottleneck"] == says
    # A first start may reach its goal before its first update.
    first = summary_of(exit_reason="mean_return", wall_s=0.0, report=REPORT | {"updates": 0})
    assert first["bottleneck"] == "learner: busy"


def test_the_best_return_is_told_with_its_kind_of_actions():
    summary = summary_of(best_evaluated=(7.5, "ckpt-1-2", "sampled"))
    found = [summary[f"best_{what}"] for what in ("eval_return", "eval_actions", "checkpoint")]
    assert found == [7.5, "sampled", "ckpt-1-2"]
    assert summary_of()["best_eval_actions"] is None


def test_a_summary_has_what_others_read():
    summary = summary_of()
    told = {
        **{"exit_reason": "env_steps", "env_steps_trained": 900, "updates": 9, "num_actors": 2},
        **{"wall_s": 4.0, "run_s": 5.5, "env_steps_per_s": 150.0, "frames_per_s": 150.0},
        **{"mean_return": 475.5, "mean_return_100": 475.5, "episodes": 12, "rejected": 3},
        **{"lag_quantiles": [0, 0, 0, 1, 1], "starved_total_s": 0.25},
        "dropped": {"stale": 0, "nonfinite_update": 1, "shutdown": 2},
        "rejections": {"nonfinite": 2, "stale": 1, "invalid": 0},
        **{"bottleneck": "learner: busy", "advice": ADVICE["learner"]},
    }
    assert {key: summary[key] for key in told} == told
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary_of("ALE/Pong-v5")["frames_per_s"] == 600.0
    assert summary_of(report=REPORT | {"actor/agents_per_step": 3.0})["frames_per_s"] == 50.0
    # Without an update there is no rate.
    summary = summary_of(wall_s=0.0, env_steps_since=0, lag_histogram=[], mean_return=None)
    none = {"env_steps_per_s": 0.0, "lag_quantiles": [], "mean_return_100": None}
    assert {key: summary[key] for key in none} == none
    assert summary["mean_return"] == 1.5


@pytest.mark.parametrize(
    ("schedule", "end", "since"),
    [(None, None, None), (900, None, None), (800, None, 800), (800, 850, 800), (800, 800, None)],
)
def test_steps_at_a_rate_of_0_are_told(schedule, end, since):
    """Steps of the last batch beyond a run's end are not told."""
    rates = {"lr_end": 0.0, "schedule_env_steps": schedule} if schedule else {}
    config = config_of(small_schema(), algorithm=rates, stop={"env_steps": end})
    summary = summary_of(config=config)
    assert summary["lr_is_0_since"] == since
    assert ("0 since env step 800: nothing was learned" in table_of(summary)) == (since == 800)


def test_a_summary_as_a_table():
    whole = summary_of() | {"env_steps_trained": 123456, "lag_quantiles": [0, 1, 2, 3, 9]}
    whole["advice"] = ADVICE["copy"]
    assert table_of(whole, 476.0).splitlines() == [
        "tests:None: ended (env_steps)",
        "  mean return of 12 episodes  475.5",
        "  env steps trained           123,456",
        "  updates                     9",
        "  seconds of training         4.0",
        "  env steps per second        150",
        "  lag, median (largest)       2 (9) updates",
        "  trajectories dropped        3 (1 nonfinite_update, 2 shutdown)",
        "  trajectories refused        3 (2 nonfinite, 1 stale)",
        "  what limits it              learner: busy",
        f"  what may help               {ADVICE['copy']}",
    ]
    # A run that was over at once has no rate.
    at_once = table_of(whole | {"env_steps_per_s": 0.0, "rejections": {"stale": 12345}})
    assert "  env steps per second        -\n" in at_once
    assert "  trajectories refused        12,345 (12,345 stale)\n" in at_once
    # Figures of a resumed run that are of this start alone say so.
    resumed = table_of(whole, is_resumed=True).splitlines()
    marked = [line.split()[0] for line in resumed if ", this start " in line]
    assert marked == ["seconds", "env", "lag,", "what"]
    # A long advice goes on below, where it began.
    *_, last = table_of(whole | {"advice": ADVICE["environment"]}).splitlines()
    assert last == " " * 30 + "its resets take long, env.num_spares"
    # The best checkpoint is named, where there were evaluations.
    evaluated = summary_of(best_evaluated=(498.25, "best/ckpt-1-7", "greedy"))
    assert evaluated["best_checkpoint"] == "best/ckpt-1-7"
    assert "\n  best evaluation             498 (best/ckpt-1-7)\n" in table_of(evaluated)
    # A run without updates, and one with a frame skip.
    nothing = {"mean_return": None, "lag_quantiles": [], "advice": None, "frames_per_s": 600.0}
    shown = table_of(summary_of() | nothing)
    assert "env steps per second        150 (600 frames)" in shown
    assert "lag, median (largest)       -" in shown
    assert "what may help" not in shown


@given(st.lists(st.integers(0, 6), max_size=60))
def test_quantiles_are_values_that_occurred(lags):
    ordered = sorted(lags)
    places = [round(q / 100 * (len(lags) - 1)) for q in (0, 10, 50, 90, 100)]
    got = lag_quantiles(np.bincount(lags, minlength=9).tolist())
    assert got == [ordered[place] for place in places if lags]
    assert lag_quantiles([]) == []


def report(steps, **changes):
    values = {
        "env_steps_trained": steps,
        "episodes/return_mean": steps / 10,
        "mean_return_100": steps / 20,
        "lag/mean": 1.5,
    }
    return json.dumps(values | changes)


def write(folder, *lines):
    metrics = folder / "metrics.jsonl"
    metrics.write_text("\n".join(lines) + "\n", errors="surrogateescape")
    return metrics


@pytest.fixture
def lines_of(tmp_path, monkeypatch):
    """Draws reports, and returns what is drawn: the points of each line by its name."""
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)

    def draw(*lines, goal=None):
        write(tmp_path, *lines)
        picture = tmp_path / "learning_curve.png"
        assert draw_at_end(ENDED, RunFolder(tmp_path), goal) == str(picture)
        assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        top, bottom = kept[-1].axes
        lines = {line.get_label(): line for line in top.lines} | {"lag": bottom.lines[0]}
        found = {name: [*zip(*line.get_data(), strict=True)] for name, line in lines.items()}
        markers = {line.get_marker() for line in top.lines}
        return found | {"title": top.get_title(), "markers": markers}

    yield draw
    monkeypatch.undo()
    plt.close("all")


# -------------------- the picture


def test_returns_their_mean_the_goal_and_the_lag_are_drawn(lines_of):
    drawn = lines_of(report(100), report(200), goal=475.0)
    assert drawn["interval"] == [(100, 10), (200, 20)]
    assert drawn["last 100 episodes"] == [(100, 5), (200, 10)]
    assert drawn["lag"] == [(100, 1.5), (200, 1.5)]
    assert {y for _, y in drawn["goal"]} == {475.0}
    assert drawn["title"] == "A $b$ c$"


def test_a_single_report_is_a_point_that_is_seen(lines_of):
    assert lines_of(report(100))["markers"] == {"."}
    assert lines_of(report(100), report(200))["markers"] == {"None"}


def test_evaluations_are_drawn_at_the_steps_of_their_weights(lines_of):
    newest = {"evaluate/greedy_return": 30.0, "evaluate/env_steps": 50}
    drawn = lines_of(report(100), report(200, **newest), report(300, **newest))
    assert {*drawn["evaluation, greedy"]} == {(50, 30.0)}
    assert "evaluation, sampled" not in drawn


def test_evaluations_are_drawn_where_no_episode_ended(lines_of):
    def evaluated(steps):
        values = {"env_steps_trained": steps, "lag/mean": 0.5}
        return json.dumps(values | {"evaluate/greedy_return": 7.0, "evaluate/env_steps": steps})

    drawn = lines_of(evaluated(100), evaluated(200))
    assert drawn["evaluation, greedy"] == [(100, 7), (200, 7)]
    assert "interval" not in drawn


def test_what_is_not_known_yet_damage_and_what_a_resumed_run_did_again_are_passed_over(lines_of):
    damage = ["[1]", "\udcff", "[" * 100_000, report(1)[:9]]
    steps = [report(2, env_steps_trained=wrong) for wrong in ("x", 10**400)]
    others = [report(2, **{name: "x"}) for name in ("episodes/return_mean", "lag/mean")]
    lost = [report(7), report(9)]
    early = report(1, mean_return_100=None)
    drawn = lines_of(early, *damage, *steps, *others, *lost, report(4), report(4), report(8))
    assert [step for step, _ in drawn["interval"]] == [1, 2, 4, 4, 8]
    # The rest of a damaged report is drawn.
    assert [step for step, _ in drawn["last 100 episodes"]] == [2, 2, 4, 4, 8]
    assert [step for step, _ in drawn["lag"]] == [1, 2, 4, 4, 8]
    assert "goal" not in drawn


def test_a_file_that_is_large_is_not_kept_in_memory(tmp_path):
    metrics = write(tmp_path, *(report(number, text="x" * 1000) for number in range(30_000)))
    # A hole, as a crash of the machine may leave it.
    os.truncate(metrics, metrics.stat().st_size + (200 << 20))
    with metrics.open("a") as file:
        file.write(f"\n{report(40_000)}\n")
    tracemalloc.start()
    try:
        reports = read_reports(metrics, DRAWN)
        assert tracemalloc.get_traced_memory()[1] < 40e6
    finally:
        tracemalloc.stop()
    assert len(reports) == 30_001
    assert reports[-1].keys() < DRAWN


def test_without_episodes_there_is_no_picture_and_a_pipe_is_not_waited_for(tmp_path):
    metrics = tmp_path / "metrics.jsonl"

    def check(why="no report had an episode that ended, or an evaluation", ended=ENDED):
        assert draw_at_end(ended, RunFolder(tmp_path), None) == f"none, as {why}"

    for lines in ([], [""], ['{"torn'], [report(0, **{"episodes/return_mean": None})]):
        write(tmp_path, *lines)
        check()
    # Those that had one found no room on the disk.
    why = f"no report with an episode that ended is in {metrics}"
    check(why, {"env_id": "Pole", "mean_return": 21.3, "episodes": 12})
    metrics.unlink()
    check(f"{metrics} is gone")
    os.mkfifo(metrics)
    check(f"{metrics} is gone")
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


# -------------------- at the end of a run


def test_what_is_drawn_is_named_and_told_of_and_what_matplotlib_cannot_do(tmp_path, monkeypatch):
    is_told = threading.Event()
    said, titles = [], []

    def say(line):
        said.append(line.partition(" (")[0])
        is_told.set()

    write(tmp_path, report(100))

    def draw(reports, title, goal):
        assert is_told.wait(30)
        titles.append(title)
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no matplotlibrc")

    monkeypatch.setattr(output, "Wait", partial(Wait, after_s=0.0))
    monkeypatch.setattr(summary_module.logger, "info", say)
    monkeypatch.setattr(summary_module, "draw_learning_curve", draw)
    for ended in (ENDED, {"env_id": "Pole", "mean_return": 21.3, "episodes": 12}):
        curve = draw_at_end(ended, RunFolder(tmp_path), None)
        assert curve.startswith("cannot be drawn: UnicodeDecodeError: ")
    assert titles == ["A $b$ c$", "Pole: mean return 21.3 (12 episodes)"]
    assert set(said) == {"ending: drawing the learning curve, with matplotlib"}


def test_a_backend_of_the_users_is_not_looked_for(tmp_path):
    write(tmp_path, report(100), report(200))
    script = (
        "from impala_async.runs.summary import *; from impala_async.runs.folder import RunFolder;"
        f"print(draw_at_end({ENDED}, RunFolder(Path({str(tmp_path)!r})), None))"
    )
    env = {**os.environ, "MPLBACKEND": "nonsense"}
    done = subprocess.check_output([sys.executable, "-c", script], env=env, text=True)
    assert done.strip() == str(tmp_path / "learning_curve.png")


def test_on_a_full_disk_the_picture_of_before_stays_and_that_is_told(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left")

    write(tmp_path, report(100))
    (tmp_path / "learning_curve.png").write_text("before")
    monkeypatch.setattr(os, "fsync", full)
    assert draw_at_end(ENDED, RunFolder(tmp_path), None) == "cannot be written: No space left"
    assert (tmp_path / "learning_curve.png").read_text() == "before"
    assert len(os.listdir(tmp_path)) == 2
