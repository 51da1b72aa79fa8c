"""Progress for people: kept up to date in place in a terminal, a line now and then elsewhere.

Owns the last lines of the terminal while a run goes on. Only the reporter redraws it: there is no
refresh thread.

Without a terminal the first report is printed, then at most one each `every_s`, then the last
on `close`: a log stays readable and still tells how the run ended. A terminal that goes away
silences this sink, and nothing else.
"""

import contextlib
import errno
import logging
import math
import os
import time
from collections.abc import Callable
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from impala_async.config.run import StopSection
from impala_async.metrics.names import Value, numbers
from impala_async.metrics.report import format_mean_return

GONE: Final = (errno.EIO, errno.EPIPE, errno.EBADF)
"""The error numbers of a stream that can no longer be written to."""
_LOG = logging.getLogger(__name__)


class ConsoleSink:
    """Shows each report on the console through which log lines go, and stays below them.

    `stop` says what ends the run: the first one reached.
    """

    def __init__(
        self,
        stop: StopSection,
        console: Console,
        *,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stop = stop
        self._stream = console.file
        is_terminal = self._stream.isatty() and os.environ.get("TERM") not in (None, "", "dumb")
        self._live = Live(console=console, auto_refresh=False) if is_terminal else None
        self._every_s = every_s
        self._clock = clock
        self._due = -math.inf
        self._unshown: dict[str, Value] | None = None
        self._is_silent = False

    def write(self, report: dict[str, Value]) -> None:
        """Redraw in place, or print a plain line if it is time for one."""
        self._unshown = report
        if self._live is not None or self._clock() >= self._due:
            self._due = self._clock() + self._every_s
            self._guard(self._show)

    def close(self) -> None:
        """Print the last report if it was not, and give the terminal's last lines back."""
        self._guard(self._show)
        live, self._live = self._live, None
        if live is not None:
            self._guard(live.stop)

    def _show(self) -> None:
        report, self._unshown = self._unshown, None
        if report is None:
            return
        if self._live is None:
            print(describe(report, self._stop), file=self._stream, flush=True)
            return
        *lines, verdict = (Text(text) for text in _texts(report, self._stop))
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        self._live.start()
        self._live.update(Group(*lines, verdict), refresh=True)

    def _guard(self, show: Callable[[], None]) -> None:
        if self._is_silent:
            return
        try:
            show()
        # A closed stream is a ValueError, a terminal that hung up an OSError.
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in GONE:
                return  # a full disk has room again, perhaps
            self._is_silent = True
            with contextlib.suppress(OSError, ValueError):
                _LOG.warning("progress can no longer be shown: %s", error)


def describe(report: dict[str, Value], stop: StopSection) -> str:
    """The report in one plain line."""
    return "  ".join(_texts(report, stop))


def _texts(report: dict[str, Value], stop: StopSection) -> tuple[str, str, str]:
    """How far it is, how it goes, and what limits it."""
    get = numbers(report).get
    # The limit runs from the first update; without one the age of the run says more.
    clock = "time_s" if stop.wall_s is None else "learner/wall_s"
    time_s = _text(get(clock), ".0f", stop.wall_s)
    steps = _text(get("env_steps_trained"), ",", stop.env_steps)
    rate, frame_rate = get("env_steps_per_s"), get("frames_per_s")
    rates = f"{_text(rate, ',.0f')} steps/s"
    if frame_rate != rate:
        rates += f" ({_text(frame_rate, ',.0f')} frames/s)"
    returned = format_mean_return(get("mean_return"), get("episodes/count"), stop.mean_return)
    lag = f"{_text(get('lag/mean'), '.1f')} (max {_text(get('lag/max'), 'g')})"
    queue = _text(get("learner_queue/size_mean"), ".1f", get("learner_queue/capacity"))
    return (
        f"{time_s} s  steps {steps}  {rates}  return {returned}",
        f"lag {lag}  queue {queue}  actors {_text(get('num_actors'), 'g')}",
        f"bottleneck {report.get('bottleneck') or '-'}",
    )


def _text(value: float | None, form: str, goal: float | None = None) -> str:
    """A number, and what it is to come to."""
    text = "-" if value is None else format(value, form)
    return text if goal is None else f"{text} / {goal:,.12g}"
