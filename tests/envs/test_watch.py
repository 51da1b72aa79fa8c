import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from impala_async.envs import faults
from impala_async.envs.faults import RUNNING, Blame, Watch, hang_now

HANGING = """
import ctypes, sys, time
from impala_async.envs import faults
from impala_async.envs.faults import Blame, Watch

faults.LOOK_EVERY_S = 0.05
# The timer that ends who holds the lock must not be faster on a busy machine where nobody does.
faults.LOCK_GRACE_S = 30.0 if sys.argv[1] == "free" else 0.3
watch = Watch(print, whose=lambda: "actor 2 (Some-v1)")
watch.limit(0.2)
watch.start()

def hanging_simulator():
    with_the_lock = ctypes.PyDLL(None)
    time.sleep(60) if sys.argv[1] == "free" else with_the_lock.sleep(60)

with Blame("Some-v1", "in step", 4):
    hanging_simulator()
"""


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(faults.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    yield
    RUNNING.call = None
    RUNNING.place[0] = 0


class Watched:
    """A watch whose clock is set, looked at each half second from 0 on."""

    def __init__(self, limit_s: float | None = None) -> None:
        self.told: list[str] = []
        self.ended: list[str] = []
        self.now = 0.0
        self.watch = Watch(
            self.told.append,
            whose=lambda: "actor 2",
            end=self.ended.append,
            clock=lambda: self.now,
        )
        if limit_s is not None:
            self.watch.limit(limit_s)

    def look_until(self, second: float) -> None:
        while self.now < second:
            self.now += 0.5
            self.watch.look()


def test_a_step_that_hangs_is_told_of_by_environment_actor_and_seconds() -> None:
    watched = Watched()
    RUNNING.call = (Blame("Some-v1", "in step", 4), 0.0)
    RUNNING.place[0] = 4
    watched.look_until(21)
    assert watched.told == [
        "environment 3 of actor 2 has been in step for 10 s",
        "environment 3 of actor 2 has been in step for 20 s",
    ]
    # The next call has a time of its own.
    RUNNING.call = (Blame("Some-v1", "in step", 4), 21.0)
    watched.look_until(30)
    assert len(watched.told) == 2


def test_of_a_vector_it_is_not_known_which_one() -> None:
    watched = Watched()
    blame = Blame("Some-v1", "in step", 4)
    blame.first = 8
    RUNNING.call = (blame, 0.0)
    watched.look_until(10)
    assert watched.told == ["one of environments 8 to 11 of actor 2 has been in step for 10 s"]


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("in reset", "environment 0 of actor 2 has been in reset for 3 s"),
        ("to be made", "Some-v1 has taken 3 s so far to be made"),
    ],
)
def test_a_start_is_told_of_earlier(where: str, line: str) -> None:
    watched = Watched()
    RUNNING.call = (Blame("Some-v1", where), 0.0)
    watched.look_until(3)
    assert watched.told == [line]
    # Once it has stepped, an environment that takes so long to reset is nothing special.
    RUNNING.call = (Blame("Some-v1", "in step"), 3.0)
    watched.look_until(4)
    RUNNING.call = (Blame("Some-v1", where), 4.0)
    watched.look_until(13)
    assert len(watched.told) == 1


def test_what_takes_too_long_is_ended() -> None:
    watched = Watched(limit_s=30.0)
    RUNNING.call = (Blame("Some-v1", "to be made"), 0.0)
    watched.look_until(60)
    RUNNING.call = (Blame("Some-v1", "in step", is_here=False), 60.0)
    watched.look_until(120)
    assert watched.ended == []
    RUNNING.call = (Blame("Some-v1", "in step"), 120.0)
    watched.look_until(151)
    assert "actor 2 has been in step for 3" in watched.ended[0]
    assert "longer than env.step_timeout_s allows" in watched.ended[0]


def test_a_process_that_was_stopped_has_not_hung_meanwhile() -> None:
    watched = Watched(limit_s=30.0)
    RUNNING.call = (Blame("Some-v1", "in step"), 0.0)
    watched.look_until(5)
    watched.now += 500.0
    watched.look_until(520)
    assert watched.ended == []


def test_a_heartbeat_tells_of_a_hang_and_of_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hang_now() == {}
    RUNNING.call = (Blame("Some-v1", "in reset"), time.monotonic())
    assert hang_now() == {}
    monkeypatch.setattr(faults, "HANGS_AFTER_S", 0.0)
    RUNNING.place[0] = 6
    hang = hang_now()
    assert hang.pop("hang_s") < 60
    assert hang == {"hang_in": 1, "hang_first": 5, "hang_last": 5}
    RUNNING.call = (Blame("Some-v1", "to be made"), time.monotonic())
    assert hang_now() == {}


@pytest.mark.parametrize(("lock", "code"), [("free", 70), ("held", 1)])
def test_a_process_whose_environment_hangs_ends_with_its_stack(lock: str, code: int) -> None:
    command = [sys.executable, "-c", HANGING, lock]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code
    assert "in hanging_simulator" in ended.stderr
    if lock == "free":
        said = "error: one of environments 0 to 3 of actor 2 (Some-v1) has been in step for 0 s"
        assert ended.stderr.splitlines()[-1].startswith(said)
