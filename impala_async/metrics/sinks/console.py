"""Progress for people: kept up to date in place in a terminal, a line now and then elsewhere.

Owns the last lines of the terminal while a run goes on. Used by the reporter only, which is also
what redraws it: there is no refresh thread. rich is imported when a terminal is there, so a run
under a scheduler never loads it.

Without a terminal the first report is printed, then at most one each `every_s`, then the last
on `close`: a log stays readable and still tells how the run ended. A terminal that goes away
silences this sink, and nothing else.
"""

import contextlib
import errno
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Final, NamedTuple

from impala_async.metrics.names import Value
from impala_async.metrics.report import format_mean_return

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

GONE: Final = (errno.EIO, errno.EPIPE, errno.EBADF)
"""The error numbers of a stream that can no longer be written to."""
_LOG = logging.getLogger(__name__)
_BAR_WIDTH: Final = 16


class Targets(NamedTuple):
    """The `stop` settings, as far as they are set; the first one reached ends the run."""

    env_steps: int | None = None
    updates: int | None = None
    mean_return: float | None = None
    wall_s: float | None = None


class ConsoleSink:
    """Shows each report on `stream` (stderr), live if that is a terminal.

    `console` is for a caller whose logging goes through a rich console of its own: progress then
    stays below the log lines. `is_live` overrides what the stream says about itself.
    """

    def __init__(
        self,
        *,
        targets: Targets | None = None,
        stream: IO[str] | None = None,
        console: "Console | None" = None,
        is_live: bool | None = None,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._targets = targets or Targets()
        self._stream = stream if stream is not None else console.file if console else sys.stderr
        self._console = console
        self._is_live = _is_terminal(self._stream) if is_live is None else is_live
        self._every_s = every_s
        self._clock = clock
        self._live: Live | None = None
        self._due = -math.inf
        self._unshown: dict[str, Value] | None = None
        self._is_silent = False

    def write(self, report: dict[str, Value]) -> None:
        """Redraw in place, or print a plain line if it is time for one."""
        if self._is_live:
            picture = _render(report, self._targets)
            self._guard(lambda: self._redraw(picture))
        elif self._clock() >= self._due:
            self._due = self._clock() + self._every_s
            self._unshown = None
            self._print(report)
        else:
            self._unshown = report

    def close(self) -> None:
        """Print the last report if it was not, and give the terminal's last lines back."""
        last, self._unshown = self._unshown, None
        if last is not None:
            self._print(last)
        live, self._live = self._live, None
        if live is not None:
            self._guard(live.stop)

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

    def _print(self, report: dict[str, Value]) -> None:
        line = describe(report, self._targets) + "\n"
        self._guard(lambda: self._emit(line))

    def _emit(self, line: str) -> None:
        self._stream.write(line)
        self._stream.flush()

    def _redraw(self, picture: "RenderableType") -> None:
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            console = self._console or Console(file=self._stream)
            self._live = Live(console=console, auto_refresh=False)
            self._live.start()
        self._live.update(picture, refresh=True)


def describe(report: dict[str, Value], targets: Targets) -> str:
    """The report in one plain line."""
    return "  ".join((_advance(report, targets), _state(report), _verdict(report)))


def progress(report: dict[str, Value], targets: Targets) -> float | None:
    """The share of the way to the nearest stop that can be foreseen; None without one.

    A mean return is not on a way of known length, so it has no share.
    """
    shares = []
    for done, goal in (
        (report.get("env_steps_trained"), targets.env_steps),
        (report.get("updates"), targets.updates),
        (report.get("learner/wall_s"), targets.wall_s),
    ):
        if goal and isinstance(done, int | float):
            shares.append(min(1.0, done / goal))
    return max(shares, default=None)


def _advance(report: dict[str, Value], targets: Targets) -> str:
    get = report.get
    steps = _text(get("env_steps_trained"), ",") + _goal(targets.env_steps, ",")
    known = get("mean_return")
    mean_return = format_mean_return(
        known if isinstance(known, int | float) else None,
        get("episodes/count"),
        targets.mean_return,
    )
    # The limit runs from the first update; without one the age of the run says more.
    clock = "time_s" if targets.wall_s is None else "learner/wall_s"
    time_s = _text(get(clock), ".0f") + _goal(targets.wall_s, ".0f")
    return f"{time_s} s  steps {steps}  {_rates(report)}  return {mean_return}"


def _rates(report: dict[str, Value]) -> str:
    """Frames are named where a step takes more than one."""
    steps, frames = report.get("env_steps_per_s"), report.get("frames_per_s")
    text = f"{_text(steps, ',.0f')} steps/s"
    return text if frames == steps else f"{text} ({_text(frames, ',.0f')} frames/s)"


def _state(report: dict[str, Value]) -> str:
    get = report.get
    lag = f"{_text(get('lag/mean'), '.1f')} (max {_text(get('lag/max'), 'g')})"
    depth = _text(get("learner_queue/size_mean"), ".1f")
    capacity = _goal(get("learner_queue/capacity"), "g")
    return f"lag {lag}  queue {depth}{capacity}  actors {_text(get('num_actors'), 'g')}"


def _verdict(report: dict[str, Value]) -> str:
    return f"bottleneck {report.get('bottleneck') or '-'}"


def _text(value: Value, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "-"


def _goal(value: Value, form: str) -> str:
    return "" if value is None else f" / {_text(value, form)}"


def _render(report: dict[str, Value], targets: Targets) -> "RenderableType":
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    advance = Text(_advance(report, targets), no_wrap=True, overflow="ellipsis")
    state = Text(_state(report), no_wrap=True, overflow="ellipsis")
    verdict = Text(_verdict(report))
    share = progress(report, targets)
    if share is None:
        return Group(advance, state, verdict)
    head = Table.grid(padding=(0, 1))
    head.add_row(ProgressBar(total=1.0, completed=share, width=_BAR_WIDTH), advance)
    return Group(head, state, verdict)


def _is_terminal(stream: IO[str]) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown", "")
