"""A user's code, be it an environment or a network: all that it raises becomes an error of ours."""

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from traceback import walk_tb
from types import TracebackType
from typing import Any

from impala_async.interrupts import is_ctrl_c


def one_line(error: BaseException) -> str:
    """An exception's type and text, without line breaks."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_of_python(found: Any) -> bool:
    """Whether a class or function comes with Python, as no environment and no network does."""
    while isinstance(found, partial):
        found = found.func
    module = getattr(found, "__module__", None) or type(found).__module__
    return str(module).partition(".")[0] in sys.stdlib_module_names


class UserCode(ABC):
    """A context in which every exception is that of a user's code; one instance serves many times.

    So are SystemExit and GeneratorExit, which would else end a process of ours as if all were well.

    A class, because a generator's context costs as much as a step of a small environment.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not is_ctrl_c(error):
            ours = self.blame(error)
            if ours is not None:
                raise ours from error

    @abstractmethod
    def blame(self, error: BaseException) -> Exception | None:
        """The error of ours that says whose fault it was; None if it says so itself."""


class NamedInSetting(UserCode):
    """A context in which every exception is that of code which a setting names."""

    __slots__ = ("_key", "_name", "_where")

    def __init__(self, key: str, name: str, where: str) -> None:
        self._key, self._name, self._where = key, name, where

    def blame(self, error: BaseException) -> ValueError:
        *_, (frame, line) = walk_tb(error.__traceback__)
        place = f"{frame.f_code.co_filename}:{line}"
        return ValueError(
            f"{self._key}: {self._name} failed {self._where}, at {place}: {one_line(error)}"
        )


def import_maker(key: str, name: str, product: str) -> Callable[..., Any]:
    """Import the maker of a network or an algorithm; raises ValueError if it cannot be one.

    Args:
        key: the setting that names it.
        name: package.module:Name.
        product: the word for what it makes.
    """
    module_name, _, attribute = name.partition(":")
    try:
        maker = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        hint = f"; write {name.replace('.py:', ':')} for that file" if ".py:" in name else ""
        raise ValueError(f"{key}: cannot import {name}: {error}{hint}") from error
    if not callable(maker):
        raise ValueError(f"{key}: {name} is of type {type(maker).__name__} and makes no {product}")
    if is_of_python(maker):
        raise ValueError(f"{key}: {name} comes with Python, and makes no {product}")
    return maker  # type: ignore[no-any-return]
