"""The numbers of the learner thread: its waits, the lag of what it trains on, and those of its
updates.

Runs on: learner thread, which alone reads and writes them
"""

import logging
import math
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from impala_async.config.learner import LearnerSection
from impala_async.learner.loader import DeviceTimer, HostLoader
from impala_async.metrics.means import UpdateMeans
from impala_async.metrics.sinks import json_line
from impala_async.metrics.timer import TimerStat
from impala_async.metrics.window import WindowStat
from impala_async.training.step import StepResult
from impala_async.weights import Version

logger = logging.getLogger(__name__)

TIMED_BATCHES = 10
# A report that is hours away must not fill the memory.
MOST_UPDATES_LOGGED = 100_000


class LearnerStats:
    """Counts and windows, which each report of the thread reads."""

    def __init__(
        self, section: LearnerSection, loader: HostLoader, device: torch.device, *, is_eager: bool
    ) -> None:
        """`is_eager`: passes are made of the time in which nothing new waits."""
        self._section, self._loader, self._is_eager = section, loader, is_eager
        self.waited_s = 0.0
        """Since the last batch."""
        self._has_begun = False
        self.starved_at: float | None = None
        self._starved_total_s = 0.0
        # The time of passes that were made of idle time.
        self._spare_s = 0.0
        self._copied_s = 0.0
        self.num_skipped = 0
        """Updates, and passes over a batch without a valid row."""
        self.newest: dict[str, float] = {}
        """Those of the newest update, whatever became of it."""
        self._means = UpdateMeans()
        self._updates, self._num_logged = deque[bytes](maxlen=MOST_UPDATES_LOGGED), 0
        self._grad_timer = DeviceTimer() if device.type == "cuda" else TimerStat()
        # The first pass of a batch has all its waits.
        num_timings = TIMED_BATCHES * (1 if is_eager else section.most_passes)
        self._dequeue_timer, self._copy_timer = TimerStat(num_timings), TimerStat(num_timings)
        self._rank_timer = TimerStat(num_timings)
        self._queue_size = WindowStat("learner_queue/size")
        self._valid_rows = WindowStat("valid_rows")
        # A batch has its oldest columns first, and often more than a usual window holds.
        self._lag = WindowStat("lag", n=max(50, section.batch_columns))
        self._lag_histogram = np.zeros(section.max_lag + 1, np.int64)

    def add_wait(self, waited_s: float, *, has_batch: bool) -> None:
        """The thread has waited so long for a batch, and may have got one."""
        self.waited_s += waited_s
        if has_batch and self.starved_at is not None:
            self._starved_total_s += self.waited_s
            self.starved_at = None
            logger.warning("learner no longer starved, after %.1f s", self.waited_s)
        is_long = self.waited_s >= self._section.starved_after_s
        if not has_batch and self.starved_at is None and is_long:
            self.starved_at = time.monotonic() - self.waited_s
            text = "learner starved: no batch for %.1f s; it waits for actors to send more"
            logger.warning(text, self.waited_s)

    def end_wait(self, *, is_first: bool) -> None:
        """There is a batch, for its first pass or a later one. Waiting for a copy is counted apart:
        it is not the actors who are late then."""
        before_s, self._copied_s = self._copied_s, self._loader.load_wait_timer.total_s
        copies_s = self._copied_s - before_s
        if is_first or not self._is_eager:
            waited_s = self.waited_s + self._spare_s - copies_s
            # Before its first batch actors start: it was no wait of the training that is judged.
            self._dequeue_timer.push(max(0.0, waited_s) if self._has_begun else 0.0)
            self._has_begun = True
            self._copy_timer.push(copies_s)
            self._spare_s = 0.0
        self.waited_s = 0.0

    def add_rank_wait(self, waited_s: float) -> None:
        """Batches of all ranks are there, so long after that of this one."""
        self._rank_timer.push(waited_s)

    def end_pass(self, took_s: float, *, is_first: bool) -> None:
        """A pass is over, and its batch not yet given back."""
        if self._is_eager and not is_first and not self._loader.num_waiting():
            # There was nothing new all the while: it would have waited.
            self._spare_s += took_s

    def note_queue(self) -> None:
        """Push how many batches wait now."""
        self._queue_size.push(self._loader.num_waiting())

    def timing(self, *, is_first: bool) -> AbstractContextManager[object]:
        """A context to make the updates of a pass in, which may time them."""
        return nullcontext() if self._is_eager and not is_first else self._grad_timer

    def add_result(self, result: StepResult, version: Version, *, is_logged: bool) -> None:
        """A pass that began at this version had this result."""
        self.newest = result.stats
        self._means.add(result.stats, result.num_updates, result.num_updates_of)
        if is_logged:
            stats = {name: v if math.isfinite(v) else None for name, v in result.stats.items()}
            line = {**version._asdict(), "num_updates": result.num_updates, **stats}
            # Encoded here: the event loop would be held up by thousands.
            self._updates.append(json_line(line))
            self._num_logged += 1

    def add_batch(self, lags: NDArray[np.int64], num_valid_rows: int) -> None:
        """Something of a batch was learned: of columns that are so many updates old."""
        self._lag.push_many(lags)
        self._lag_histogram += np.bincount(lags, minlength=len(self._lag_histogram))
        self._valid_rows.push(num_valid_rows)

    @property
    def lag_histogram(self) -> list[int]:
        """How many columns were learned from at each lag."""
        found: list[int] = self._lag_histogram.tolist()
        return found

    def take_updates(self) -> bytes:
        """The lines of all updates since the last time; of the newest, where they are too many."""
        if self._num_logged > MOST_UPDATES_LOGGED:
            logger.warning(
                "updates.jsonl: passes are left out, more than %s came between two reports: lower "
                "learner.report_every_s",
                f"{MOST_UPDATES_LOGGED:,}",
            )
        updates = b"".join(self._updates)
        self._updates.clear()
        self._num_logged = 0
        return updates

    def report(self, *, is_last: bool) -> dict[str, object]:
        """The metrics of the thread."""
        starved_s = 0.0 if self.starved_at is None else time.monotonic() - self.starved_at
        return {
            "learner/starved_total_s": self._starved_total_s + starved_s,
            "learner/skipped_updates": self.num_skipped,
            # All slots but those of the ring.
            "learner_queue/capacity": self._loader.num_slots - self._section.minibatch_buffer_size,
            "batch/valid_rows_mean": self._valid_rows.mean,
            "lag/mean": self._lag.mean,
            "lag/max": self._lag.max,
            "lag/quantiles": self._lag.quantiles,
            "timing_breakdown/learner_grad_time_ms": self._grad_timer.mean_ms,
            "timing_breakdown/learner_load_time_ms": self._loader.load_timer.mean_ms,
            "timing_breakdown/learner_load_wait_time_ms": self._copy_timer.mean_ms,
            "timing_breakdown/learner_dequeue_time_ms": self._dequeue_timer.mean_ms,
            "timing_breakdown/learner_rank_wait_time_ms": self._rank_timer.mean_ms,
            **self._queue_size.stats(),
            # A run that is made again ends alike, but the clock has cut its last interval.
            **(self.newest if is_last else self._means.take()),
        }
