"""A stopwatch with a memory: how long the last n timings of one activity took.

Owns two preallocated rings of n entries, seconds and units of work, that move together, so a
throughput always divides the work of some timings by the time of those same timings. Used by
one thread, the one that does the timed work; it also takes the readings for the report.

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
        self._n = n
        self._clock = clock
        self._seconds = array("d", bytes(8 * n))
        self._units = array("d", bytes(8 * n))
        self._started: float | None = None
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

    def push(self, seconds: float, units: float = 0.0) -> None:
        """Add a timing that was measured elsewhere, such as between two events of a GPU."""
        seconds = float(seconds)  # a float32 of numpy would turn the running total into one
        assert 0.0 <= seconds < math.inf, f"a timing of {seconds} s"
        place = self.count % self._n
        self._seconds[place] = seconds
        self._units[place] = units + self._early_units
        self._early_units = 0.0
        self.count += 1
        self.total_s += seconds

    def push_units_processed(self, k: float) -> None:
        """Credit `k` units of work to the timing that runs, or else to the newest one.

        Before there is any, they wait for the first.
        """
        if self._started is not None or self.count == 0:
            self._early_units += k
        else:
            self._units[(self.count - 1) % self._n] += k

    @property
    def mean(self) -> float | None:
        """Mean seconds over the window; None before the first timing."""
        return sum(self._seconds) / self._num_held if self.count else None

    @property
    def mean_ms(self) -> float | None:
        """The same in milliseconds, the unit of `timing_breakdown/`."""
        mean = self.mean
        return None if mean is None else 1000.0 * mean

    @property
    def last(self) -> float | None:
        """Seconds of the newest timing; None before the first."""
        return self._seconds[(self.count - 1) % self._n] if self.count else None

    @property
    def mean_throughput(self) -> float | None:
        """Units per second over the window; None while it holds no measurable time."""
        window_s = sum(self._seconds)
        if window_s <= 0.0:
            return None
        rate = sum(self._units) / window_s
        return rate if math.isfinite(rate) else None

    @property
    def _num_held(self) -> int:
        # Places not yet written hold zero, so sums over the whole ring need no slice.
        return min(self.count, self._n)
