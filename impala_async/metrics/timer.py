"""A stopwatch with a memory: how long the last n timings of one activity took.

A block that raises was timed too: a wait that ended in `queue.Empty` is one that a report shows.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Self


class TimerStat:
    """Mean and throughput over the last `n` timings; `count` and `total_s` over all of them."""

    def __init__(self, n: int = 10, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.count = 0
        self.total_s = 0.0
        self._clock = clock
        self._started: float | None = None
        # Seconds and units of each: a throughput divides some work by its own time.
        self._timings: deque[tuple[float, float]] = deque(maxlen=n)
        self._early_units = 0.0

    def __enter__(self) -> Self:
        assert self._started is None, "a timer times one block at a time"
        self._started = self._clock()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._started is not None
        elapsed, self._started = self._clock() - self._started, None
        self.push(elapsed)

    def push(self, seconds: float) -> None:
        """Add a timing that was measured elsewhere, such as between two events of a GPU."""
        seconds = float(seconds)  # a float32 of numpy would turn the running total into one
        assert 0.0 <= seconds < math.inf, f"a timing of {seconds} s"
        self._timings.append((seconds, self._early_units))
        self._early_units = 0.0
        self.count += 1
        self.total_s += seconds

    def push_units_processed(self, k: float) -> None:
        """Count `k` units of work for the timing that runs, or else for the newest one."""
        if self._started is not None or not self._timings:
            self._early_units += float(k)
        else:
            seconds, units = self._timings[-1]
            self._timings[-1] = seconds, units + float(k)

    @property
    def mean(self) -> float | None:
        """Mean seconds over the window; None before the first timing."""
        seconds = [each for each, _ in self._timings]
        return sum(seconds) / len(seconds) if seconds else None

    @property
    def mean_ms(self) -> float | None:
        return None if self.mean is None else 1000.0 * self.mean

    @property
    def mean_throughput(self) -> float | None:
        """Units per second over the window; None while it holds no measurable time."""
        window_s = sum(seconds for seconds, _ in self._timings)
        return sum(units for _, units in self._timings) / window_s if window_s > 0.0 else None
