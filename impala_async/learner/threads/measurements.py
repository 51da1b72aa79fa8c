"""The learner thread measures its own work: windows, timers and counts.

Runs on: learner thread
"""

import time
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

from impala_async.learner.threads.loader import HostLoader
from impala_async.metrics.timer import TimerStat
from impala_async.metrics.window import WindowStat


class DeviceTimer:
    """Times launches without waiting for them: by events on a GPU, by the clock on a CPU.

    `stat` gets the durations, on a GPU some calls later.
    """

    def __init__(self, device: torch.device, stat: TimerStat) -> None:
        self.stat = stat
        self._is_cuda = device.type == "cuda"
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._started_s = 0.0

    def __enter__(self) -> None:
        if self._is_cuda:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            self._pending.append(pair)
        else:
            self._started_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if not self._is_cuda:
            self.stat.push(time.perf_counter() - self._started_s)
            return
        self._pending[-1][1].record()
        while self._pending and self._pending[0][1].query():
            start, stop = self._pending.popleft()
            self.stat.push(start.elapsed_time(stop) / 1000)


class Measurements:
    """Written to by the thread as it goes; read by its reports."""

    def __init__(
        self, device: torch.device, max_lag: int, max_waiting: int, loader: HostLoader
    ) -> None:
        self._max_waiting = max_waiting
        self._loader = loader
        self.num_skipped = 0
        self.stats: dict[str, float] = {}
        """These are of the newest update, whatever became of it."""
        self.grad = DeviceTimer(device, TimerStat())
        self.dequeue = TimerStat()
        self.queue_size = WindowStat("learner_queue/size")
        self.lag_histogram = np.zeros(max_lag + 1, np.int64)
        self._lag = WindowStat("lag")
        self._valid_rows = WindowStat("valid_rows")

    def note_trained(self, lags: NDArray[np.int64], num_valid_rows: int) -> None:
        """An update was taken, with columns of these lags."""
        self._lag.push_many(lags)
        self.lag_histogram += np.bincount(lags, minlength=len(self.lag_histogram))
        self._valid_rows.push(num_valid_rows)

    def metrics(self, starved_total_s: float) -> dict[str, object]:
        """All of it, under the names of the registry."""
        timers = {
            "grad": self.grad.stat,
            "load": self._loader.load_timer,
            "load_wait": self._loader.load_wait_timer,
            "dequeue": self.dequeue,
        }
        timings: dict[str, object] = {
            f"timing_breakdown/learner_{name}_time_ms": timer.mean_ms
            for name, timer in timers.items()
        }
        return {
            "learner/starved_total_s": starved_total_s,
            "learner/skipped_updates": self.num_skipped,
            "learner_queue/capacity": self._max_waiting,
            "batch/valid_rows_mean": self._valid_rows.mean,
            "lag/mean": self._lag.mean,
            "lag/max": self._lag.max,
            "lag/quantiles": self._lag.quantiles,
            **self.queue_size.stats(),
            **timings,
            **self.stats,
        }
