"""A learner that is a child, behind a fake door: how it begins, and every way in which it ends."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from impala_async.launch import local
from impala_async.replay.learner import StartedLearner
from tests.e2e.zygote import children

LEARNER = """
import json, os, signal, sys, time
from pathlib import Path

told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
found = [sys.argv[1:], os.environ["PORTS"], os.environ["OMP_NUM_THREADS"]]
Path("flags").write_text(json.dumps(found))
give_up_at = time.monotonic() + 20
while not told and not Path("end").exists() and time.monotonic() < give_up_at:
    time.sleep(0.005)
sys.exit(3 if told else 5)
"""


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StartedLearner:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "ASKED_END_S", 2.0)
    package = Path("impala_async")
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "learner.py").write_text(LEARNER)
    started = StartedLearner(["--flag", "1"], {"PORTS": "7"})
    give_up_at = time.monotonic() + 10
    while not Path("flags").exists():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)
    return started


def test_it_gets_its_flags_and_ends_when_it_is_asked_to(learner: StartedLearner) -> None:
    assert learner.is_running
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    assert json.loads(Path("flags").read_text()) == [["--flag", "1"], "7", threads]
    assert learner.end(0.0) == 3
    assert not learner.is_running
    assert children() == []


def test_one_that_ends_by_itself_is_let_to(learner: StartedLearner) -> None:
    Path("end").touch()
    assert learner.end(10.0) == 5


def test_one_that_does_not_is_asked_in_the_end(learner: StartedLearner) -> None:
    assert learner.end(0.05) == 3


def test_one_that_died_has_the_code_of_a_shell(learner: StartedLearner) -> None:
    (child,) = children()
    child.send_signal(signal.SIGKILL)
    assert learner.end(10.0) == 137


def test_one_that_has_not_begun_is_killed(learner: StartedLearner) -> None:
    learner.kill()
    assert not learner.is_running
    assert learner.end(0.0) == 137
