"""Actors as processes of this host, each started again when it ends before the run is over.

One that says it does not fit, or that dies again and again, ends them all.
"""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from impala_async.errors import ConfigError, Exit, StartError, how_it_ended
from impala_async.launch.children import end_in_time, exit_code, spawn
from impala_async.launch.logs import Log
from impala_async.output import Wait
from impala_async.processes import Lifeline

logger = logging.getLogger(__name__)

# No second try can mend these at a first start. Later one may: a simulator that crashed may still
# have its port. And an environment that raised in mid-run (2) may never do so again.
HOPELESS = (Exit.NOT_ALLOWED, Exit.MISMATCH)
RESTART_AFTER_S = 1.0
MAX_QUICK_DEATHS = 5
# An actor whose environment holds the interpreter's lock is ended with this.
BY_FAULTHANDLER = 1
QUICK_DEATH_S = 10.0
# A run that is over has told all of them, but one may be in a step.
GOODBYE_S = 3.0


class _Actor:
    """One number, its log, and the process that has it now."""

    def __init__(self, number: int, log: Log, here: int) -> None:
        self.number, self.here = number, here
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.start_at = time.monotonic()
        self.spoke_at: float | None = None
        self.num_quick_deaths = self.num_starts = 0
        self.was_quick = False
        self.how_it_was_lost = ""
        self.start_trouble = Wait(logger.warning, after_s=0.0)

    def poll(self) -> int | None:
        """Its exit code, once. To start up may take long: its life begins with its first word."""
        assert self.process is not None
        code = self.process.poll()
        self.log.follow()
        if self.spoke_at is None and self.log.has_spoken():
            self.spoke_at = time.monotonic()
        if code is None:
            return None
        self.process = None
        lived_s = 0.0 if self.spoke_at is None else time.monotonic() - self.spoke_at
        self.was_quick = lived_s < QUICK_DEATH_S
        self.num_quick_deaths = self.num_quick_deaths + 1 if self.was_quick else 0
        return code

    def start(self, flags: Sequence[str], lifeline: Lifeline, over_fd: int) -> None:
        with self.log.open() as output:
            self.process = spawn("actor", flags, lifeline, output, (over_fd,))
        self.num_starts += 1
        self.spoke_at = None

    def how_it_ended(self, code: int) -> str:
        """How it ended, and the last words since its start that say why."""
        said = self.log.last_words()
        how = how_it_ended(code)
        return how if code == -signal.SIGKILL else f"{how} ({said})"


class Supervision(Protocol):
    """Looks after the actors of a run, wherever they are."""

    verdict: tuple[int, str] | None
    """Exit code and reason, where one cannot run and all are given up."""
    is_ending: bool
    """Whether nobody is to be started any more."""

    def look(self) -> None:
        """Start those whose time has come, and find out who has ended."""

    def end(self, grace_s: float, is_hurried: Callable[[], bool]) -> None:
        """End all, after this time to do so by themselves."""


class Actors:
    """Owns the processes, and looks after them whenever it is asked to."""

    def __init__(
        self,
        learner: str,
        logs: Sequence[Log],
        lifeline: Lifeline,
        *,
        first: int = 0,
        here: int = 0,
        has_numbers: bool = True,
    ) -> None:
        """`learner` is its address or its run folder; there is an actor for each log, and they are
        told of by numbers from `first`. Those among all of this host count from `here`. Without
        numbers the learner gives out others, as to the actors of several hosts."""
        self._actors = [_Actor(first + n, log, here + n) for n, log in enumerate(logs)]
        self._lifeline, self._has_numbers = lifeline, has_numbers
        # An actor writes to it where its learner says that the run is over: with 0 it ends, too,
        # where somebody else has told it to.
        self._over_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # They end with us: until then there is a learner to wait for.
        self._flags = ["--learner", learner, "--connect-s", "inf", "--over-fd", str(self._over_fd)]
        self.verdict: tuple[int, str] | None = None
        self.is_over = False
        """Whether the learner has told one of them that the run is over."""
        self.is_ending = False
        self._start_wait = Wait(logger.info)

    def look(self) -> None:
        with suppress(BlockingIOError):
            self.is_over |= os.eventfd_read(self._over_fd) > 0
        for actor in self._actors:
            if self.verdict or self.is_over or self.is_ending:
                return
            if actor.process is None:
                if time.monotonic() >= actor.start_at:
                    self._start(actor)
            elif (code := actor.poll()) is not None:
                self._lose(actor, code)

    def tell_starts(self) -> None:
        """Tell of those that take long to say a first word: nobody else does."""
        silent = [each.number for each in self._actors if each.process and each.spoke_at is None]
        if not silent:
            self._start_wait = Wait(logger.info)
            return
        more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
        told = f"starting: waiting for actor {silent[0]}{more}, which loads torch"
        self._start_wait.look(lambda s: f"{told} ({s:.0f} s)")

    def end(self, grace_s: float, is_hurried: Callable[[], bool]) -> None:
        wait = Wait(logger.info)

        def is_hurried_now() -> bool:
            wait.look(lambda s: f"ending: waiting for the actors ({s:.0f} s)")
            for actor in self._actors:
                actor.log.follow()
            return is_hurried()

        running = [actor.process for actor in self._actors if actor.process]
        end_in_time(running, grace_s, is_hurried_now)
        for actor in self._actors:
            actor.log.close()
        os.close(self._over_fd)

    def _lose(self, actor: _Actor, code: int) -> None:
        how = actor.how_it_ended(code)
        is_hopeless = code in HOPELESS and actor.num_starts == 1
        if actor.num_quick_deaths > MAX_QUICK_DEATHS or is_hopeless:
            reason = f"actor {actor.number} cannot run: it {how}; {actor.log.where}"
            # Code of the user's own may have ended it with a number that says nothing here.
            is_ours = code < 0 or code in {BY_FAULTHANDLER, *Exit} - {Exit.DONE}
            self.verdict = exit_code(code) if is_ours else Exit.CONFIG, reason
        goes_on = f"{how_it_ended(code)}, though the run goes on"
        actor.how_it_was_lost = goes_on if code == Exit.DONE else how
        actor.start_at = time.monotonic() + (RESTART_AFTER_S if actor.was_quick else 0.0)

    def _start(self, actor: _Actor) -> None:
        """Start it. A failure of the first start ends the run; a later one may pass."""
        if actor.how_it_was_lost:
            told = "actor %d %s: starting it again; %s"
            logger.warning(told, actor.number, actor.how_it_was_lost, actor.log.where)
            actor.how_it_was_lost = ""
        number = actor.number if self._has_numbers else -1
        start = map(str, (number, actor.num_starts, actor.here))
        flags = [*self._flags, "--start", *start]
        try:
            actor.start(flags, self._lifeline, self._over_fd)
        except (ConfigError, StartError) as error:
            if actor.num_starts == 0:
                raise
            trouble = f"actor {actor.number} cannot be started again yet: {error}; still trying"
            actor.start_trouble.look(lambda _: trouble)
            actor.start_at = time.monotonic() + RESTART_AFTER_S
