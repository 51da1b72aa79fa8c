"""The learner thread: draw a batch, update, publish, settle; and wait without fuss when there is
nothing to learn from.

It owns the model while it runs, the windows and timers of learning, and the count of updates.
Everything it tells the loop goes through `Ports`; it never waits for the loop.

    B columns of a batch

Runs on: learner thread
"""

import logging
import math
import queue
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from impala_async.config import LearnerSection, StopSection
from impala_async.learner.account import BatchAccount
from impala_async.learner.device_timer import DeviceTimer
from impala_async.learner.handoff import ClosedError, Flag, Inbox, Mailbox
from impala_async.learner.hardware import make_current
from impala_async.learner.ledger import Settlement
from impala_async.learner.loader import LoadedBatch, Loader
from impala_async.learner.minibatch_buffer import Draw, MinibatchBuffer
from impala_async.metrics.timer import TimerStat
from impala_async.metrics.window import WindowStat
from impala_async.training.snapshot import Snapshot
from impala_async.training.state import TrainingState, capture
from impala_async.training.step import StepResult, UpdateStep
from impala_async.training.team_step import TeamStep
from impala_async.weights import Version, Weights

logger = logging.getLogger(__name__)

# However long no batch comes, requests are answered and limits are looked at this often.
POLL_S = 0.25
WARN_EVERY_S = 10.0


@dataclass(frozen=True)
class Progress:
    """How far training is; what a checkpoint continues from."""

    epoch: int
    update: int = 0
    env_steps_trained: int = 0

    @property
    def version(self) -> Version:
        return Version(self.epoch, self.update)


@dataclass(frozen=True)
class LearnerReport:
    """A frozen reading of everything that the learner thread owns."""

    progress: Progress
    starved_at: float | None
    first_update_at: float | None
    metrics: dict[str, object]
    lag_histogram: list[int]

    @staticmethod
    def before_any(progress: Progress) -> "LearnerReport":
        """What stands in for the first reading."""
        return LearnerReport(progress, None, None, {}, [])


@dataclass(frozen=True)
class Captured:
    """All that a checkpoint needs from the learner thread, cloned at one moment."""

    progress: Progress
    training: TrainingState


@dataclass(frozen=True)
class Ports:
    """Where the thread's words go, and what the loop asks of it."""

    settlements: Inbox[Settlement]
    weights: Mailbox[Weights] | Inbox[Weights]
    reports: Mailbox[LearnerReport]
    captures: Mailbox[Captured]
    stops: Inbox[str]
    is_report_due: Flag = field(default_factory=Flag)
    is_capture_due: Flag = field(default_factory=Flag)


class LearnerThread:
    """One learner. `run` is the body of its thread."""

    def __init__(
        self,
        *,
        step: UpdateStep | TeamStep,
        snapshot: Snapshot,
        loader: Loader,
        section: LearnerSection,
        stop: StopSection,
        progress: Progress,
        ports: Ports,
        device: torch.device,
        max_waiting: int,
        is_lockstep: bool = False,
    ) -> None:
        self._step = step
        self._snapshot = snapshot
        self._loader = loader
        self._section = section
        self._stop = stop
        self._ports = ports
        self._max_waiting = max_waiting
        self._is_lockstep = is_lockstep
        self._device = device
        self._ring = MinibatchBuffer(
            loader,
            section.minibatch_buffer_size,
            section.num_passes,
            section.init_num_passes,
            timeout_s=min(POLL_S, section.starved_after_s),
        )
        self._epoch = progress.epoch
        self._update = progress.update
        self._env_steps = progress.env_steps_trained
        self._stop_reason: str | None = None
        self._first_update_at: float | None = None
        self._waited_s = 0.0
        self._starved_at: float | None = None
        self._starved_total_s = 0.0
        self._num_skipped = 0
        self._warn_at = -math.inf
        self._last: StepResult | None = None
        self._grad = DeviceTimer(device, TimerStat())
        self._dequeue = TimerStat()
        self._queue_size = WindowStat("learner_queue/size")
        self._lag = WindowStat("lag")
        self._valid_rows = WindowStat("valid_rows")
        self._lag_histogram = np.zeros(section.max_lag + 1, np.int64)

    @property
    def progress(self) -> Progress:
        return Progress(self._epoch, self._update, self._env_steps)

    def run(self) -> None:
        """Until a stop is reached or the queues close; then settle what the ring holds."""
        make_current(self._device)
        torch.set_num_threads(self._section.threads)
        self._publish()
        try:
            while True:
                self._answer()
                if self._is_over():
                    break
                draw = self._next_draw()
                if draw is not None:
                    self._use(draw)
        except ClosedError:
            pass
        finally:
            # A loader's own thread may be waiting for us.
            self._loader.abandon()
        self._finish()

    def _next_draw(self) -> Draw[LoadedBatch] | None:
        """A batch to use, or None if none came for a moment."""
        started_s = time.perf_counter()
        loading_s = self._loader.load_wait_timer.total_s
        try:
            draw = self._ring.get()
        except queue.Empty:
            self._waited_s += time.perf_counter() - started_s
            self._note_starved()
            return None
        # Waiting for a copy is counted apart: it is not the actors who are late then.
        loading_s = self._loader.load_wait_timer.total_s - loading_s
        self._dequeue.push(self._waited_s + time.perf_counter() - started_s - loading_s)
        self._waited_s = 0.0
        if self._starved_at is not None:
            starved_s = time.monotonic() - self._starved_at
            self._starved_total_s += starved_s
            self._starved_at = None
            logger.warning("learner no longer starved, after %.1f s", starved_s)
        return draw

    def _note_starved(self) -> None:
        if self._starved_at is None and self._waited_s >= self._section.starved_after_s:
            self._starved_at = time.monotonic() - self._waited_s
            logger.warning(
                "learner starved: no batch for %.1f s; it waits for actors to send more",
                self._waited_s,
            )

    def _use(self, draw: Draw[LoadedBatch]) -> None:
        """One pass of a batch."""
        loaded = draw.item
        account = loaded.account
        lag_B = self._update - loaded.updates_B
        account.drop(lag_B > self._section.max_lag, "stale")
        if loaded.valid_rows_B[account.alive_B].any():
            self._learn(loaded, lag_B, is_first_pass=draw.pass_index == 0)
        else:
            self._num_skipped += 1
        account.use()
        if draw.is_last_pass:
            if self._is_lockstep:
                # All passes of a batch are one update there. The end is told before the version
                # is out by which others go on: what they do then does not count.
                self._is_over()
                self._advance(1)
            self._ports.settlements.post(account.settle(self._section.num_passes))
            self._loader.release(loaded)
        self._queue_size.push(self._loader.num_waiting())

    def _learn(self, loaded: LoadedBatch, lag_B: NDArray[np.int64], *, is_first_pass: bool) -> None:
        account = loaded.account
        # Steps count once, at their first pass.
        new_rows_B = loaded.valid_rows_B * is_first_pass
        env_steps = self._env_steps + int(new_rows_B[account.alive_B].sum())
        with self._grad:
            result = self._step.run(
                loaded.tensors,
                torch.from_numpy(account.alive_B),
                env_steps,
                is_first_pass=is_first_pass,
            )
        self._last = result
        # One that is skipped counts too: a run whose every loss is NaN must reach its time limit.
        self._first_update_at = self._first_update_at or time.monotonic()
        if result.is_failed_B.any():
            self._skip(account, result.is_failed_B.numpy())
        if not result.applied:
            return
        self._env_steps += int(new_rows_B[account.alive_B].sum())
        lags = lag_B[account.alive_B]
        self._lag.push_many(lags)
        self._lag_histogram += np.bincount(lags, minlength=len(self._lag_histogram))
        self._valid_rows.push(int(loaded.valid_rows_B[account.alive_B].sum()))
        if not self._is_lockstep:
            self._advance(result.num_updates)

    def _advance(self, num_updates: int) -> None:
        before, self._update = self._update, self._update + num_updates
        every = self._section.publish_every_updates
        if self._update // every > before // every:
            self._publish()

    def _skip(self, account: BatchAccount, is_failed_B: NDArray[np.bool_]) -> None:
        """The loss or the gradient is not finite: nothing of these columns is learned."""
        self._num_skipped += 1
        account.drop(is_failed_B, "nonfinite_update")
        now = time.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + WARN_EVERY_S
            logger.warning(
                "update skipped: its loss or gradient is not finite (%d skipped so far)",
                self._num_skipped,
            )

    def _publish(self) -> None:
        version = Version(self._epoch, self._update)
        self._ports.weights.post(self._snapshot.take(self._step.policy.tensors, version))

    def _answer(self) -> None:
        """What the loop asked for since the last update."""
        if self._ports.is_report_due.take():
            self._ports.reports.post(self._report())
        if self._is_between_updates and self._ports.is_capture_due.take():
            self._ports.captures.post(self._capture())

    @property
    def _is_between_updates(self) -> bool:
        """In lockstep the passes of a batch are one update: nothing ends or is saved in it."""
        return not self._is_lockstep or len(self._ring) == 0

    def _is_over(self) -> bool:
        """Whether a limit is reached; the loop is told once."""
        if self._stop_reason is None and self._is_between_updates:
            self._stop_reason = self._reached_stop()
            if self._stop_reason is not None:
                self._ports.stops.post(self._stop_reason)
        return self._stop_reason is not None

    def _reached_stop(self) -> str | None:
        if self._stop.env_steps is not None and self._env_steps >= self._stop.env_steps:
            return "env_steps"
        if self._stop.updates is not None and self._update >= self._stop.updates:
            return "updates"
        if self._stop.wall_s is not None and self._first_update_at is not None:
            ran_s = time.monotonic() - self._first_update_at
            return "wall_s" if ran_s >= self._stop.wall_s else None
        return None

    def _finish(self) -> None:
        for loaded, _, _ in self._ring.drain():
            loaded.account.drop(loaded.account.alive_B.copy(), "shutdown")
            self._ports.settlements.post(loaded.account.settle(self._section.num_passes))
        self._ports.reports.post(self._report())
        self._ports.captures.post(self._capture())

    def _capture(self) -> Captured:
        return Captured(self.progress, capture(self._step))

    def _report(self) -> LearnerReport:
        starved_s = 0.0 if self._starved_at is None else time.monotonic() - self._starved_at
        lag = self._lag.summary()
        metrics: dict[str, object] = {
            "learner/starved_total_s": self._starved_total_s + starved_s,
            "learner/skipped_updates": self._num_skipped,
            "learner_queue/capacity": self._max_waiting,
            "batch/valid_rows_mean": self._valid_rows.summary().mean,
            "lag/mean": lag.mean,
            "lag/max": self._lag.max,
            "lag/quantiles": lag.quantiles,
            **self._queue_size.stats(),
            **self._timings(),
            **(self._last.floats() if self._last else {}),
        }
        return LearnerReport(
            self.progress,
            self._starved_at,
            self._first_update_at,
            metrics,
            self._lag_histogram.tolist(),
        )

    def _timings(self) -> dict[str, object]:
        timers = {
            "grad": self._grad.stat,
            "load": self._loader.load_timer,
            "load_wait": self._loader.load_wait_timer,
            "dequeue": self._dequeue,
        }
        return {
            f"timing_breakdown/learner_{name}_time_ms": timer.mean_ms
            for name, timer in timers.items()
        }
