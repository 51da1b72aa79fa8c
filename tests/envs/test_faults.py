"""Calls of an environment that fail, fork, last, and hang."""

import math
import os
import re
import signal
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest

from bench.probes import Counting
from impala_async.config.env import EnvSection
from impala_async.envs import faults
from impala_async.envs.faults import (
    RUNNING,
    Blame,
    Watch,
    close_all,
    closed_after,
    env_name,
    hang_now,
)
from impala_async.envs.vector import SerialEnvs
from impala_async.errors import EnvError
from impala_async.processes import Interrupted
from tests.envs.test_batch import Odd


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    monkeypatch.setattr(faults.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    RUNNING.place[0] = 0
    yield
    RUNNING.call = None
    RUNNING.place[0] = 0


def in_step(**kwargs):
    return Blame("Some-v1", "in step", **kwargs)


# -------------------- what they raise


def test_whatever_is_raised_becomes_an_env_error_with_its_cause(monkeypatch):
    # As in every process of ours, where a signal is no KeyboardInterrupt.
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)
    monkeypatch.setattr("impala_async.user_code.INSTALLED", {"tests"})
    blame = in_step()
    missing = gym.error.DependencyNotInstalled("not installed")
    missing.__cause__ = ModuleNotFoundError(name="Box2D")
    extra = "DependencyNotInstalled: not installed; pip install 'impala-async[box2d]'"
    for cause, says in (
        (SystemExit(0), "SystemExit: 0"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (missing, extra),
    ):
        with pytest.raises(EnvError) as caught, blame:
            raise cause
        assert caught.value.__cause__ is cause
        assert str(caught.value) == f"Some-v1 failed in step: {says}"
    with blame:
        pass


def test_our_own_errors_pass_with_the_name_of_the_environment():
    for error, says in (
        (EnvError("Some-v1: mine"), "Some-v1: mine"),
        (EnvError("mine"), "Some-v1: mine"),
        (Interrupted(), ""),
    ):
        with pytest.raises(type(error)) as caught, in_step():
            raise error
        assert caught.value is error
        assert str(error) == says
    with pytest.raises(EnvError, match=r"^mine$"), Blame("Some-v1", "to be made"):
        raise EnvError("mine")


def test_all_are_closed_although_one_fails():
    class Closing:
        def __init__(self, error=None):
            self.error = error

        def close(self):
            closed.append(self)
            if self.error:
                raise self.error

    closed, envs = [], [Closing(), Closing(RuntimeError("one")), Closing(OSError("two")), Closing()]
    with pytest.raises(EnvError, match="Closing failed in close: RuntimeError: one"):
        close_all([*envs, object()])
    assert closed == envs
    assert env_name(gym.make("CartPole-v1")) == "CartPole-v1"


OBS = np.zeros(3, np.float32)
SHORT = (OBS, 1.0, False, {})


def gives(step):
    return Odd(gym.spaces.Box(-1, 1, (3,)), OBS, step, at=3, place=None)


class NoInfo(Counting):
    def reset(self, *, seed=None, options=None):
        return OBS


class TwoNumbers(Counting):
    def reset(self, *, seed=None, options=None):
        return OBS[:2]


class NoSeed(Counting):
    def reset(self):
        return OBS, {}


class NoAction(Counting):
    def step(self):
        raise AssertionError


class AsksWrongly(Counting):
    """The name that it gives itself is its own affair."""

    def reset(self, *, seed=None, options=None):
        return NoSeed.reset(self, seed=seed)


def limited(env):
    return gym.wrappers.TimeLimit(env, 5)


STEP = "wants `def step(self, action)`, which returns (observation, reward, terminated, "
RESET = "wants `def reset(self, *, seed=None, options=None)`, which returns (observation, info): "


class Short(Counting):
    """Shows two numbers where its space promises three."""

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}


def test_a_fault_of_a_wrapper_keeps_its_own_text_and_trace():
    envs = SerialEnvs([gym.wrappers.NormalizeObservation(Short())], EnvSection(id="my:Env"))
    envs.reset(0)
    with pytest.raises(EnvError, match="my:Env failed in step: ValueError: operands could") as told:
        envs.step({"": np.zeros(1, np.int32)})
    assert told.value.__cause__.__traceback__ is not None


def test_a_close_that_fails_hides_no_fault_and_no_result(capfd):
    class Envs:
        def close(self):
            raise EnvError("it has nothing to close")

    with pytest.raises(EnvError, match="no licence"), closed_after(Envs()):
        raise EnvError("no licence")
    assert capfd.readouterr().err == ""
    with closed_after(Envs()):
        pass
    assert capfd.readouterr().err == "warning: it has nothing to close\n"


def test_what_does_not_fit_its_caller_is_told_the_signature():
    for env, begins, ends in (
        (gives(SHORT), STEP, "(expected 5, got 4)"),
        (gives(None), STEP, "NoneType object"),
        (limited(gives(SHORT)), STEP, "(expected 5, got 4)"),
        (NoInfo(), RESET, "(expected 2)"),
        (TwoNumbers(), RESET, "its info is a float32, no dict"),
        (NoSeed(), RESET, "argument 'seed'"),
        (limited(NoSeed()), RESET, "argument 'seed'"),
        (NoAction(), STEP, "takes 1 positional argument but 2 were given"),
        (AsksWrongly(), "failed in reset: TypeError: ", "argument 'seed'"),
    ):
        envs = SerialEnvs([env], EnvSection(id="my:Env"))

        def play(envs=envs):
            envs.reset(0)
            for _ in range(3):
                envs.step({"": np.zeros(1, np.int32)})

        with pytest.raises(EnvError, match=rf"^my:Env:? {re.escape(begins)}") as caught:
            play()
        assert ends in str(caught.value)
        assert "\n" not in str(caught.value)
        if begins in (STEP, RESET):
            assert caught.value.__cause__.__traceback__ is None, "of who is not to blame"


def test_a_process_that_an_environment_forks_does_not_come_back_from_its_call(capfd):
    def is_lost():
        raise FileNotFoundError("no such program")

    for what, code, says in (
        (lambda: None, 2, "Some-v1: a process that it forked in step ends here\n"),
        (is_lost, 2, "forked in step ends here (FileNotFoundError: no such program)\n"),
        (lambda: sys.exit(3), 3, ""),
    ):
        is_child = False
        try:
            with in_step():
                if is_child := (child := os.fork()) == 0:
                    # Calls of its own, of another environment perhaps, do not end it.
                    with pytest.raises(EnvError), Blame("Other-v1", "in step"):
                        raise ValueError
                    what()
        finally:
            if is_child:
                os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code, says
        assert capfd.readouterr().err.endswith(says)


# -------------------- what lasts


def test_a_call_is_seen_while_it_runs():
    blame = in_step()
    with blame:
        before = RUNNING.call
        assert before[0] is blame
        with Blame("my_module:deal", "to say who plays whom"):
            assert RUNNING.call is not before
        assert RUNNING.call is before
    with pytest.raises(EnvError), blame:
        raise RuntimeError
    assert RUNNING.call is None


class Watched:
    """A watch whose clock is set, looked at each half second from 0 on."""

    def __init__(self, limit_s=None):
        RUNNING.look(-math.inf)  # other tests have looked later than this clock begins
        self.told, self.ended, self.now = [], [], 0.0
        given = {"whose": lambda: "actor 2", "end": self.ended.append, "clock": lambda: self.now}
        self.watch = Watch(self.told.append, **given)
        self.watch.limit(limit_s)

    def look_until(self, second, call=None):
        if call is not None:
            RUNNING.call = (call, self.now)
        while self.now < second:
            self.now += 0.5
            self.watch.look()


def test_what_lasts_is_told_of_by_environment_actor_and_seconds():
    watched = Watched()
    watched.look_until(3, Blame("Some-v1", "to be made"))
    assert watched.told.pop() == "Some-v1 has taken 3 s so far to be made"
    # A start is told of early. Once it has stepped, it is nothing special that a reset takes 3 s.
    watched.look_until(6, Blame("Some-v1", "in reset"))
    assert watched.told.pop() == "environment 0 of actor 2 has been in reset for 3 s"
    RUNNING.place[0] = 4
    watched.look_until(27, in_step(num_envs=4))
    hang = "environment 3 of actor 2 has been in step for"
    assert watched.told == [f"{hang} 10 s", f"{hang} 20 s"]
    # The next call has a time of its own.
    watched.look_until(36, Blame("Some-v1", "in reset"))
    assert len(watched.told) == 2
    # It may not be known which one of a vector hangs.
    RUNNING.place[0], blame = 0, in_step(num_envs=4)
    blame.first = 8
    watched.look_until(46, blame)
    assert watched.told[2:] == ["one of environments 8 to 11 of actor 2 has been in step for 10 s"]


def test_many_that_are_made_quickly_are_told_of_together():
    watched = Watched()
    for end in range(1, 15):
        watched.look_until(end, Blame("Some-v1", "to be made"))
    assert watched.told == [f"Some-v1 has taken {s} s so far to be made" for s in (3, 13)]
    # A later making of others begins anew.
    RUNNING.call = None
    watched.look_until(60)
    watched.look_until(62, Blame("Some-v1", "to be made"))
    assert len(watched.told) == 2


def test_a_line_that_the_disk_does_not_take_is_lost(monkeypatch):
    with open("/dev/full", "wb") as full:
        monkeypatch.setattr(faults, "STDERR", full.fileno())
        faults.tell_stderr("a line")


def test_what_takes_too_long_is_ended():
    watched = Watched(limit_s=30.0)
    watched.look_until(60, Blame("Some-v1", "to be made"))
    watched.look_until(120, in_step(is_here=False))
    # A process that was stopped for a while has not hung meanwhile.
    watched.look_until(125, in_step())
    watched.now += 500.0
    watched.look_until(640)
    assert watched.ended == []
    watched.look_until(671, in_step())
    hang = "environment 0 of actor 2 has been in step for 30 s"
    assert watched.ended[0] == f"{hang}, longer than env.step_timeout_s allows"
    watched.watch.limit(10.0, "after this: it failed")
    watched.ended.clear()
    watched.look_until(682, Blame("Some-v1", "in close"))
    assert watched.ended[0] == "Some-v1 has taken 10 s so far in close, after this: it failed"


def test_a_call_that_goes_on_behind_another_one_counts_anew():
    watched, outer = Watched(limit_s=30.0), in_step(num_envs=4)
    watched.look_until(20, outer)
    watched.look_until(21, Blame("Some-v1", "to say who plays whom"))
    RUNNING.call = (outer, 0.0)
    watched.look_until(45)
    assert not watched.ended


def test_each_of_many_environments_has_a_time_of_its_own():
    watched, call = Watched(limit_s=30.0), in_step(num_envs=4)
    RUNNING.call = (call, 0.0)
    for place in range(1, 5):
        RUNNING.place[0] = place
        watched.look_until(place * 25)
    last = "environment 3 of actor 2 has been in step for"
    assert not watched.ended
    assert watched.told[-2:] == [f"{last} 10 s", f"{last} 20 s"]
    watched.look_until(107)
    assert watched.ended[0].startswith(f"{last} 30 s")


def test_a_heartbeat_tells_of_a_hang_and_of_nothing_else(monkeypatch):
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


HANGING = """
import ctypes, sys, time
from impala_async.envs import faults

faults.LOOK_EVERY_S = 0.05
# The timer that ends who holds the lock must not be faster on a busy machine where nobody does.
faults.LOCK_GRACE_S = 30.0 if sys.argv[1] == "free" else 0.3
watch = faults.Watch(print, whose=lambda: "actor 2 (Some-v1)")
watch.limit(0.2)
watch.start()

def hanging_simulator():
    with_the_lock = ctypes.PyDLL(None)
    time.sleep(60) if sys.argv[1] == "free" else with_the_lock.sleep(60)

with faults.Blame("Some-v1", "in step", 4):
    hanging_simulator()
"""


@pytest.mark.parametrize(("lock", "code"), [("free", 70), ("held", 1)])
def test_a_process_whose_environment_hangs_ends_with_its_stack(lock, code):
    command = [sys.executable, "-c", HANGING, lock]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code
    assert "in hanging_simulator" in ended.stderr
    if lock == "free":
        said = "error: one of environments 0 to 3 of actor 2 (Some-v1) has been in step for 0 s"
        assert ended.stderr.splitlines()[-1].startswith(said)


LIFTED = """
import time
from impala_async.envs import faults

faults.LOOK_EVERY_S, faults.LOCK_GRACE_S = 0.05, 0.3
watch = faults.Watch(print).start()
watch.limit(0.1)
watch.limit(None)
time.sleep(1)
"""


def test_a_limit_that_is_lifted_ends_nobody():
    ended = subprocess.run([sys.executable, "-c", LIFTED], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")
