"""A hang is shown and then ended: the event loop, the learner thread, or the end of a run.

Those who must move show that they do, and a thread watches them. Silence counts only while that
thread runs itself, so a process that was suspended and a machine that slept are no hangs. Where
the interpreter's lock is held, this thread hangs too: `lock_watch.py`.

Runs on: a thread of its own watches; the event loop and the learner thread beat their pulses
"""

import faulthandler
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from impala_async.config.learner import LearnerSection
from impala_async.errors import EXIT_BUG
from impala_async.learner.lock_watch import LockWatch
from impala_async.output import flush_output

logger = logging.getLogger(__name__)

# A build, a compilation or a recording may take so much longer than the rest.
BUILD_PATIENCE = 10
# A silence that ended may come again, and last this many times as long.
GROWTH = 3
END_WITHIN_S = 30.0
BEAT_S = 0.5
TICK_S = 0.5
SUSPENDED_S = 5.0
SAY_WITHIN_S = 5.0


class Pulse:
    """The signs of life of one thread, and how long it has been silent.

    Nobody minds if it is silent before the first of them, or while it rests. `on_patience` is
    called before something that may take longer than what was before.
    """

    def __init__(self, what: str, on_patience: Callable[[], object] = lambda: None) -> None:
        self.what = what
        self._on_patience = on_patience
        self.num_beats = 0
        self.patience = 1
        # The watching thread alone writes these.
        self.silent_s = self._longest_s = 0.0
        self.is_shown = False
        self._seen = 0

    def beat(self, patience: int = 1) -> None:
        """It moves. The next beat may take so many times as long as it should."""
        before, self.patience = self.patience, patience
        self.num_beats += 1
        if patience > before:
            self._on_patience()

    def rest(self) -> None:
        """It may be silent from now on."""
        self.num_beats, self.patience = 0, 1

    def watch(self, elapsed_s: float) -> None:
        """So much time has passed; or none that counts, if it is negative."""
        num_beats, seen = self.num_beats, self._seen
        self._seen = num_beats
        if num_beats and num_beats == seen and elapsed_s >= 0:
            self.silent_s += elapsed_s
        else:
            self._longest_s = max(self._longest_s, self.silent_s)
            self.silent_s, self.is_shown = 0.0, False

    def is_beyond(self, limit_s: float) -> bool:
        """Whether it is silent for longer than it may be."""
        return self.silent_s >= max(limit_s * self.patience, GROWTH * self._longest_s)


class Watchdog:
    """Watches the loop and the learner thread, which beats `learner`, from `start` to `close`.

    `call_later` is the loop's. Stacks are shown after `section.stuck_dump_s` of silence, and the
    process ends after `section.stuck_end_s`.
    """

    def __init__(
        self,
        call_later: Callable[[float, Callable[[], None]], object],
        section: LearnerSection,
        lock_watch: LockWatch | None = None,
        *,
        leave: Callable[[int], object] = os._exit,
        output: TextIO = sys.stderr,
    ) -> None:
        self._call_later = call_later
        self._dump_s, self._end_s = section.stuck_dump_s, section.stuck_end_s
        self._leave = leave
        self._output = output
        told = [lock_watch.beat] if lock_watch is not None else []
        self.loop = Pulse("the event loop", *told)
        self.learner = Pulse("the learner thread", *told)
        pulses = self._pulses = (self.loop, self.learner)
        if lock_watch is not None:
            lock_watch.patience = lambda: max(pulse.patience for pulse in pulses)
        self._watched_s = 0.0
        self._end_at, self._end_within_s = math.inf, 0.0
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._beat()
        self._thread.start()

    def build_begins(self) -> None:
        """The loop begins something that may take long."""
        self.loop.beat(BUILD_PATIENCE)

    def end_begins(self) -> None:
        """The run is ending: from now on its time is limited."""
        if self._end_at == math.inf:
            self.save_begins(END_WITHIN_S)

    def save_begins(self, within_s: float) -> None:
        """The end waits for a disk now, which may be slow: it gets this long from now."""
        self._end_within_s = within_s
        self._end_at = self._watched_s + within_s

    def close(self) -> None:
        """An interpreter that ends is to find none of its threads at work."""
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join(SAY_WITHIN_S)

    def tick(self, elapsed_s: float) -> None:
        """Look at all of them, so long after the last time."""
        if elapsed_s > SUSPENDED_S:
            elapsed_s = -1.0
        for pulse in self._pulses:
            pulse.watch(elapsed_s)
            what = f"{pulse.what} has not moved for {pulse.silent_s:.0f} s"
            if pulse.is_beyond(self._dump_s) and not pulse.is_shown:
                pulse.is_shown = True
                self._say(f"{what}: the stacks of all threads (learner.stuck_dump_s)", is_dump=True)
            # Not before it was shown, where both come due in one tick.
            if pulse.is_beyond(self._end_s):
                self._say(f"{what}: this process ends (learner.stuck_end_s)")
                self._leave(EXIT_BUG)
        self._watched_s += max(0.0, elapsed_s)
        if self._watched_s >= self._end_at:
            within = f"not ended within {self._end_within_s:g} s"
            self._say(f"{within}: the stacks of all threads", is_dump=True)
            self._leave(EXIT_BUG)

    def _beat(self) -> None:
        if not self._is_closed.is_set():
            self.loop.beat()
            self._call_later(BEAT_S, self._beat)

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._is_closed.wait(TICK_S):
            self.tick(time.monotonic() - before)
            # A tick takes long if its line cannot be written; that must not pass for a suspension.
            before = time.monotonic()

    def _say(self, line: str, *, is_dump: bool = False) -> None:
        """On a thread of its own: what hangs may hold the log, or be the terminal."""

        def body() -> None:
            logger.critical("%s", line)
            flush_output()
            if is_dump:
                faulthandler.dump_traceback(file=self._output, all_threads=True)

        voice = threading.Thread(target=body, name="last words", daemon=True)
        voice.start()
        voice.join(SAY_WITHIN_S)
