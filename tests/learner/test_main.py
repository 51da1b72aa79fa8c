"""The learner's door: a start that has too few descriptors, and an end beneath a thread at work."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from impala_async import learner
from impala_async.learner import __main__ as door
from impala_async.wire import connections

# An interpreter that ends beneath such a thread is aborted by torch.
DIES_AT_WORK = """
import runpy, threading, time, torch
from impala_async import doors

def compute():
    weights = torch.ones(800, 800, requires_grad=True)
    while True:
        (weights @ weights).relu().sum().backward()

def run_door(body):
    threading.Thread(target=compute, daemon=True).start()
    time.sleep(0.3)
    print("last words", end="")
    return 70

doors.run_door = run_door
runpy.run_module("impala_async.learner", run_name="__main__")
"""
NEEDS = "a learner needs 64 and two for each actor: raise ulimit -n"


def start(path: Path) -> int:
    return door.main(["--run-dir", str(path), "--set", "env.id=CartPole-v1"])


def test_a_limit_that_is_too_low_is_one_line_and_leaves_nothing(tmp_path):
    """A real limit, which no process may raise again."""
    command = f"ulimit -n 48; exec {sys.executable} -m impala_async.learner --run-dir run"
    root = Path(learner.__file__).parents[2]
    done = subprocess.run(
        ["sh", "-c", f"{command} --set env.id=CartPole-v1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    says = f"error: only 48 files and sockets may be open in this process; {NEEDS}\n"
    assert (done.returncode, done.stderr) == (2, says)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "is_short"),
    [
        (OSError(errno.EMFILE, "Too many open files"), True),
        (OSError(errno.ENFILE, "Too many open files in system"), True),
        (zmq.ZMQError(errno.EMFILE), True),
        (OSError(errno.EIO, "Input/output error"), False),
        (MemoryError("of a tensor"), False),
    ],
    ids=["of the process", "of the system", "of ZeroMQ", "disk", "memory"],
)
def test_a_start_that_dies_leaves_nothing_and_is_one_line_where_it_lacks_descriptors(
    tmp_path, monkeypatch, capsys, error, *, is_short
):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(connections, "most_descriptors", lambda: 64)
    monkeypatch.setattr(door, "begin_probe", fail)
    assert start(tmp_path / "run") == (2 if is_short else 70)
    said = capsys.readouterr().err
    if is_short:
        assert said == f"error: no more files and sockets can be opened ({error}); {NEEDS}\n"
    assert str(error) in said
    assert os.listdir(tmp_path) == []


def test_a_run_that_dies_in_the_middle_of_an_update_keeps_its_exit_code():
    root = Path(learner.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", DIES_AT_WORK],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (70, "last words", "")
