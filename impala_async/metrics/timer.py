"""A stopwatch with a memory: how long the last n timings of one activity took.

One thread uses it, the one that does the timed work; it also takes the readings for the report.

    with timer:
        batch = ring.get()
    timer.push_units_processed(batch.num_rows)

A block that raises was timed too: the time has passed, and a wait that ended in `queue.Empty`
is just the wait that the report should show.
"""

import math
import time
from array import array
from collections.abc import Callable
from types import TracebackType
from typing import Self


class TimerStat:
    """Mean and throughput over the last `n` timings; `count` and `total_s` over all of them."""

    def __init__(self, n: int = 10, *, clock: Callable[[], float] = time.perf_counter) -> None:
        assert n >= 1, f"a timer that remembers {n} timings"
        self.count = 0
        self.total_s = 0.0
        self._clock = clock
        self._started: float | None = None
        # Two rings that move together: a throughput divides some work by its own time. What is not
        # yet written in them is 0.
        self._n = n
        self._seconds = array("d", bytes(8 * n))
        self._units = array("d", bytes(8 * n))
        self._early_units = 0.0

    def __enter__(self) -> Self:
        assert self._started is None, "a timer times one block at a time"
        self._started = self._clock()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._started is not None
        elapsed = self._clock() - self._started
        self._started = None
        self.push(elapsed)

    def push(self, seconds: float) -> None:
        """Add a timing that was measured elsewhere, such as between two events of a GPU."""
        seconds = float(seconds)  # a float32 of numpy would turn the running total into one
        assert 0.0 <= seconds < math.inf, f"a timing of {seconds} s"
        place = self.count % self._n
        self._seconds[place], self._units[place] = seconds, self._early_units
        self._early_units = 0.0
        self.count += 1
        self.total_s += seconds

    def push_units_processed(self, k: float) -> None:
        """Count `k` units of work for the timing that runs, or else for the newest one."""
        if self._started is not None or self.count == 0:
            self._early_units += k
        else:
            self._units[(self.count - 1) % self._n] += k

    @property
    def mean(self) -> float | None:
        """Mean seconds over the window; None before the first timing."""
        return sum(self._seconds) / min(self.count, self._n) if self.count else None

    @property
    def mean_ms(self) -> float | None:
        mean = self.mean
        return None if mean is None else 1000.0 * mean

    @property
    def mean_throughput(self) -> float | None:
        """Units per second over the window; None while it holds no measurable time."""
        window_s = sum(self._seconds)
        if window_s <= 0.0:
            return None
        rate = sum(self._units) / window_s
        return rate if math.isfinite(rate) else None
