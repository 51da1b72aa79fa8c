"""The learner thread: draw a batch, update, publish, settle; and wait without fuss when there is
nothing to learn from.

It owns the model while it runs, the windows and timers of learning, and the count of updates.
Everything it tells the loop goes through `Channels`; it never waits for the loop.

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

from impala_async.config.learner import LearnerSection
from impala_async.config.run import StopSection
from impala_async.learner.handoff import (
    NOT_FINITE,
    Captured,
    Channels,
    ClosedError,
    FirstUpdate,
    LearnerReport,
    Progress,
)
from impala_async.learner.minibatch_buffer import MinibatchBuffer
from impala_async.learner.threads.loader import LoadedBatch, Loader, make_current
from impala_async.learner.threads.measurements import Measurements
from impala_async.learner.watchdog import BUILD_PATIENCE
from impala_async.training.result import StepResult
from impala_async.training.snapshot import Snapshot, WeightsCopy
from impala_async.training.step import Step

logger = logging.getLogger(__name__)

# However long no batch comes, requests are answered and limits are looked at this often.
POLL_S = 0.25
WARN_EVERY_S = 10.0
MAX_NAMED = 5
# So many updates in a row that are not finite end the run.
MOST_SKIPPED_IN_A_ROW = 50


class _Pass(NamedTuple):
    """One use of a batch: its update is launched, and nobody has looked at the result."""

    loaded: LoadedBatch
    is_first: bool
    is_last: bool
    result: Callable[[], StepResult] | None = None
    """None where nothing was launched, as there was no valid row."""
    weights: WeightsCopy | None = None
    """As it leaves them, if they may be published then."""


class LearnerThread:
    """One learner. `run` is the body of its thread."""

    is_drained = False
    """Whether all that is full at the end is still trained on."""
    can_overlap = True
    """Whether the next batch may be drawn before the weights of this update are out."""

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
        is_pipelined: bool = False,
    ) -> None:
        self._step = step
        self._snapshot = snapshot
        self._loader = loader
        self._section = section
        self._stop = stop
        self.progress = progress
        self._channels = channels
        self._is_pipelined = is_pipelined
        self._pending: _Pass | None = None
        self._device = device
        self._ring = MinibatchBuffer(
            loader,
            section.minibatch_buffer_size,
            section.num_passes,
            section.init_num_passes,
            timeout_s=min(POLL_S, section.starved_after_s),
        )
        self._is_closed = False
        self._stop_reason: str | None = None
        self._first_update: FirstUpdate | None = None
        self._waited_s = 0.0
        self._starved_at: float | None = None
        self._starved_total_s = 0.0
        self._warn_at = -math.inf
        self._measurements = Measurements(device, section.max_lag, max_waiting, loader)

    def run(self) -> None:
        """Until a stop is reached or the queues close; then settle what the ring holds."""
        make_current(self._device)
        torch.set_num_threads(self._section.threads)
        self._publish()
        try:
            while self._take_turn():
                pass
        finally:
            # A loader's own thread may be waiting for us.
            self._loader.abandon()
            # How long an end may take, its own watch knows.
            self._channels.pulse.rest()
        for loaded in self._ring.drain():
            loaded.drop(loaded.alive_B.copy(), "shutdown")
            self._channels.settlements.post(loaded.settle(self._section.num_passes))
        self._channels.reports.post(self._report())
        self._channels.captures.post(self._capture())

    def _take_turn(self) -> bool:
        """Launch a pass, and look at what the one before came to; False when all is over.

        Where updates are not pipelined, each is looked at in its own turn.
        """
        self._channels.pulse.beat(BUILD_PATIENCE if self._first_update is None else 1)
        launched = None
        if not self._must_look_first():
            self._answer()
            if not self._is_over():
                launched = self._launch_next()
            elif self._pending is None:
                return False
        if self._is_pipelined:
            launched, self._pending = self._pending, launched
        if launched is not None:
            self._look_at(launched)
        return True

    def _must_look_first(self) -> bool:
        """Whether nothing can be launched, asked or ended behind the pass that is pending."""
        pending = self._pending
        if pending is None:
            return False
        item = self._ring.next_item
        if item is None and not self._loader.num_waiting():
            return True  # what it came to is told before we wait
        if item is pending.loaded:
            # Columns that fail in one pass are not in the next, nor change while it is computed.
            return True
        # A pending update may be skipped, and that would leave us short of a limit.
        is_ending = self._stop_reason is not None or self._reached_stop(self._expected) is not None
        return is_ending or self._channels.is_capture_due.is_up

    def _launch_next(self) -> _Pass | None:
        """The next pass; None if no batch came for a moment, or none will come any more."""
        started_s = time.perf_counter()
        loading_s = self._loader.load_wait_timer.total_s
        try:
            draw = self._ring.get()
        except ClosedError:
            self._is_closed = True
            return None
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
        return self._launch(draw.item, is_first=draw.pass_index == 0, is_last=draw.is_last_pass)

    def _note_starved(self) -> None:
        if self._starved_at is None and self._waited_s >= self._section.starved_after_s:
            self._starved_at = time.monotonic() - self._waited_s
            logger.warning(
                "learner starved: no batch for %.1f s; it waits for actors to send more",
                self._waited_s,
            )

    def _launch(self, loaded: LoadedBatch, *, is_first: bool, is_last: bool) -> _Pass:
        expected = self._expected
        loaded.drop(expected.update - loaded.updates_B > self._section.max_lag, "stale")
        num_rows = loaded.num_valid_rows
        if num_rows == 0:
            return _Pass(loaded, is_first, is_last)
        with self._measurements.grad:
            result = self._step.begin(
                loaded.tensors,
                torch.from_numpy(loaded.alive_B),
                # Steps count once, at their first pass.
                expected.env_steps_trained + num_rows * is_first,
                is_first_pass=is_first,
            )
        self._loader.note_launch(loaded)
        weights = None
        if self._is_pipelined and self._is_published(self.progress.update, expected.update + 1):
            # Behind the next update they would be of that one.
            weights = self._snapshot.take()
        return _Pass(loaded, is_first, is_last, result, weights)

    @property
    def _expected(self) -> Progress:
        """Where we are if the update that is pending turns out well."""
        epoch, update, env_steps = self.progress
        if self._pending is not None and self._pending.result is not None:
            update += 1
            env_steps += self._pending.loaded.num_valid_rows * self._pending.is_first
        return Progress(epoch, update, env_steps)

    def _look_at(self, this: _Pass) -> None:
        """Tell what a pass came to. Here, and nowhere else, the host waits for an update."""
        loaded = this.loaded
        result = None if this.result is None else this.result()
        num_updates = 0
        if result is None:
            self._measurements.num_skipped += 1
        else:
            self._measurements.stats = result.stats
            if result.not_finite:
                self._skip(loaded, result)
            if result.applied:
                num_updates = result.num_updates
                self._note_trained(this)
            if self._first_update is None:
                # Or skipped: a run whose every loss is NaN must reach its time limit.
                self._first_update = FirstUpdate(time.monotonic(), self.progress.env_steps_trained)
        loaded.use()
        self._advance(self._count_updates(num_updates, this), this.weights)
        if this.is_last:
            slot = self._loader.release(loaded)
            self._channels.settlements.post(loaded.settle(self._section.num_passes, slot))
        self._measurements.queue_size.push(self._loader.num_waiting())

    def _count_updates(self, num_applied: int, this: _Pass) -> int:
        """By how many updates the version is further behind this pass."""
        return num_applied

    def _note_trained(self, this: _Pass) -> None:
        loaded = this.loaded
        num_rows = loaded.num_valid_rows
        epoch, update, env_steps = self.progress
        self.progress = Progress(epoch, update, env_steps + num_rows * this.is_first)
        self._measurements.note_trained((update - loaded.updates_B)[loaded.alive_B], num_rows)

    def _advance(self, num_updates: int, weights: WeightsCopy | None) -> None:
        epoch, before, env_steps = self.progress
        self.progress = Progress(epoch, before + num_updates, env_steps)
        if self._is_published(before, before + num_updates):
            self._publish(weights)

    def _is_published(self, before: int, after: int) -> bool:
        """Whether a version is due between these two."""
        every = self._section.publish_every_updates
        return after // every > before // every

    def _skip(self, loaded: LoadedBatch, result: StepResult) -> None:
        """Something in an update is not finite: nothing of these columns is learned."""
        self._measurements.num_skipped += 1
        is_failed_B = result.is_failed_B.numpy() & loaded.alive_B
        loaded.drop(is_failed_B, "nonfinite_update")
        what, now = ", ".join(result.not_finite), time.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + WARN_EVERY_S
            if result.applied:
                ranks = np.unique(loaded.ranks_B[is_failed_B])
                logger.warning(
                    "updates go on without %d columns of actors %s that made one fail: %s not "
                    "finite. Is it their environment?",
                    np.count_nonzero(is_failed_B),
                    ", ".join(map(str, ranks[:MAX_NAMED])) + ", ..." * (len(ranks) > MAX_NAMED),
                    what,
                )
            else:
                logger.warning(
                    "update skipped: %s not finite (%d skipped so far)",
                    what,
                    self._measurements.num_skipped,
                )
        num_failed = result.num_failed_in_a_row
        if num_failed >= MOST_SKIPPED_IN_A_ROW and self._stop_reason is None:
            epoch, update, _ = self.progress
            path = self._channels.run_path / f"not-finite-{epoch}-{update}.safetensors"
            kept = result.keep_batch(path, loaded.tensors)
            self._give_up(
                f"{num_failed} updates in a row were skipped since update {update}, as these are "
                f"not finite: {what}; {kept}"
            )

    def _give_up(self, why: str) -> None:
        """There is nothing to learn any more, and nobody should believe that there was."""
        logger.error("%s", why)
        self._stop_reason = NOT_FINITE
        self._channels.stops.post(NOT_FINITE)

    def _publish(self, weights: WeightsCopy | None = None) -> None:
        if weights is None:
            weights = self._snapshot.take()
        if weights.is_finite():
            self._channels.weights.post(weights.as_version(self.progress.version))
        elif self._stop_reason is None:
            self._give_up(
                f"the weights of update {self.progress.update} are not finite: they are neither "
                "published nor saved"
            )

    def _answer(self) -> None:
        """Answer what the loop has asked for since the last update."""
        if self._channels.is_report_due.take():
            self._channels.reports.post(self._report())
        if self._is_between_updates and self._channels.is_capture_due.take():
            self._channels.captures.post(self._capture())

    @property
    def _is_between_updates(self) -> bool:
        """Whether anything may end or be saved now."""
        return True

    def _is_over(self) -> bool:
        """Whether a limit is reached, which the loop is told once, or no batch comes any more."""
        if self._stop_reason is None and self._is_between_updates:
            self._stop_reason = self._reached_stop(self.progress)
            if self._stop_reason is not None:
                self._channels.stops.post(self._stop_reason)
        return self._is_closed or self._stop_reason is not None

    def _reached_stop(self, progress: Progress) -> str | None:
        limit_s, first = self._stop.wall_s, self._first_update
        is_late = limit_s and first and time.monotonic() - first.at >= limit_s
        return progress.reached(self._stop) or ("wall_s" if is_late else None)

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


class LockstepThread(LearnerThread):
    """All passes of a batch are one update there, taken or not; nothing ends or is saved in it."""

    is_drained = True  # else its end would hang on the clock
    can_overlap = False

    def _count_updates(self, num_applied: int, this: _Pass) -> int:
        if this.is_last:
            # It is told before the version is out by which others go on: what they do then does
            # not count.
            self._is_over()
        return int(this.is_last)

    @property
    def _is_between_updates(self) -> bool:
        return len(self._ring) == 0
