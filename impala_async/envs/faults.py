"""Environments are foreign code: here whatever they raise becomes an EnvError with its cause, and
a call of theirs that lasts can be told of by another thread."""

import contextlib
import os
import re
from collections.abc import Iterable
from time import monotonic
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from impala_async.errors import EXIT_CONFIG, EnvError, EnvHangsError
from impala_async.user_code import UserCode, one_line

AboutEnv = TypeVar("AboutEnv", bound=EnvError | EnvHangsError)
PACKAGE = __name__.rpartition(".")[0]
RETURNS = {
    "in step": "step must return (observation, reward, terminated, truncated, info)",
    "in reset": "reset must return (observation, info)",
}
SIGNATURES = {
    "step": "def step(self, action)",
    "reset": "def reset(self, *, seed=None, options=None)",
}
# Who calls an environment as gymnasium says.
CALLERS = {PACKAGE.partition(".")[0], "gymnasium", "pettingzoo"}
MISCALLED = re.compile(r"(step|reset)\(\) (got an unexpected|got some|takes|missing) .*argument")


class Running:
    """The call of an environment that this process is in, if it is in one: there is one of these.

    Written by the thread that makes the call, read by any.
    """

    def __init__(self) -> None:
        self.call: tuple[Blame, float] | None = None
        """And since when."""
        self.place = memoryview(bytearray(4)).cast("i")
        """The number of the environment within its actor, from 1; 0 where it is not known."""
        self.forked_in: Blame | None = None
        """In a process that an environment has forked: the call from which only its parent may
        return, as both would go on as one actor."""

    def mark_fork(self) -> None:
        """In a process that was forked just now."""
        if self.call is not None:
            self.forked_in, _ = self.call


class Blame(UserCode):
    """A context in which every exception is the environment's.

    `num_envs` are those it is about, if any, `first` the number of their first one. What is not
    `is_here` is a call that another process makes.
    """

    __slots__ = ("_around", "first", "is_here", "name", "num_envs", "where")

    def __init__(self, name: str, where: str, num_envs: int = 0, *, is_here: bool = True) -> None:
        self.name = name
        self.where = where
        self.num_envs = num_envs
        self.first = 0
        self.is_here = is_here

    def __enter__(self) -> None:
        # A reset asks a user's function who plays whom, and goes on.
        self._around = RUNNING.call
        RUNNING.call = (self, monotonic())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        RUNNING.call = self._around
        if RUNNING.forked_in is self:
            _end_fork(self, error)
        if error is not None:
            super().__exit__(kind, error, traceback)

    def blame(self, error: BaseException) -> EnvError | None:
        if isinstance(error, EnvError):
            if self.where in RETURNS:
                with_id(error, self.name)
            return None
        wanted = RETURNS.get(self.where)
        if wanted is not None and (called := _miscalled(error)):
            error.__traceback__ = None
            return EnvError(
                f"{self.name}: {called} does not take what it is called with: define it as "
                f"`{SIGNATURES[called]}` ({one_line(error)})"
            )
        if wanted is not None and _is_raised_here(error):
            # Where we could not use it is of no use to anybody: there is nothing to trace back.
            error.__traceback__ = None
            return EnvError(f"{self.name}: {wanted}, but gave something else: {one_line(error)}")
        return EnvError(f"{self.name} failed {self.where}: {one_line(error)}")


RUNNING = Running()
os.register_at_fork(after_in_child=RUNNING.mark_fork)


def _end_fork(call: Blame, error: BaseException | None) -> NoReturn:
    """End this process, a child of the environment's that has come back from its call."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        os._exit(error.code)  # as it would end if it were nobody's child
    why = f" ({one_line(error)})" if error is not None else ""
    with contextlib.suppress(OSError):
        os.write(2, f"{call.name}: a process that it forked {call.where} ends here{why}\n".encode())
    os._exit(EXIT_CONFIG)


def _is_raised_here(error: BaseException) -> bool:
    """Whether no code of the environment raised it, but ours that could not use what it gave."""
    if not isinstance(error, TypeError | ValueError):
        return False
    return _raised_in(error).rpartition(".")[0] == PACKAGE


def _miscalled(error: BaseException) -> str | None:
    """The step or reset that does not take the arguments with which all of them are called."""
    found = MISCALLED.search(str(error)) if isinstance(error, TypeError) else None
    is_by_caller = _raised_in(error).partition(".")[0] in CALLERS
    return found[1] if found is not None and is_by_caller else None


def _raised_in(error: BaseException) -> str:
    """The module of the innermost call."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return str(at.tb_frame.f_globals.get("__name__", "")) if at is not None else ""


def with_id(error: AboutEnv, env_id: str) -> AboutEnv:
    """The same error; from now on it says which environment it is about."""
    if env_id not in str(error):
        error.args = (f"{env_id}: {error}",)
    return error


def env_name(env: Any) -> str:
    """Return the name of an environment for an error: its id, or else its class."""
    spec = getattr(env, "spec", None)
    return str(spec.id) if spec is not None else type(getattr(env, "unwrapped", env)).__name__


def close_all(envs: Iterable[Any], name: str | None = None) -> None:
    """Close all environments that can be, then raise the fault of the first one that failed to."""
    faults = []
    for env in envs:
        try:
            with Blame(name or env_name(env), "in close"):
                if hasattr(env, "close"):
                    env.close()
        except EnvError as error:
            faults.append(error)
    if faults:
        raise faults[0]
