import os
import re
import signal
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from bench.probes import Counting
from impala_async.config.env import EnvSection
from impala_async.envs.faults import RUNNING, Blame, close_all, env_name, with_id
from impala_async.envs.make import build_envs
from impala_async.envs.vector import SerialEnvs
from impala_async.errors import EnvError
from impala_async.processes import Interrupted


class Closing:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1
        if self.error:
            raise self.error


def test_whatever_is_raised_becomes_an_env_error_with_its_cause() -> None:
    blame = Blame("Some-v1", "in step")
    cause = ZeroDivisionError("first line\n  second line")
    with pytest.raises(EnvError) as caught, blame:
        raise cause
    assert caught.value.__cause__ is cause
    text = "Some-v1 failed in step: ZeroDivisionError: first line second line"
    assert str(caught.value) == text
    with pytest.raises(EnvError), blame:
        raise RuntimeError


def test_our_own_errors_and_interrupts_pass_unchanged() -> None:
    for error in (EnvError("Some-v1: mine"), Interrupted()):
        with pytest.raises(type(error)) as caught, Blame("Some-v1", "in step"):
            raise error
        assert caught.value is error


@pytest.mark.parametrize("cause", [SystemExit(0), KeyboardInterrupt()])
def test_an_environment_that_would_end_us_is_to_blame_too(
    cause: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in every process of ours, where a signal is no KeyboardInterrupt.
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)
    says = f"failed in step: {type(cause).__name__}"
    with pytest.raises(EnvError, match=says) as caught, Blame("Some-v1", "in step"):
        raise cause
    assert caught.value.__cause__ is cause


def test_an_error_in_a_call_names_the_environment() -> None:
    with pytest.raises(EnvError, match=r"^Some-v1: mine$"), Blame("Some-v1", "in step"):
        raise EnvError("mine")


def test_nothing_happens_without_an_error() -> None:
    with Blame("Some-v1", "in step"):
        pass


def test_an_environment_is_called_by_its_class_when_it_has_no_id() -> None:
    assert env_name(Closing()) == "Closing"


def test_all_are_closed_although_one_fails() -> None:
    envs = [Closing(), Closing(RuntimeError("one")), Closing(RuntimeError("two")), Closing()]
    with pytest.raises(EnvError, match="in close: RuntimeError: one"):
        close_all(envs)
    assert [env.num_closed for env in envs] == [1, 1, 1, 1]
    close_all([Closing()])


def test_a_call_is_seen_while_it_runs() -> None:
    blame = Blame("Some-v1", "in step")
    assert RUNNING.call is None
    with blame:
        assert RUNNING.call is not None
        assert RUNNING.call[0] is blame
        assert RUNNING.call[1] <= time.monotonic()
    assert RUNNING.call is None
    with pytest.raises(EnvError), blame:
        raise RuntimeError
    assert RUNNING.call is None


def test_a_call_goes_on_when_one_within_it_is_over():
    with Blame("Some-v1", "in step"):
        before = RUNNING.call
        with Blame("my_module:deal", "to say who plays whom"):
            assert RUNNING.call is not before
        assert RUNNING.call is before
    assert RUNNING.call is None


class Wrong(Counting):
    """Gives what it is told to, from the third step on."""

    def __init__(self, step: Any = None, reset: Any = None) -> None:
        super().__init__(length=100)
        self.gives, self.begins, self.num_steps = step, reset, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed) if self.begins is None else self.begins

    def step(self, action: Any) -> Any:
        self.num_steps += 1
        return super().step(action) if self.num_steps < 3 else self.gives


OBS = np.zeros(3, np.float32)


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
            with Blame("Some-v1", "in step"):
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


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"step": (OBS, 1.0, False, {})}, "wants .* which returns .*expected 5, got 4"),
        ({"step": None}, "wants .* which returns .*NoneType"),
        ({"step": (OBS, "much", False, False, {})}, "reward in step: wants a number, got 'much'"),
        ({"step": (np.zeros(7), 1.0, False, False, {})}, "observation in step: .* shape"),
        ({"reset": OBS}, "wants .* which returns .*expected 2"),
    ],
)
def test_what_an_environment_returns_wrongly_is_one_line(given: Any, says: str) -> None:
    envs = SerialEnvs([Wrong(**given)], name="my_module:Wrong")

    def play() -> None:
        envs.reset(0)
        for _ in range(3):
            envs.step({"": np.zeros(1, np.int32)})

    with pytest.raises(EnvError, match=f"^my_module:Wrong:? {says}") as caught:
        play()
    assert len(str(caught.value).splitlines()) == 1
    # And no traceback of what is not to blame.
    cause = caught.value.__cause__
    assert cause is None or cause.__traceback__ is None


class NoSeed(gym.Env[Any, Any]):
    observation_space, action_space = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2)

    def reset(self) -> Any:  # type: ignore[override]
        return OBS, {}

    def step(self) -> Any:  # type: ignore[override]
        raise AssertionError


class NoAction(NoSeed):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:  # type: ignore[override]
        return OBS, {}


class AsksWrongly(NoAction):
    """What it calls itself is its own affair."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:  # type: ignore[override]
        return NoSeed.reset(self, seed=seed)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (NoSeed(), "wants `def reset(self, *, seed=None, options=None)`.*: TypeError"),
        (gym.wrappers.TimeLimit(NoSeed(), 5), "wants .* argument 'seed'"),
        (NoAction(), "wants `def step(self, action)`.*: TypeError"),
        (AsksWrongly(), "failed in reset: TypeError: .* argument 'seed'"),
    ],
)
def test_a_step_or_reset_that_takes_no_arguments_is_told_its_signature(env: Any, says: str) -> None:
    envs = SerialEnvs([env], name="my_module:Env")

    def play() -> None:
        envs.reset(0)
        envs.step({"": np.zeros(1, np.int32)})

    pattern = ".*".join(map(re.escape, says.split(".*")))
    with pytest.raises(EnvError, match=rf"^my_module:Env:? {pattern}"):
        play()


def test_an_error_says_which_environment_it_is_about() -> None:
    error = EnvError("observation: it has another shape")
    assert str(with_id(error, "my:Env")) == "my:Env: observation: it has another shape"
    assert str(with_id(error, "my:Env")) == "my:Env: observation: it has another shape"


def test_it_is_called_as_the_config_calls_it_whatever_it_wraps() -> None:
    envs = build_envs("serial", EnvSection(id="tests.envs.test_faults:poles"), 1)
    envs.reset(0)
    with pytest.raises(EnvError, match=r"^tests\.envs\.test_faults:poles failed in step"):
        envs.step({"": np.full(1, 7, np.int32)})
    envs.close()


def poles() -> Any:
    return gym.make("CartPole-v1", disable_env_checker=True)


def test_the_environment_of_a_call_is_known_by_its_number() -> None:
    class Looking(Counting):
        def step(self, action: Any) -> Any:
            seen.append(RUNNING.place[0])
            return super().step(action)

    seen: list[int] = []
    envs = SerialEnvs([Looking() for _ in range(3)])
    envs.reset(0, first_env=4)
    envs.step({"": np.zeros(3, np.int32)})
    assert seen == [5, 6, 7]
