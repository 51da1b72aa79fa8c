"""Progress for people: kept up to date in place in a terminal, a line now and then elsewhere.

Owns the last lines of the terminal while a run goes on. Only the reporter redraws it: there is no
refresh thread. A terminal that has gone, or a full disk, shows less, and ends nothing.
"""

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from impala_async.config.run import StopSection
from impala_async.metrics.names import Value, numbers
from impala_async.metrics.report import format_mean_return

LINE_EVERY_S = 10.0


class ConsoleSink:
    def __init__(
        self, stop: StopSection, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stop = stop
        self._stream = console.file
        is_terminal = self._stream.isatty() and os.environ.get("TERM") not in (None, "", "dumb")
        self._live = Live(console=console, auto_refresh=False) if is_terminal else None
        self._clock = clock
        self._due = -math.inf
        self._is_gone = False

    def write(self, report: dict[str, Value]) -> None:
        if self._is_gone or (self._live is None and self._clock() < self._due):
            return
        self._due = self._clock() + LINE_EVERY_S
        *lines, verdict = _texts(report, self._stop)
        try:
            if self._live is None:
                print("  ".join([*lines, verdict]), file=self._stream, flush=True)
                return
            heads = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
            self._live.start()
            self._live.update(Group(*heads, Text(verdict)), refresh=True)
        # A closed stream is a ValueError.
        except (OSError, ValueError):
            # A full disk may have room again, but for a terminal that has gone rich would keep all.
            self._is_gone = self._live is not None

    def close(self) -> None:
        if self._live is not None:
            with suppress(OSError, ValueError):
                self._live.stop()


def _texts(report: dict[str, Value], stop: StopSection) -> tuple[str, str, str]:
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
    if (evaluated := _evaluated(report)) is not None or stop.eval_return is not None:
        returned += f"  eval {format_mean_return(evaluated, None, stop.eval_return)}"
    lag = f"{_text(get('lag/mean'), '.1f')} (max {_text(get('lag/max'), 'g')})"
    queue = _text(get("learner_queue/size_mean"), ".1f", get("learner_queue/capacity"))
    return (
        f"{time_s} s  steps {steps}  {rates}  return {returned}",
        f"lag {lag}  queue {queue}  actors {_text(get('num_actors'), 'g')}",
        f"bottleneck {report.get('bottleneck') or '-'}",
    )


def _evaluated(report: dict[str, Value]) -> float | None:
    """The return of the newest evaluation that decides what is best."""
    get = numbers(report).get
    return get("evaluate/greedy_return", get("evaluate/sampled_return"))


def _text(value: float | None, form: str, goal: float | None = None) -> str:
    text = "-" if value is None else format(value, form)
    return text if goal is None else f"{text} / {goal:,.12g}"
