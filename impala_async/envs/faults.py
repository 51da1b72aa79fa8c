"""Environments are foreign code: here whatever they raise becomes an EnvError with its cause."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any

from impala_async.errors import EnvError


class Blame:
    """A context in which every exception is the environment's; one instance serves many times.

    A class, because a generator's context costs as much as a step of a small environment.
    """

    __slots__ = ("_name", "_where")

    def __init__(self, name: str, where: str) -> None:
        self._name = name
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, EnvError):
            raise EnvError(f"{self._name} failed {self._where}: {one_line(error)}") from error


def env_name(env: Any) -> str:
    """What to call an environment in an error: its id, or else its class."""
    spec = getattr(env, "spec", None)
    return str(spec.id) if spec is not None else type(getattr(env, "unwrapped", env)).__name__


def one_line(error: BaseException) -> str:
    """An exception's type and text, without line breaks."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def close_all(envs: Iterable[Any]) -> None:
    """Close all environments, then raise the fault of the first one that failed to."""
    faults = []
    for env in envs:
        try:
            with Blame(env_name(env), "in close"):
                env.close()
        except EnvError as error:
            faults.append(error)
    if faults:
        raise faults[0]
