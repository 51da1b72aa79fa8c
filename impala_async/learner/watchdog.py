"""No hang goes unsaid: a loop that is stuck shows its stacks, an end that is stuck is ended.

Runs on: event loop; the dump comes from a thread of C that needs no GIL
"""

import asyncio
import faulthandler
import logging
import os
import sys
from collections.abc import Callable
from typing import TextIO

from impala_async.errors import EXIT_BUG

logger = logging.getLogger(__name__)

STUCK_AFTER_S = 30.0
END_WITHIN_S = 30.0


class Watchdog:
    """Armed by the loop again and again; it barks when the loop does not come back."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
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

    def loop_runs(self) -> None:
        """The loop is alive now: put the dump of its stacks off once more."""
        faulthandler.dump_traceback_later(STUCK_AFTER_S, file=self._output)

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
        faulthandler.dump_traceback_later(within_s + STUCK_AFTER_S, file=self._output)

    def close(self) -> None:
        """The end is near enough."""
        faulthandler.cancel_dump_traceback_later()
        if self._deadline is not None:
            self._deadline.cancel()

    def _insist(self) -> None:
        logger.critical("not ended within %g s: the stacks of all threads", self._end_within_s)
        faulthandler.dump_traceback(file=self._output, all_threads=True)
        self._leave(EXIT_BUG)
