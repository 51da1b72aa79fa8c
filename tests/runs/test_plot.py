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
from impala_async.runs.plot import _without_lost_branches, draw_learning_curve, read_reports


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
    metrics.write_text("\n".join(lines) + end)
    return metrics


def size_of(picture):
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


SUMMARY = {"env_id": "Pole", "mean_return": None, "episodes": 0}


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
            plot.draw_at_end(SUMMARY, RunFolder(tmp_path), None, 130)
        assert end.value.code == 130
        assert capfd.readouterr().err == "learning curve: left out, as a signal came\n"
        assert signal.getsignal(number) == before


def test_what_matplotlib_cannot_do_is_told(tmp_path, monkeypatch):
    def draw(*paths, **how):
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no matplotlibrc")

    monkeypatch.setattr(plot, "draw_learning_curve", draw)
    said = plot.draw_at_end(SUMMARY, RunFolder(tmp_path), None, 0)
    assert said.startswith("cannot be drawn: UnicodeDecodeError: ")


def test_a_backend_of_the_users_is_not_looked_for(tmp_path):
    write(tmp_path, report(100), report(200))
    script = (
        "from impala_async.runs.plot import *; from impala_async.runs.folder import RunFolder;"
        f"print(draw_at_end({SUMMARY}, RunFolder(Path({str(tmp_path)!r})), None, 0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "MPLBACKEND": "nonsense"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(tmp_path / "learning_curve.png")


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
    assert plot.draw_at_end(SUMMARY, RunFolder(tmp_path), None, 0) == "no report to draw"
    assert set(said) == {"ending: drawing the learning curve, with matplotlib"}


def test_a_picture_is_drawn(tmp_path):
    metrics = write(tmp_path, *(report(n) for n in range(0, 1000, 100)))
    picture = draw_learning_curve(metrics, tmp_path / "curve.png")
    assert picture == tmp_path / "curve.png"
    width, height = size_of(picture)
    assert width > height > 500


def test_on_a_full_disk_the_picture_of_before_stays_and_that_is_told(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left")

    write(tmp_path, report(100), report(200))
    picture = tmp_path / "learning_curve.png"
    assert plot.draw_at_end(SUMMARY, RunFolder(tmp_path), None, 0) == str(picture)
    before = picture.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    said = plot.draw_at_end(SUMMARY, RunFolder(tmp_path), None, 0)
    assert said == "cannot be written: No space left"
    assert picture.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {picture.name, "metrics.jsonl"}


@pytest.mark.parametrize(
    "lines",
    [
        # Before 100 episodes, before the first lag, with nothing in an interval.
        [report(1, mean_return_100=None)],
        [report(1, mean_return_100=None, **{"lag/mean": None}), report(2)],
        [report(1), report(2, **{"episodes/return_mean": None}), report(3)],
        ['{"env_steps_trained": 5}', report(6)],
    ],
)
def test_what_is_not_known_yet_is_left_out(tmp_path, lines):
    picture = draw_learning_curve(write(tmp_path, *lines), tmp_path / "curve.png")
    assert picture is not None
    size_of(picture)


def test_damage_is_passed_over(tmp_path):
    damage = ["[1]", "\udcff", "[" * 100_000, report(1)[:9]]
    wrong = [report(2, **{key: "x"}) for key in json.loads(report(1))]
    wrong += [report(3, **{key: 10**400}) for key in json.loads(report(1))]
    metrics = tmp_path / "metrics.jsonl"
    lines = "\n".join([report(1), *damage, *wrong, report(4)])
    metrics.write_bytes(lines.encode(errors="surrogateescape"))
    picture = draw_learning_curve(metrics, tmp_path / "curve.png")
    assert picture is not None
    size_of(picture)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert draw_learning_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png") is None


def test_two_runs_do_not_look_the_same(tmp_path):
    pictures = []
    for slope in (1, -1):
        metrics = write(tmp_path, *(report(n, mean_return_100=slope * n) for n in range(5)))
        picture = draw_learning_curve(metrics, tmp_path / f"{slope}.png")
        assert picture is not None
        pictures.append(picture.read_bytes())
    assert pictures[0] != pictures[1]


def test_it_has_a_title_and_a_line_at_the_goal(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    metrics = write(tmp_path, *(report(n) for n in range(5)))
    for goal in (None, 475.0):
        draw_learning_curve(metrics, tmp_path / "curve.png", title="A $b$ c$", goal=goal)
    monkeypatch.undo()
    plain, with_goal = (figure.axes[0] for figure in kept)
    assert plain.get_title() == with_goal.get_title() == "A $b$ c$"
    (line,) = (line for line in with_goal.lines if line.get_label() == "goal")
    assert set(line.get_ydata()) == {475.0}
    assert line.get_linestyle() == "--"
    assert len(with_goal.lines) == len(plain.lines) + 1
    assert with_goal.get_ylim()[1] > 475.0
    plt.close("all")


def test_a_torn_last_line_is_passed_over(tmp_path):
    metrics = write(tmp_path, report(1), report(2), report(3)[:20], end="")
    assert [r["env_steps_trained"] for r in read_reports(metrics)] == [1, 2]
    assert draw_learning_curve(metrics, tmp_path / "curve.png") is not None


@pytest.mark.parametrize(
    "lines", [[], [""], ['{"torn'], [report(0, **{"episodes/return_mean": None})]]
)
def test_without_episodes_there_is_no_picture(tmp_path, lines):
    assert draw_learning_curve(write(tmp_path, *lines), tmp_path / "curve.png") is None
    assert not (tmp_path / "curve.png").exists()


def test_without_metrics_there_is_no_picture(tmp_path):
    assert read_reports(tmp_path / "none.jsonl") == []
    assert draw_learning_curve(tmp_path / "none.jsonl", tmp_path / "curve.png") is None


def test_what_a_resumed_run_did_again_is_drawn_once():
    steps = [100, 200, 300, 150, 250, 250, 400]
    reports = [{"env_steps_trained": step, "n": n} for n, step in enumerate(steps)]
    assert [report["n"] for report in _without_lost_branches(reports)] == [0, 3, 4, 5, 6]
