"""The learner thread: draw a batch, update, publish, settle; and wait without fuss when there is
nothing to learn from.

It owns the model while it runs, the windows and timers of learning, and the count of updates.
Everything it tells the loop goes through `Channels`; it never waits for the loop.

    B columns of a batch

Runs on: learner thread
"""

import logging
import math
import queue
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from impala_async.config.learner import LearnerSection
from impala_async.config.run import StopSection
from impala_async.learner.channels import (
    NOT_FINITE,
    Captured,
    Channels,
    FirstUpdate,
    LearnerReport,
    Progress,
)
from impala_async.learner.handoff import ClosedError
from impala_async.learner.hardware import make_current
from impala_async.learner.minibatch_buffer import Draw, MinibatchBuffer
from impala_async.learner.threads.batch import LoadedBatch
from impala_async.learner.threads.loader import Loader
from impala_async.learner.threads.measurements import Measurements
from impala_async.learner.watchdog import BUILD_PATIENCE
from impala_async.training.result import StepResult
from impala_async.training.snapshot import Snapshot, WeightsCopy
from impala_async.training.step import Step

logger = logging.getLogger(__name__)

# However long no batch comes, requests are answered and limits are looked at this often.
POLL_S = 0.25
WARN_EVERY_S = 10.0


class _Pending(NamedTuple):
    """A pass of a batch whose update is launched, and nobody has looked at the result."""

    draw: Draw[LoadedBatch]
    new_rows_B: NDArray[np.int64]
    result: Callable[[], StepResult]
    weights: WeightsCopy | None
    """As it leaves them, if they may be published then."""


class LearnerThread:
    """One learner. `run` is the body of its thread."""

    def __init__(
        self,
        *,
        step: Step,
        snapshot: Snapshot,
        loader: Loader,
        section: LearnerSection,
        stop: StopSection,
        progress: Progress,
        channels: Channels,
        device: torch.device,
        max_waiting: int,
        is_lockstep: bool = False,
        is_pipelined: bool = False,
    ) -> None:
        self._step = step
        self._snapshot = snapshot
        self._loader = loader
        self._section = section
        self._stop = stop
        self._channels = channels
        self._is_lockstep = is_lockstep
        self._is_pipelined = is_pipelined
        self._pending: _Pending | None = None
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
        self._first_update: FirstUpdate | None = None
        self._waited_s = 0.0
        self._starved_at: float | None = None
        self._starved_total_s = 0.0
        self._warn_at = -math.inf
        self._measurements = Measurements(device, section.max_lag, max_waiting, loader)

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
                self._channels.pulse.beat(BUILD_PATIENCE if self._first_update is None else 1)
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
            # How long an end may take, its own watch knows.
            self._channels.pulse.rest()
        self._finish()

    def _next_draw(self) -> Draw[LoadedBatch] | None:
        """A batch to use, or None if none came for a moment."""
        if self._ring.is_next_empty and not self._loader.num_waiting():
            # Nothing can be launched behind it: what it came to is told before we wait.
            self._resolve()
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
        self._measurements.dequeue.push(
            self._waited_s + time.perf_counter() - started_s - loading_s
        )
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
        """One pass of a batch: launch its update, then look at the one before."""
        loaded = draw.item
        if self._pending is not None and self._pending.draw.item is loaded:
            # Columns that fail in one pass are not in the next, nor change while it is computed.
            self._resolve()
        loaded.drop(self._expected.update - loaded.updates_B > self._section.max_lag, "stale")
        launched = self._launch(draw) if loaded.valid_rows_B[loaded.alive_B].any() else None
        self._resolve()
        if launched is None:
            self._measurements.num_skipped += 1
            self._end_pass(draw)
        else:
            self._pending = launched
            if not self._is_pipelined:
                self._resolve()

    def _launch(self, draw: Draw[LoadedBatch]) -> _Pending:
        loaded, is_first_pass = draw.item, draw.pass_index == 0
        alive_B = loaded.alive_B
        # Steps count once, at their first pass.
        new_rows_B = loaded.valid_rows_B * is_first_pass
        expected = self._expected
        with self._measurements.grad:
            result = self._step.begin(
                loaded.tensors,
                torch.from_numpy(alive_B),
                expected.env_steps_trained + int(new_rows_B[alive_B].sum()),
                is_first_pass=is_first_pass,
            )
        self._loader.note_launch(loaded)
        weights = None
        if self._is_pipelined and self._is_published(self._update, expected.update + 1):
            # Behind the next update they would be of that one.
            weights = self._snapshot.take(self._step.policy.tensors)
        return _Pending(draw, new_rows_B, result, weights)

    @property
    def _expected(self) -> Progress:
        """Where we are if the update that is pending turns out well."""
        if self._pending is None:
            return self.progress
        new_rows_B, alive_B = self._pending.new_rows_B, self._pending.draw.item.alive_B
        env_steps = self._env_steps + int(new_rows_B[alive_B].sum())
        return Progress(self._epoch, self._update + 1, env_steps)

    def _resolve(self) -> None:
        """Look at the update that is pending, if there is one, and tell what it came to."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        result = pending.result()
        self._measurements.stats = result.stats
        if result.is_failed_B.any():
            self._skip(pending.draw.item, result)
        if result.applied:
            self._note_trained(pending, result.num_updates)
        if self._first_update is None:
            # Or skipped: a run whose every loss is NaN must reach its time limit.
            self._first_update = FirstUpdate(time.monotonic(), self._env_steps)
        self._end_pass(pending.draw)

    def _note_trained(self, pending: _Pending, num_updates: int) -> None:
        loaded = pending.draw.item
        alive_B = loaded.alive_B
        self._env_steps += int(pending.new_rows_B[alive_B].sum())
        lag_B = self._update - loaded.updates_B
        self._measurements.note_trained(lag_B[alive_B], int(loaded.valid_rows_B[alive_B].sum()))
        if not self._is_lockstep:
            self._advance(num_updates, pending.weights)

    def _end_pass(self, draw: Draw[LoadedBatch]) -> None:
        loaded = draw.item
        loaded.use()
        if draw.is_last_pass:
            if self._is_lockstep:
                # All passes of a batch are one update there. The end is told before the version
                # is out by which others go on: what they do then does not count.
                self._is_over()
                self._advance(1)
            slot = self._loader.release(loaded)
            self._channels.settlements.post(loaded.settle(self._section.num_passes, slot))
        self._measurements.queue_size.push(self._loader.num_waiting())

    def _advance(self, num_updates: int, weights: WeightsCopy | None = None) -> None:
        before, self._update = self._update, self._update + num_updates
        if self._is_published(before, self._update):
            self._publish(weights)

    def _is_published(self, before: int, after: int) -> bool:
        """Whether a version is due between these two."""
        every = self._section.publish_every_updates
        return after // every > before // every

    def _skip(self, loaded: LoadedBatch, result: StepResult) -> None:
        """Something in an update is not finite: nothing of these columns is learned."""
        self._measurements.num_skipped += 1
        loaded.drop(result.is_failed_B.numpy(), "nonfinite_update")
        what, now = ", ".join(result.not_finite), time.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + WARN_EVERY_S
            logger.warning(
                "update skipped: %s not finite (%d skipped so far)",
                what,
                self._measurements.num_skipped,
            )
        num_failed, update = result.num_failed_in_a_row, self._update
        if num_failed >= self._section.max_skipped_in_a_row and self._stop_reason is None:
            path = self._channels.run_path / f"not-finite-{self._epoch}-{update}.safetensors"
            kept = result.keep_batch(path, loaded.tensors)
            self._give_up(
                f"{num_failed} updates in a row were skipped since update {update}, as these are "
                f"not finite: {what} (learner.max_skipped_in_a_row); {kept}"
            )

    def _give_up(self, why: str) -> None:
        """There is nothing to learn any more, and nobody should believe that there was."""
        logger.error("%s", why)
        self._stop_reason = NOT_FINITE
        self._channels.stops.post(NOT_FINITE)

    def _publish(self, weights: WeightsCopy | None = None) -> None:
        if weights is None:
            weights = self._snapshot.take(self._step.policy.tensors)
        if weights.is_finite():
            self._channels.weights.post(weights.as_version(self.progress.version))
        elif self._stop_reason is None:
            self._give_up(
                f"the weights of update {self._update} are not finite: they are neither published "
                "nor saved"
            )

    def _answer(self) -> None:
        """Answer what the loop has asked for since the last update."""
        if self._channels.is_report_due.take():
            self._channels.reports.post(self._report())
        if self._is_between_updates and self._channels.is_capture_due.take():
            self._resolve()
            self._channels.captures.post(self._capture())

    @property
    def _is_between_updates(self) -> bool:
        """In lockstep the passes of a batch are one update: nothing ends or is saved in it."""
        return not self._is_lockstep or len(self._ring) == 0

    def _is_over(self) -> bool:
        """Whether a limit is reached; the loop is told once."""
        if self._stop_reason is None and self._is_between_updates:
            if self._reached_stop(self._expected):
                # A pending update may be skipped, and that would leave us short of the limit.
                self._resolve()
                self._stop_reason = self._reached_stop(self.progress)
            if self._stop_reason is not None:
                self._channels.stops.post(self._stop_reason)
        return self._stop_reason is not None

    def _reached_stop(self, progress: Progress) -> str | None:
        limit_s, first = self._stop.wall_s, self._first_update
        is_late = limit_s and first and time.monotonic() - first.at >= limit_s
        return progress.reached(self._stop) or ("wall_s" if is_late else None)

    def _finish(self) -> None:
        self._resolve()
        for loaded, _, _ in self._ring.drain():
            loaded.drop(loaded.alive_B.copy(), "shutdown")
            self._channels.settlements.post(loaded.settle(self._section.num_passes))
        self._channels.reports.post(self._report())
        self._channels.captures.post(self._capture())

    def _capture(self) -> Captured:
        return Captured(self.progress, self._step.capture())

    def _report(self) -> LearnerReport:
        starved_s = 0.0 if self._starved_at is None else time.monotonic() - self._starved_at
        return LearnerReport(
            self.progress,
            self._starved_at,
            self._first_update,
            self._measurements.metrics(self._starved_total_s + starved_s),
            self._measurements.lag_histogram.tolist(),
        )
