"""Where reports go: whole lines in metrics.jsonl whatever the disk does, and sinks by name, none of
which keeps a run waiting or ends it."""

import contextlib
import json
import logging
import os
import resource
import sys
import threading
import time
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest

from impala_async.config.run import ReportSection
from impala_async.errors import ConfigError
from impala_async.metrics import sinks as sinks_module
from impala_async.metrics.sinks import ChosenSinks, JsonlSink, Run, TensorBoardSink, WandbSink

# -------------------- metrics.jsonl


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


@contextlib.contextmanager
def file_size_limit(num_bytes):
    """A disk that is full after so many bytes: the write that crosses the line is cut short."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write(sink, *updates):
    for update in updates:
        sink.write({"updates": update})


def read(path):
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line)["updates"] for line in text.splitlines()]


def test_each_report_is_a_line_at_once_by_one_write_also_of_the_next_start(path, monkeypatch):
    written = []
    real_write = os.write

    def spy(fd, line):
        written.append(line)
        return real_write(fd, line)

    monkeypatch.setattr(os, "write", spy)
    report = {"lag/quantiles": [0.0, 1.5], "bottleneck": "learner\nnicht müde"}
    for start in (1, 2):
        sink = JsonlSink(path)
        assert path.exists() == (start == 2)
        sink.write(report)
        assert len(written) == start
        assert path.read_bytes() == b"".join(written)
    assert json.loads(written[0]) == report
    with pytest.raises(ValueError, match="JSON"):
        sink.write({"loss/total": float("nan")})
    assert len(written) == 2


@pytest.mark.parametrize("torn", ["x", '{"updates":', "y" * 200_000])
@pytest.mark.parametrize("whole", ["", '{"updates":1}\n', '{"updates":1}\n' * 9000])
def test_a_torn_last_line_is_cut(path, whole, torn):
    path.write_text(whole + torn)
    write(JsonlSink(path), 2)
    assert path.read_text() == whole + '{"updates":2}\n'


def test_a_full_disk_loses_reports_and_says_so_once_each_time(path, caplog):
    sink = JsonlSink(path)
    with caplog.at_level(logging.INFO):
        for lost in ((0, 1, 2), (5,)):
            path.symlink_to("/dev/full")
            write(sink, *lost)
            path.unlink()
            write(sink, 3, 4)
            assert read(path) == [3, 4]
            path.unlink()
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"] * 2
    assert "No space left" in caplog.messages[0]
    assert "3 lines lost" in caplog.messages[1]
    assert "1 lines lost" in caplog.messages[3]


def test_half_a_line_is_taken_back_and_a_moved_file_or_a_lost_folder_gets_no_more(path, caplog):
    gone = []
    sink = JsonlSink(path, is_gone=lambda: bool(gone))
    write(sink, 1)
    with file_size_limit(path.stat().st_size + 5):
        write(sink, 2)
        assert read(path) == [1]
        assert "5 of 14 bytes" in caplog.text
    write(sink, 3)
    moved = path.rename(path.with_name("moved.jsonl"))
    write(sink, 4)
    gone.append(True)
    write(sink, 5)
    assert (read(moved), read(path)) == ([1, 3], [4])


def test_reports_leave_room_and_come_back(path, monkeypatch, caplog):
    fields = list(os.statvfs("/"))

    def fstatvfs(fd):
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "fstatvfs", fstatvfs)
    reserve = [0]
    sink = JsonlSink(path, reserve=lambda: reserve[0])
    # The last file system does not know how many blocks there are.
    for number, (size, free, kept) in enumerate(
        [(100, 0, 0), (100, 60, 50), (100, 40, 50), (100, 49, 50), (100, 50, 50), (0, 0, 50)]
    ):
        fields[1], fields[2], fields[4], reserve[0] = 1, size, free, kept
        write(sink, number)
    assert read(path) == [0, 1, 4, 5]
    assert caplog.text.count("what is free is left to checkpoints") == 1
    assert "2 lines lost" in caplog.text


def test_a_pipe_that_nobody_empties_is_not_waited_for(path, caplog):
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    sink = JsonlSink(path)
    for number in range(200):
        sink.write({"text": "x" * 1000, "updates": number})
    os.close(reader)
    assert "cannot be written" in caplog.text


# -------------------- sinks by name

MODULE = """
TAKEN = []

class Keeps:
    def __init__(self, run, factor=1):
        self.run, self.factor = run, factor

    def write(self, report):
        TAKEN.append((self.run.run_id, report["updates"] * self.factor))

    def close(self):
        TAKEN.append("closed")

class Empties(Keeps):
    def write(self, report):
        report["lag/quantiles"].clear()
        report.clear()

class Fails(Keeps):
    def write(self, report):
        raise SystemExit("no more")

class FailsToClose(Keeps):
    def close(self):
        raise OSError("not today")

def no_sink(run):
    return run

def breaks(run):
    return {}["key"]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A user's module with sinks of many kinds."""
    (tmp_path / "own_sinks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import own_sinks

    yield own_sinks
    del sys.modules["own_sinks"]


@pytest.fixture
def make(module):
    """Makes sinks from what stands in a config; they are closed at the end."""
    made = []

    def make_chosen(*sinks):
        section = ReportSection.model_validate({"sinks": list(sinks)})
        made.append(ChosenSinks(section, Run(Path("run"), "ab", {}, 0)))
        return made[-1]

    yield make_chosen
    for one in made:
        one.close()


def test_a_sink_of_ones_own_takes_all_reports_in_order(module, make):
    sinks = make({"name": "own_sinks:Keeps", "kwargs": {"factor": 10}})
    for number in range(3):
        sinks.write({"updates": number})
    sinks.close()
    sinks.close()
    assert module.TAKEN == [("ab", 0), ("ab", 10), ("ab", 20), "closed"]


def test_what_is_no_sink_is_told_at_the_start(make, monkeypatch):
    for package in ("tensorboardX", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    for sink, says in (
        ("no_such_module:Sink", "failed to import .*; Python looks for no_such_module among"),
        ("own_sinks:no_sink", r"failed when it was made: AttributeError: .*'write'"),
        ("own_sinks:breaks", r"failed when it was made: KeyError.*own_sinks\.py:\d+\)"),
        ({"name": "own_sinks:Keeps", "kwargs": {"facto": 1}}, "TypeError: .*'facto'"),
        ("tensorboard", r"tensorboard failed .*; pip install 'impala-async\[tensorboard\]'$"),
        ("wandb", r"wandb failed .*; pip install 'impala-async\[wandb\]'$"),
    ):
        with pytest.raises(ConfigError, match=f"^report.sinks: .*{says}"):
            make(sink)


def test_one_that_fails_is_told_of_once_and_the_others_go_on(module, make, caplog):
    names = ("Empties", "Fails", "Keeps", "FailsToClose")
    sinks = make(*(f"own_sinks:{name}" for name in names))
    for number in range(3):
        report = {"updates": number, "lag/quantiles": [0.0, 1.0]}
        sinks.write(report)
        assert report == {"updates": number, "lag/quantiles": [0.0, 1.0]}
    sinks.close()
    assert report == {"updates": 2, "lag/quantiles": [0.0, 1.0]}
    kept = [taken for taken in module.TAKEN if taken != "closed"]
    assert sorted(kept) == [("ab", number) for number in (0, 0, 1, 1, 2, 2)]
    # The one that fails is closed too.
    assert module.TAKEN.count("closed") == 3
    first, second = sorted(record.getMessage() for record in caplog.records)
    assert "own_sinks:Fails failed to take a report" in first
    assert "SystemExit: no more (" in first
    assert first.endswith("; it gets no more reports, and training goes on")
    assert "own_sinks:FailsToClose failed to close" in second


def test_one_that_hangs_keeps_nobody_waiting(module, make, monkeypatch, caplog):
    may_go_on, has_begun = threading.Event(), threading.Event()

    def hang(self, report):
        has_begun.set()
        may_go_on.wait()
        module.TAKEN.append(report["updates"])

    monkeypatch.setattr(module.Keeps, "write", hang)
    monkeypatch.setattr(sinks_module, "CLOSE_WITHIN_S", 0.05)
    monkeypatch.setattr(sinks_module, "MAX_WAITING", 3)
    sinks = make("own_sinks:Keeps")
    sinks.write({"updates": 0})
    assert has_begun.wait(10)
    before = time.monotonic()
    for number in range(1, 9):
        sinks.write({"updates": number})
    sinks.close()
    assert time.monotonic() - before < 5
    assert caplog.messages == [
        "report.sinks: own_sinks:Keeps is too slow, and misses some reports",
        "report.sinks: own_sinks:Keeps has not closed in time, and is left alone",
    ]
    may_go_on.set()
    (thread,) = (one for one in threading.enumerate() if one.name == "own_sinks:Keeps")
    thread.join(10)
    # The oldest of those that waited gave way, the last of all to the end itself.
    assert module.TAKEN == [0, 7, 8, "closed"]


# -------------------- TensorBoard and Weights & Biases

REPORT = {
    "env_steps_trained": 640,
    "mean_return": 21.5,
    "loss/total": None,
    "bottleneck": "actors: there is none",
    "lag/quantiles": [0.0, 1.0],
    "user/surprise": 0.25,
}
NUMBERS = {"env_steps_trained": 640, "global_step": 640, "time/total_timesteps": 640}
NUMBERS |= {"mean_return": 21.5, "rollout/ep_rew_mean": 21.5, "user/surprise": 0.25}


def test_numbers_are_written_by_env_steps_beside_those_of_earlier_starts(tmp_path, monkeypatch):
    played = MagicMock()
    monkeypatch.setitem(sys.modules, "tensorboardX", played)
    folder = str(tmp_path / "tensorboard")
    for env_steps, purged in ((0, None), (640, 640)):
        sink = TensorBoardSink(Run(tmp_path, "ab", {}, env_steps), flush_secs=9)
        sink.write(REPORT)
        sink.close()
        writer = call.SummaryWriter(logdir=folder, purge_step=purged, flush_secs=9)
        written = [call.SummaryWriter().add_scalar(name, n, 640) for name, n in NUMBERS.items()]
        assert played.mock_calls[0] == writer
        assert sorted(played.mock_calls[1:-1]) == sorted(written)
        assert played.mock_calls[-1] == call.SummaryWriter().close()
        played.reset_mock()


RUN = Run(Path("runs/first"), "ab" * 16, {"seed": 3}, 0)


def test_a_run_begins_with_the_first_report_and_is_finished(monkeypatch):
    played = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", played)
    sink = WandbSink(RUN, tags=["small"], project="mine")
    sink.close()
    assert not played.mock_calls
    for _ in range(2):
        sink.write(REPORT)
    sink.close()
    usual = {"name": "first", "id": "ab" * 16, "resume": "allow", "dir": "runs/first"}
    told = {"config": {"seed": 3}, "settings": {"console": "off"}}
    begun = call.init(**usual, **told, project="mine", tags=["small"])
    run = call.init()
    named = run.define_metric("*", step_metric="env_steps_trained")
    assert played.mock_calls == [begun, named, run.log(NUMBERS), run.log(NUMBERS), run.finish()]
