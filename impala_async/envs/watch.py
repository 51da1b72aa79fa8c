"""Tells of a call of an environment that lasts, from a thread of its own, and ends what hangs.

The thread that made the call is in foreign code meanwhile, and can say nothing.

Runs on: watch thread; `hang_now` on any
"""

import faulthandler
import os
import threading
import time
from collections.abc import Callable

from impala_async.envs.faults import RETURNS, RUNNING, Blame
from impala_async.errors import EXIT_BUG
from impala_async.output import AFTER_S, Wait

# A call that takes longer than this is reported to hang. At a start it is reported earlier.
HANGS_AFTER_S = 10.0
LOOK_EVERY_S = 0.5
# Where the call holds the interpreter's lock no thread of ours can end it, but a timer in C can.
LOCK_GRACE_S = 5.0
STDERR = 2
WHERES = tuple(RETURNS)


class Watch:
    """Owns the thread. `whose` says who has the environments."""

    def __init__(
        self,
        tell: Callable[[str], None],
        *,
        whose: Callable[[], str] = lambda: "",
        at_limit: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = tell
        self._whose = whose
        self._at_limit = at_limit or end_with_stacks
        self._limit_s: float | None = None
        self._clock = clock
        self._call: tuple[Blame, float] | None = None
        self._wait = Wait(tell)
        self._seen_s = 0.0
        self._looked_at = clock()
        self._has_stepped = False
        self._is_closed = threading.Event()

    def start(self) -> "Watch":
        threading.Thread(target=self._run, name="watch", daemon=True).start()
        return self

    def limit(self, limit_s: float | None) -> None:
        """From now on a step or a reset may take so long."""
        self._limit_s = limit_s
        self._arm()

    def close(self) -> None:
        """Nothing is told of any more, or ended."""
        self._limit_s = None
        self._is_closed.set()
        faulthandler.cancel_dump_traceback_later()

    def look(self) -> None:
        """Tell of the present call, if it lasts; end this process if it lasts too long."""
        call, now = RUNNING.call, self._clock()
        # A process that was stopped for a while has not hung meanwhile.
        passed_s, self._looked_at = min(now - self._looked_at, 2 * LOOK_EVERY_S), now
        if call is None:
            return
        blame, since = call
        self._has_stepped |= blame.where == "in step"
        if call is not self._call:
            self._call, self._seen_s = call, 0.0
            after_s = HANGS_AFTER_S if self._has_stepped else AFTER_S
            self._wait = Wait(self._tell, after_s=after_s, since=since, clock=self._clock)
        self._wait.look(lambda s: describe(blame, RUNNING.place[0], s, self._whose()))
        self._seen_s += passed_s
        limit_s = self._limit_s
        if blame.is_here and blame.where in WHERES and limit_s and self._seen_s > limit_s:
            self._at_limit(too_long(blame, RUNNING.place[0], self._seen_s, self._whose()))

    def _run(self) -> None:
        while not self._is_closed.wait(LOOK_EVERY_S):
            self._arm()
            self.look()
        faulthandler.cancel_dump_traceback_later()

    def _arm(self) -> None:
        limit_s = self._limit_s
        if limit_s is not None:
            faulthandler.dump_traceback_later(limit_s + LOCK_GRACE_S, exit=True, file=STDERR)


def hang_now() -> dict[str, float]:
    """The call that hangs, for a heartbeat; empty when there is none."""
    call = RUNNING.call
    if call is None or call[0].where not in WHERES:
        return {}
    blame, since = call
    seconds = time.monotonic() - since
    if seconds < HANGS_AFTER_S:
        return {}
    first, last = _numbers(blame, RUNNING.place[0])
    where = WHERES.index(blame.where)
    return {"hang_s": seconds, "hang_in": where, "hang_first": first, "hang_last": last}


def describe(blame: Blame, place: int, seconds: float, whose: str = "") -> str:
    """One line on a call that lasts."""
    if blame.where not in WHERES:
        return f"{blame.name} has taken {seconds:.0f} s so far {blame.where}"
    return say_hang(blame.where, *_numbers(blame, place), whose or blame.name, seconds)


def say_hang(where: str, first: int, last: int, whose: str, seconds: float) -> str:
    """One line on a call that hangs; of many environments it may not be known which one it is."""
    which = f"environment {first}" if first == last else f"one of environments {first} to {last}"
    return f"{which} of {whose} has been {where} for {seconds:.0f} s"


def too_long(blame: Blame, place: int, seconds: float, whose: str = "") -> str:
    """One line on a call that is ended; its stack is told before."""
    return f"{describe(blame, place, seconds, whose)}, longer than env.step_timeout_s allows"


def tell_stderr(line: str) -> None:
    """For a process without a log."""
    os.write(STDERR, f"{line}\n".encode())


def end_with_stacks(text: str) -> None:
    """End this process, whatever its main thread does."""
    faulthandler.dump_traceback(all_threads=True, file=STDERR)
    tell_stderr(f"error: {text}")
    os._exit(EXIT_BUG)


def _numbers(blame: Blame, place: int) -> tuple[int, int]:
    if place:
        return place - 1, place - 1
    return blame.first, blame.first + max(1, blame.num_envs) - 1
