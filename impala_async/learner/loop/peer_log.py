"""Log lines that peers cause: few in a second, whoever sends what, and each is one line.

Runs on: event loop
"""

import logging
from collections.abc import Callable

from impala_async.wire.messages import plain

MAX_LINES_PER_S = 20


class PeerLog:
    """Says on a logger what peers make it say, and how much more there would have been."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float]) -> None:
        self._logger = logger
        self._clock = clock
        self._second = 0
        self._num_lines = 0
        self._num_left_out = 0

    def info(self, text: str, *args: object) -> None:
        self._say(logging.INFO, text, args)

    def warning(self, text: str, *args: object) -> None:
        self._say(logging.WARNING, text, args)

    def _say(self, level: int, text: str, args: tuple[object, ...]) -> None:
        second = int(self._clock())
        if second != self._second:
            self._second, self._num_lines = second, 0
        if self._num_lines >= MAX_LINES_PER_S - 1:
            self._num_left_out += 1
            return
        if self._num_left_out:
            self._logger.warning("%d more lines like these", self._num_left_out)
            self._num_lines, self._num_left_out = self._num_lines + 1, 0
        self._num_lines += 1
        quoted = [plain(arg) if isinstance(arg, str) else arg for arg in args]
        self._logger.log(level, text, *quoted)
