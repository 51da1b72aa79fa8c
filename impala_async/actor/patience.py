"""How an actor bears a learner with which it gets nowhere: it waits ever longer, and says little.

Runs on: sampler thread; `SeldomLog` on the link thread too
"""

import logging
import math
import time
from collections.abc import Callable

from impala_async.waiting import EVERY_S

FIRST_S, LONGEST_S = 0.1, 5.0


class Pauses:
    """None before the first try, then a longer one before each other, until something succeeds."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def take(self) -> float:
        """How many seconds to wait before this try."""
        pause_s = self._next_s
        self._next_s = min(max(2 * pause_s, FIRST_S), LONGEST_S)
        return pause_s

    def reset(self) -> None:
        """Something has succeeded."""
        self._next_s = 0.0


class SeldomLog:
    """Says of each kind of line, which is its text before any arguments, one in ten seconds."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._said_at: dict[str, float] = {}

    def info(self, text: str, *args: object) -> None:
        self._say(logging.INFO, text, args)

    def warning(self, text: str, *args: object) -> None:
        self._say(logging.WARNING, text, args)

    def _say(self, level: int, text: str, args: tuple[object, ...]) -> None:
        now = self._clock()
        if now - self._said_at.get(text, -math.inf) >= EVERY_S:
            self._said_at[text] = now
            self._logger.log(level, text, *args)


Log = logging.Logger | SeldomLog
