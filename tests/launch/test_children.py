"""Processes end by themselves, when they are asked, or when they are not asked any more."""

import resource
import signal
import subprocess
import sys
import time

import pytest

from impala_async.errors import StartError
from impala_async.launch.children import end_in_time, exit_code, spawn
from impala_async.processes import Lifeline
from tests.launch.fake_doors import events, make_doors


@pytest.fixture
def lifeline():
    made = Lifeline()
    yield made
    made.close()


def begun(lifeline, text):
    make_doors(door=f"{text}\nhear()\nnote()\nwait_for(lambda: False)")
    process = spawn("door", ["--flag"], lifeline)
    give_up_at = time.monotonic() + 20
    while not events("door"):
        assert time.monotonic() < give_up_at
        time.sleep(0.005)
    return process


@pytest.mark.parametrize(
    ("does", "code"),
    [("", 143), ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", 7),
     ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", 137)],
)  # fmt: skip
def test_a_process_is_asked_to_end_and_then_made_to(monkeypatch, lifeline, does, code):
    monkeypatch.setattr("impala_async.launch.children.ASKED_END_S", 1.0)
    process = begun(lifeline, does)
    end_in_time([process], 0.0)
    assert exit_code(process.returncode) == code


def test_one_that_hurries_waits_for_nothing(lifeline):
    process = begun(lifeline, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    started = time.monotonic()
    end_in_time([process], 60.0, lambda: True, asked_s=60.0)
    assert time.monotonic() - started < 30.0
    assert process.returncode == -signal.SIGKILL


def test_one_that_ends_by_itself_is_not_asked(lifeline):
    made = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.2); exit(5)"])
    end_in_time([made], 60.0)
    assert made.returncode == 5


def test_a_process_that_the_system_does_not_give_may_be_tried_again(monkeypatch, lifeline):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(StartError, match="process of the door: Too many open files") as caught:
            spawn("door", [], lifeline)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.exit_code == 75
    monkeypatch.setattr("sys.executable", "nothing")
    with pytest.raises(StartError, match="cannot start a process of the door: No such file"):
        spawn("door", [], lifeline)
