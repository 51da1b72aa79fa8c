import pytest

from impala_async.envs.faults import Blame, close_all, env_name
from impala_async.errors import EnvError


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
    for error in (EnvError("mine"), KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)) as caught, Blame("Some-v1", "in step"):
            raise error
        assert caught.value is error


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
