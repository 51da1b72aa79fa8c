import errno
import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest
from matplotlib import pyplot as plt

from impala_async import output
from impala_async.output import Wait
from impala_async.runs import plot
from impala_async.runs.folder import RunFolder
from impala_async.runs.plot import draw_learning_curve, read_reports

SUMMARY = {"env_id": "Pole", "mean_return": None, "episodes": 0}


def report(steps, **changes):
    values = {
        "env_steps_trained": steps,
        "episodes/return_mean": steps / 10,
        "mean_return_100": steps / 20,
        "lag/mean": 1.5,
    }
    return json.dumps(values | changes)


def write(folder, *lines, end="\n"):
    metrics = folder / "metrics.jsonl"
    metrics.write_text("\n".join(lines) + end, errors="surrogateescape")
    return metrics


def points_of(line):
    return list(zip(*line.get_data(), strict=True))


@pytest.fixture
def lines_of(tmp_path, monkeypatch):
    """Draws reports, and returns what is drawn: the points of each line by its name."""
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)

    def draw(*lines, **how):
        picture = tmp_path / "curve.png"
        assert draw_learning_curve(write(tmp_path, *lines), picture, **how) == picture
        content = picture.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
        assert width > height > 500
        top, bottom = kept[-1].axes
        found = {line.get_label(): [*zip(*line.get_data(), strict=True)] for line in top.lines}
        lag = [
            tuple(point) for line in bottom.lines for point in zip(*line.get_data(), strict=True)
        ]
        return found | {"lag": lag, "title": top.get_title()}

    yield draw
    monkeypatch.undo()
    plt.close("all")


# -------------------- the picture


def test_returns_their_mean_the_goal_and_the_lag_are_drawn(lines_of):
    drawn = lines_of(report(100), report(200), title="A $b$ c$", goal=475.0)
    assert drawn["interval"] == [(100, 10), (200, 20)]
    assert drawn["last 100 episodes"] == [(100, 5), (200, 10)]
    assert drawn["lag"] == [(100, 1.5), (200, 1.5)]
    assert {y for _, y in drawn["goal"]} == {475.0}
    assert drawn["title"] == "A $b$ c$"
    assert "goal" not in lines_of(report(100))


def test_what_is_not_known_yet_is_left_out(lines_of):
    early = report(1, mean_return_100=None, **{"lag/mean": None})
    drawn = lines_of(early)
    assert "last 100 episodes" not in drawn
    assert drawn["lag"] == []
    quiet = report(2, **{"episodes/return_mean": None})
    drawn = lines_of('{"env_steps_trained": 5}', early, quiet, report(3))
    assert [steps for steps, _ in drawn["interval"]] == [1, 3]
    assert [steps for steps, _ in drawn["last 100 episodes"]] == [3]


def test_damage_is_passed_over(lines_of, tmp_path):
    damage = ["[1]", "\udcff", "[" * 100_000, report(1)[:9]]
    steps = [report(2, env_steps_trained=wrong) for wrong in ("x", 10**400)]
    others = [report(2, **{name: "x"}) for name in ("episodes/return_mean", "lag/mean")]
    drawn = lines_of(report(1), *damage, *steps, *others, report(4))
    assert [step for step, _ in drawn["interval"]] == [1, 2, 4]
    assert [step for step, _ in drawn["lag"]] == [1, 4]
    torn = write(tmp_path, report(1), report(2), report(3)[:20], end="")
    assert [r["env_steps_trained"] for r in read_reports(torn)] == [1, 2]


def test_what_a_resumed_run_did_again_is_drawn_once(lines_of):
    drawn = lines_of(*(report(steps) for steps in (100, 200, 300, 150, 250, 250, 400)))
    assert [steps for steps, _ in drawn["interval"]] == [100, 150, 250, 250, 400]


@pytest.mark.parametrize(
    "lines", [[], [""], ['{"torn'], [report(0, **{"episodes/return_mean": None})]]
)
def test_without_episodes_there_is_no_picture(tmp_path, lines):
    assert draw_learning_curve(write(tmp_path, *lines), tmp_path / "curve.png") is None
    assert not (tmp_path / "curve.png").exists()


def test_without_metrics_there_is_none_and_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    for name in ("none.jsonl", "metrics.jsonl"):
        assert draw_learning_curve(tmp_path / name, tmp_path / "curve.png") is None


# -------------------- at the end of a run


def draw_at_end(folder, code=0):
    return plot.draw_at_end(SUMMARY, RunFolder(folder), None, code)


def test_a_signal_leaves_the_last_picture_out(tmp_path, monkeypatch, capfd):
    def draw(*paths, **how):
        os.kill(os.getpid(), number)

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(plot, "draw_learning_curve", draw)
    monkeypatch.setattr("os._exit", leave)
    for number in (signal.SIGTERM, signal.SIGINT):
        before = signal.getsignal(number)
        with pytest.raises(SystemExit) as end:
            draw_at_end(tmp_path, 130)
        assert end.value.code == 130
        assert capfd.readouterr().err == "learning curve: left out, as a signal came\n"
        assert signal.getsignal(number) == before


def test_what_is_drawn_is_named_and_what_matplotlib_cannot_do_is_told(tmp_path, monkeypatch):
    titles = []

    def draw(*paths, title, **how):
        titles.append(title)
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no matplotlibrc")

    monkeypatch.setattr(plot, "draw_learning_curve", draw)
    whole = {"env_id": "Pole", "mean_return": 21.3, "episodes": 12}
    plot.draw_at_end(whole, RunFolder(tmp_path), None, 0)
    assert titles == ["Pole: mean return 21.3 (12 episodes)"]
    assert draw_at_end(tmp_path).startswith("cannot be drawn: UnicodeDecodeError: ")


def test_a_backend_of_the_users_is_not_looked_for(tmp_path):
    write(tmp_path, report(100), report(200))
    script = (
        "from impala_async.runs.plot import *; from impala_async.runs.folder import RunFolder;"
        f"print(draw_at_end({SUMMARY}, RunFolder(Path({str(tmp_path)!r})), None, 0))"
    )
    env = {**os.environ, "MPLBACKEND": "nonsense"}
    done = subprocess.check_output([sys.executable, "-c", script], env=env, text=True)
    assert done.strip() == str(tmp_path / "learning_curve.png")


def test_drawing_that_takes_long_is_told_of(tmp_path, monkeypatch):
    is_told = threading.Event()
    said = []

    def say(line):
        said.append(line.partition(" (")[0])
        is_told.set()

    def draw(*paths, **how):
        assert is_told.wait(30)

    monkeypatch.setattr(output, "Wait", partial(Wait, after_s=0.0))
    monkeypatch.setattr(plot.logger, "info", say)
    monkeypatch.setattr(plot, "draw_learning_curve", draw)
    assert draw_at_end(tmp_path) == "no report to draw"
    assert set(said) == {"ending: drawing the learning curve, with matplotlib"}


def test_on_a_full_disk_the_picture_of_before_stays_and_that_is_told(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left")

    write(tmp_path, report(100), report(200))
    picture = tmp_path / "learning_curve.png"
    assert draw_at_end(tmp_path) == str(picture)
    before = picture.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    assert draw_at_end(tmp_path) == "cannot be written: No space left"
    assert picture.read_bytes() == before
    assert set(os.listdir(tmp_path)) == {picture.name, "metrics.jsonl"}
