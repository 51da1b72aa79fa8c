"""What the learner thread measures of its own work: windows, timers and counts.

Runs on: learner thread
"""

import numpy as np
import torch
from numpy.typing import NDArray

from impala_async.learner.threads.device_timer import DeviceTimer
from impala_async.learner.threads.loader import Loader
from impala_async.metrics.timer import TimerStat
from impala_async.metrics.window import WindowStat


class Measurements:
    """Written to by the thread as it goes; read by its reports."""

    def __init__(
        self, device: torch.device, max_lag: int, max_waiting: int, loader: Loader
    ) -> None:
        self._max_waiting = max_waiting
        self._loader = loader
        self.num_skipped = 0
        self.stats: dict[str, float] = {}
        """Of the newest update, whatever became of it."""
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
        lag = self._lag.summary()
        return {
            "learner/starved_total_s": starved_total_s,
            "learner/skipped_updates": self.num_skipped,
            "learner_queue/capacity": self._max_waiting,
            "batch/valid_rows_mean": self._valid_rows.summary().mean,
            "lag/mean": lag.mean,
            "lag/max": self._lag.max,
            "lag/quantiles": lag.quantiles,
            **self.queue_size.stats(),
            **self._timings(),
            **self.stats,
        }

    def _timings(self) -> dict[str, object]:
        timers = {
            "grad": self.grad.stat,
            "load": self._loader.load_timer,
            "load_wait": self._loader.load_wait_timer,
            "dequeue": self.dequeue,
        }
        return {
            f"timing_breakdown/learner_{name}_time_ms": timer.mean_ms
            for name, timer in timers.items()
        }
