"""Environments are foreign code: here whatever they raise becomes an EnvError with its cause."""

from collections.abc import Iterable
from typing import Any

from impala_async.errors import EnvError
from impala_async.foreign import Foreign, one_line


class Blame(Foreign):
    """A context in which every exception is the environment's."""

    __slots__ = ("_name", "_where")

    def __init__(self, name: str, where: str) -> None:
        self._name = name
        self._where = where

    def blame(self, error: Exception) -> EnvError | None:
        if isinstance(error, EnvError):
            return None
        return EnvError(f"{self._name} failed {self._where}: {one_line(error)}")


def env_name(env: Any) -> str:
    """What to call an environment in an error: its id, or else its class."""
    spec = getattr(env, "spec", None)
    return str(spec.id) if spec is not None else type(getattr(env, "unwrapped", env)).__name__


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
