"""Environments are foreign code: an error that they raise becomes an EnvError with its cause."""

import contextlib
import faulthandler
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from time import monotonic
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, NoReturn

from impala_async.errors import EnvError, Exit, ImpalaAsyncError
from impala_async.output import AFTER_S, Wait
from impala_async.user_code import UserCode, one_line

if TYPE_CHECKING:
    from impala_async.envs.batch import EnvBatch

WANTED = {
    "in step": "wants `def step(self, action)`, which returns (observation, reward, terminated, "
    "truncated, info)",
    "in reset": "wants `def reset(self, *, seed=None, options=None)`, which returns (observation, "
    "info)",
}
WHERES = tuple(WANTED)
WAITED_FOR = (*WHERES, "in close")
TOO_LONG = "longer than env.step_timeout_s allows"
# CPython, and we, say so of arguments and results that do not fit a call.
UNFIT = re.compile("^(TypeError|ValueError): .*(unpack|argument|subscriptable|iterable|its info)")
# Modules that call an environment, and unpack what it returns.
CALLERS = (__name__.rpartition(".")[0], "gymnasium.core", "gymnasium.wrappers")

# A call that takes longer than this is reported to hang. At a start it is reported earlier.
HANGS_AFTER_S = 10.0
LOOK_EVERY_S = 0.5
# Where the call holds the interpreter's lock no thread of ours can end it, but a timer in C can.
LOCK_GRACE_S = 5.0
# An environment that has failed, or is not needed any more, gets so long to close: one that has
# lost a process may never do so, as gymnasium's AsyncVectorEnv.
CLOSE_S = 10.0
STDERR = 2


class Running:
    """The call of an environment that this process is in, if it is in one: there is one of these.

    The thread that makes the call writes it, and any may read it.
    """

    call: "tuple[Blame, float] | None" = None
    """The second is since when."""
    place = memoryview(bytearray(4)).cast("i")
    """The number of the environment within its actor, from 1; 0 where it is not known."""
    _seen: "tuple[object, int, tuple[Blame, float] | None, float]" = (None, 0, None, -math.inf)

    def look(self, now: float) -> "tuple[Blame, float] | None":
        """The call, and since when it is where it is: another pair for each environment of it.

        Looked for from outside, at times: the call itself is to lose none by it. If two threads
        look at once, one of them may begin to count anew.
        """
        call, place = self.call, self.place[0]
        was_in, was_at, pair, looked_at = self._seen
        if call is not was_in or place != was_at:
            pair = call
            # One that is older than the last look was within another one then, or elsewhere.
            if call is not None and (call is was_in or call[1] < looked_at):
                pair = call[0], now
        self._seen = call, place, pair, now
        return pair


class Blame(UserCode):
    """A call: a context in which every exception is the environment's.

    It is about `num_envs` environments, if any, from number `first` on; where it is not `is_here`
    another process makes it.
    """

    __slots__ = ("_around", "_pid", "first", "is_here", "num_envs")

    def __init__(self, name: str, where: str, num_envs: int = 0, *, is_here: bool = True) -> None:
        super().__init__(name, where, EnvError)
        self.num_envs = num_envs
        self.first = 0
        self.is_here = is_here

    def __enter__(self) -> None:
        # A reset asks a user's function who plays whom, and goes on.
        self._around, self._pid = RUNNING.call, os.getpid()
        RUNNING.call = (self, monotonic())

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        RUNNING.call = self._around
        if os.getpid() != self._pid:
            _end_fork(self, error)
        if error is not None:
            super().__exit__(kind, error, traceback)

    def blame(self, error: BaseException) -> ImpalaAsyncError | None:
        if self.where in WHERES:
            *_, (frame, _) = walk_tb(error.__traceback__)
            module = str(frame.f_globals.get("__name__"))
            if isinstance(error, EnvError):
                with_id(error, self.name)
            elif module.startswith(CALLERS) and UNFIT.search(one_line(error)):
                # Its caller could not use what it gave: nothing of its own is to be traced back.
                error.__traceback__ = None
                return EnvError(f"{self.name} {WANTED[self.where]}: {one_line(error)}")
        return super().blame(error)

    def is_followed_by(self, other: "Blame") -> bool:
        """Whether another call does the same for the next environment: each may be quick, where to
        make all of them is not."""
        return self.where not in WAITED_FOR and (self.name, self.where) == (other.name, other.where)

    def environments(self) -> tuple[int, int]:
        """The numbers of the first and the last environment that it may be in."""
        if number := RUNNING.place[0]:
            return number - 1, number - 1
        return self.first, self.first + max(1, self.num_envs) - 1

    def describe(self, seconds: float, whose: str = "") -> str:
        if self.where not in WHERES:
            return f"{self.name} has taken {seconds:.0f} s so far {self.where}"
        return say_hang(self.where, *self.environments(), whose or self.name, seconds)


RUNNING = Running()


def _end_fork(call: Blame, error: BaseException | None) -> NoReturn:
    """End this process, which the environment forked in its call: only the parent may go on."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        os._exit(error.code)  # as it would end if it were nobody's child
    why = f" ({one_line(error)})" if error is not None else ""
    with contextlib.suppress(OSError):
        tell_stderr(f"{call.name}: a process that it forked {call.where} ends here{why}")
    os._exit(Exit.CONFIG)


def with_id(error: ImpalaAsyncError, env_id: str) -> ImpalaAsyncError:
    """The same error; from now on it says which environment it is about."""
    if env_id not in str(error):
        error.args = (f"{env_id}: {error}",)
    return error


def env_name(env: Any) -> str:
    """The name of an environment for an error: its id, or else its class."""
    spec = getattr(env, "spec", None)
    return str(spec.id) if spec is not None else type(getattr(env, "unwrapped", env)).__name__


def close_all(envs: Iterable[Any], name: str | None = None) -> None:
    """Close all environments, then raise the fault of the first one that failed to."""
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


@contextlib.contextmanager
def closed_after(envs: "EnvBatch") -> Iterator["EnvBatch"]:
    """A context after which they are closed. A close that fails hides no fault from before, and
    takes no result with it."""
    try:
        yield envs
    except BaseException:
        with contextlib.suppress(EnvError):
            envs.close()
        raise
    try:
        envs.close()
    except EnvError as error:
        tell_stderr(f"warning: {error}")


def tell_stderr(line: str) -> None:
    """Tell a line where the process has no log; what a full disk does not take is lost."""
    with contextlib.suppress(OSError):
        os.write(STDERR, f"{line}\n".encode())


def end_without_close(text: str) -> None:
    """End this process, which has done what it was for, whatever its main thread does."""
    tell_stderr(f"warning: {text}")
    os._exit(Exit.DONE)


def end_with_stacks(text: str) -> None:
    """End this process, whatever its main thread does."""
    faulthandler.dump_traceback(all_threads=True, file=STDERR)
    tell_stderr(f"error: {text}")
    os._exit(Exit.BUG)


@dataclass(eq=False)
class Watch:
    """Tells of a call that lasts, as the thread that made it cannot, and ends this process at a
    limit. Owns the thread that looks; `tell` and `end` take a line."""

    tell: Callable[[str], None]
    _: KW_ONLY
    whose: Callable[[], str] = lambda: ""
    """Says who has the environments."""
    end: Callable[[str], None] = end_with_stacks
    clock: Callable[[], float] = monotonic

    def __post_init__(self) -> None:
        self._limit_s: float | None = None
        self._why = TOO_LONG
        self._call: tuple[Blame, float] | None = None
        self._seen_s, self._seen_at, self._looked_at = 0.0, -math.inf, self.clock()
        self._has_stepped = False
        self._is_closed = threading.Event()

    def start(self) -> "Watch":
        threading.Thread(target=self._run, name="watch", daemon=True).start()
        return self

    def limit(self, limit_s: float | None, why: str = TOO_LONG) -> None:
        """A step, a reset or a close may take so long; `why` ends the line of one that does not."""
        self._limit_s, self._why = limit_s, why
        self._arm()

    def close(self) -> None:
        self._limit_s = None
        self._is_closed.set()
        faulthandler.cancel_dump_traceback_later()

    def look(self) -> None:
        """Tell of the present call, if it lasts; end this process if it lasts too long."""
        now = self.clock()
        call = RUNNING.look(now)
        # A process that was stopped for a while has not hung meanwhile.
        passed_s, self._looked_at = min(now - self._looked_at, 2 * LOOK_EVERY_S), now
        if call is None:
            return
        blame, since = call
        self._has_stepped |= blame.where == "in step"
        if call is not self._call:
            is_next = self._call is not None and self._call[0].is_followed_by(blame)
            self._call, self._seen_s = call, 0.0
            if not is_next or now - self._seen_at > 2 * LOOK_EVERY_S:
                after_s = HANGS_AFTER_S if self._has_stepped else AFTER_S
                self._wait = Wait(self.tell, after_s=after_s, since=since, clock=self.clock)
        self._seen_at = now
        self._wait.look(lambda s: blame.describe(s, self.whose()))
        self._seen_s += passed_s
        limit_s = self._limit_s
        if blame.is_here and blame.where in WAITED_FOR and limit_s and self._seen_s > limit_s:
            self.end(f"{blame.describe(self._seen_s, self.whose())}, {self._why}")

    def _run(self) -> None:
        while not self._is_closed.wait(LOOK_EVERY_S):
            self._arm()
            self.look()
        faulthandler.cancel_dump_traceback_later()

    def _arm(self) -> None:
        limit_s = self._limit_s
        if limit_s is None:
            # An actor that serves one run after another may have had a limit.
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(limit_s + LOCK_GRACE_S, exit=True, file=STDERR)


def hang_now() -> dict[str, float]:
    """The call that hangs, for a heartbeat; empty when there is none."""
    now = monotonic()
    blame, since = RUNNING.look(now) or (None, now)
    seconds = now - since
    if blame is None or blame.where not in WHERES or seconds < HANGS_AFTER_S:
        return {}
    first, last = blame.environments()
    where = WHERES.index(blame.where)
    return {"hang_s": seconds, "hang_in": where, "hang_first": first, "hang_last": last}


def say_hang(where: str, first: int, last: int, whose: str, seconds: float) -> str:
    """One line on a call that hangs; of many environments it may not be known which one it is."""
    which = f"environment {first}" if first == last else f"one of environments {first} to {last}"
    return f"{which} of {whose} has been {where} for {seconds:.0f} s"
