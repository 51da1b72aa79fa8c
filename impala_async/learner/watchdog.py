"""The loop's side of the watch: it shows that it runs, and limits the time of an end.

Runs on: event loop
"""

import asyncio
import faulthandler
import logging
import os
import sys
from collections.abc import Callable
from typing import TextIO

from impala_async.config.learner import LearnerSection
from impala_async.errors import EXIT_BUG
from impala_async.learner.lock_watch import LockWatch
from impala_async.learner.pulse import BUILD_PATIENCE, Pulse, PulseWatch

logger = logging.getLogger(__name__)

END_WITHIN_S = 30.0
BEAT_S = 0.5


class Watchdog:
    """Watches the loop and the learner thread, which beats `learner`, from `start` to `close`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        section: LearnerSection,
        lock_watch: LockWatch | None = None,
        *,
        end_within_s: float = END_WITHIN_S,
        leave: Callable[[int], object] = os._exit,
        output: TextIO = sys.stderr,
    ) -> None:
        self._loop = loop
        self._end_within_s = end_within_s
        self._leave = leave
        self._output = output
        self._deadline: asyncio.TimerHandle | None = None
        self._next_beat: asyncio.TimerHandle | None = None
        told = [lock_watch.beat] if lock_watch is not None else []
        self._loop_pulse = Pulse("the event loop", *told)
        self.learner = Pulse("the learner thread", *told)
        pulses = (self._loop_pulse, self.learner)
        if lock_watch is not None:
            lock_watch.patience = lambda: max(pulse.patience for pulse in pulses)
        self._watch = PulseWatch(
            pulses,
            dump_s=section.stuck_dump_s,
            end_s=section.stuck_end_s,
            leave=leave,
            output=output,
        )

    def start(self) -> None:
        self._beat()
        self._watch.start()

    def build_begins(self) -> None:
        """What the loop does next may take long."""
        self._loop_pulse.beat(BUILD_PATIENCE)

    def _beat(self) -> None:
        self._loop_pulse.beat()
        self._next_beat = self._loop.call_later(BEAT_S, self._beat)

    def end_begins(self) -> None:
        """The run is ending: from now on its time is limited."""
        if self._deadline is None:
            self._deadline = self._loop.call_later(self._end_within_s, self._insist)

    def save_begins(self, within_s: float) -> None:
        """The end waits for a disk now, which may be slow: it gets this long from now."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._end_within_s = within_s
        self._deadline = self._loop.call_later(within_s, self._insist)

    def close(self) -> None:
        """The end is near enough."""
        self._watch.close()
        for timer in (self._deadline, self._next_beat):
            if timer is not None:
                timer.cancel()

    def _insist(self) -> None:
        logger.critical("not ended within %g s: the stacks of all threads", self._end_within_s)
        faulthandler.dump_traceback(file=self._output, all_threads=True)
        self._leave(EXIT_BUG)
