"""No hang goes unsaid: those who must move show that they do, and a thread watches them.

Silence counts only while this thread runs itself, so a process that was suspended and a machine
that slept are no hangs. Where the interpreter's lock is held, this thread hangs too:
`lock_watch.py`.

Runs on: a thread of its own
"""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from impala_async.errors import EXIT_BUG

logger = logging.getLogger(__name__)

# What is built, compiled or recorded may take so much longer than the rest.
BUILD_PATIENCE = 10
# What has once taken long and came back may take that long again.
GROWTH = 3
TICK_S = 0.5
SUSPENDED_S = 5.0
SAY_WITHIN_S = 5.0


class Pulse:
    """The signs of life of one thread. Nobody minds if it is silent before the first of them, or
    while it rests.

    `on_patience` is called before something that may take longer than what was before.
    """

    def __init__(self, what: str, on_patience: Callable[[], object] = lambda: None) -> None:
        self.what = what
        self._on_patience = on_patience
        self.num_beats = 0
        self.patience = 1

    def beat(self, patience: int = 1) -> None:
        """It moves. What comes next may take so many times as long as it should."""
        before, self.patience = self.patience, patience
        self.num_beats += 1
        if patience > before:
            self._on_patience()

    def rest(self) -> None:
        self.num_beats, self.patience = 0, 1


class _Silence:
    """How long a pulse has been silent, and the longest silence that it came back from."""

    def __init__(self, pulse: Pulse) -> None:
        self.pulse = pulse
        self.seconds = self.longest_s = 0.0
        self.is_shown = False
        self._seen = 0

    def last(self, elapsed_s: float) -> None:
        """So much time has passed; or none that counts, if it is negative."""
        num_beats, seen = self.pulse.num_beats, self._seen
        self._seen = num_beats
        if num_beats and num_beats == seen and elapsed_s >= 0:
            self.seconds += elapsed_s
        else:
            self.longest_s = max(self.longest_s, self.seconds)
            self.seconds, self.is_shown = 0.0, False

    def is_beyond(self, limit_s: float) -> bool:
        return self.seconds >= max(limit_s * self.pulse.patience, GROWTH * self.longest_s)


class PulseWatch:
    """Shows all stacks when a pulse is silent for `dump_s`, and ends the process after `end_s`."""

    def __init__(
        self,
        pulses: Sequence[Pulse],
        *,
        dump_s: float,
        end_s: float,
        leave: Callable[[int], object] = os._exit,
        output: TextIO = sys.stderr,
    ) -> None:
        self._silences = [_Silence(pulse) for pulse in pulses]
        self._dump_s, self._end_s = dump_s, end_s
        self._leave = leave
        self._output = output
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Watch until `close`."""
        self._thread.start()

    def close(self) -> None:
        """An interpreter that ends is to find none of its threads at work."""
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join(SAY_WITHIN_S)

    def tick(self, elapsed_s: float) -> None:
        """Look at all of them, so long after the last time."""
        for silence in self._silences:
            silence.last(-1.0 if elapsed_s > SUSPENDED_S else elapsed_s)
            what = f"{silence.pulse.what} has not moved for {silence.seconds:.0f} s"
            if silence.is_beyond(self._dump_s) and not silence.is_shown:
                silence.is_shown = True
                self._say(f"{what}: the stacks of all threads (learner.stuck_dump_s)", is_dump=True)
            # Not before it was shown, where both come due in one tick.
            if silence.is_beyond(self._end_s):
                self._say(f"{what}: this process ends (learner.stuck_end_s)")
                self._leave(EXIT_BUG)

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._is_closed.wait(TICK_S):
            now = time.monotonic()
            self.tick(now - before)
            before = now

    def _say(self, line: str, *, is_dump: bool = False) -> None:
        """On a thread of its own: what hangs may hold the log, or be the terminal."""

        def body() -> None:
            logger.critical("%s", line)
            if is_dump:
                faulthandler.dump_traceback(file=self._output, all_threads=True)

        voice = threading.Thread(target=body, name="last words", daemon=True)
        voice.start()
        voice.join(SAY_WITHIN_S)
