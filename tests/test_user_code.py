"""What foreign code raises becomes an error of ours, unless it is one already."""

import signal

import pytest

from impala_async.interrupts import Interrupted
from impala_async.user_code import UserCode, one_line


class Blame(UserCode):
    """Knows whose fault everything but a KeyError is."""

    def blame(self, error: BaseException) -> Exception | None:
        return None if isinstance(error, KeyError) else ValueError(one_line(error))


def test_an_error_without_text_is_its_type() -> None:
    assert one_line(RuntimeError()) == "RuntimeError"


def test_what_is_blamed_has_its_cause_and_one_line() -> None:
    cause = RuntimeError("first\n  second")
    with pytest.raises(ValueError, match=r"^RuntimeError: first second$") as caught, Blame():
        raise cause
    assert caught.value.__cause__ is cause


def test_what_is_not_blamed_and_what_is_no_error_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a program that uses the package: there Ctrl-C is Python's own.
    monkeypatch.setattr("signal.getsignal", lambda number: signal.default_int_handler)
    for error in (KeyError("mine"), KeyboardInterrupt(), Interrupted()):
        with pytest.raises(type(error)) as caught, Blame():
            raise error
        assert caught.value is error


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit("done")])
def test_what_would_end_the_process_is_blamed(error: BaseException) -> None:
    with pytest.raises(ValueError, match=one_line(error)) as caught, Blame():
        raise error
    assert caught.value.__cause__ is error
