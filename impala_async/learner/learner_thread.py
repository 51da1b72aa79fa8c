"""The learner thread: draw a batch, update, publish, settle; and never wait for the loop.

Runs on: learner thread
"""

import logging
import math
import queue
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from impala_async.config.learner import LearnerSection
from impala_async.config.run import StopSection
from impala_async.errors import RankError
from impala_async.learner import handoff
from impala_async.learner.agreement import Word, agree, begin_alike
from impala_async.learner.loader import HostLoader, LoadedBatch, make_current
from impala_async.learner.minibatch_buffer import Draw, MinibatchBuffer
from impala_async.learner.stats import LearnerStats
from impala_async.learner.watchdog import BUILD_PATIENCE
from impala_async.metrics.report import RETURN_EPISODES
from impala_async.models.flat import Snapshot
from impala_async.output import SeldomLog
from impala_async.training.ranks import Ranks
from impala_async.training.step import StepResult, UpdateStep
from impala_async.training.team_step import TeamStep

logger = logging.getLogger(__name__)

# Ranks look this often whether they have the same weights; at each checkpoint, too.
CHECK_EVERY = 1000
# However long no batch comes, requests are answered and limits are looked at this often.
POLL_S = 0.25
# So long after the end was asked for the passes of a batch are still made.
LAST_PASSES_S = 5.0
# Where trajectories are cut, a rank without a batch says its word so often while another one is
# ready; while none is, when it has waited so much longer, as a share of its wait.
CUT_POLL_S, CUT_POLL_SHARE = 0.01, 0.1
MAX_NAMED = 5
# A rank that says nothing for this share of the time after which we would be stuck has failed.
RANK_SHARE = 0.4
# So many updates in a row that are not finite end the run.
MOST_SKIPPED_IN_A_ROW = 50


@dataclass(eq=False, kw_only=True)
class LearnerThread:
    """`run` is the body of the thread. In lockstep all passes of a batch are one update, taken or
    not, and nothing ends or is saved between them."""

    step: UpdateStep | TeamStep
    snapshot: Snapshot
    loader: HostLoader
    section: LearnerSection
    stop: StopSection
    progress: handoff.Progress
    channels: handoff.Channels
    device: torch.device
    is_lockstep: bool
    cut_share: float | None = None
    """`pace.cut_share`."""
    ranks: Ranks = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        section = self.section
        # Passes are made of the time in which nothing new waits.
        self._is_eager = section.num_passes == "auto"
        self._ring: MinibatchBuffer[LoadedBatch] = MinibatchBuffer(
            self.loader,
            section.minibatch_buffer_size,
            section.most_passes,
            section.init_num_passes,
        )
        self._is_closed = self._is_mid_batch = self._has_one_pass = False
        # With other ranks: drawn, until all are ready, and the rows that all have then.
        self._held: Draw[LoadedBatch] | None = None
        self._held_at = 0.0
        self._word = Word()
        # In lockstep those of what is trained, whatever the loop has counted by now.
        self._returns = deque(self.channels.returns[0], maxlen=RETURN_EPISODES)
        self._stop_reason: str | None = None
        # Since then the loop has waited for our end.
        self._told_at: float | None = None
        self._first_update: tuple[float, int] | None = None
        self._log = SeldomLog(logger, time.monotonic)
        self._stats = LearnerStats(section, self.loader, self.device, is_eager=self._is_eager)

    def _meet(self) -> None:
        try:
            self.ranks.meet(RANK_SHARE * self.section.stuck_end_s)
        except RankError:
            if not self.channels.end_reasons:
                raise
            raise handoff.ClosedError("all end, and some have not built") from None

    def run(self) -> None:
        """Train until a stop is reached or the queues close; then settle what the ring holds."""
        make_current(self.device)
        torch.set_num_threads(self.section.threads)
        channels = self.channels
        self._meet()
        if self.ranks.are_many:
            begin_alike(self.ranks, self.step)
        self._publish()
        try:
            while True:
                channels.watchdog.beat(BUILD_PATIENCE if self._first_update is None else 1)
                if is_asked := channels.is_report_due.is_set():
                    channels.is_report_due.clear()
                word = self._word = self._agree(is_asked=is_asked)
                said = self.ranks.gather(channels.reported[0]) if word.is_report_due else ()
                if is_asked:
                    others = said[1:] if self.ranks.place.is_first else ()
                    channels.reports.post(self._report(others))
                if self._is_between_updates and word.is_capture_due:
                    channels.is_capture_due.clear()
                    if word.is_save_due:
                        channels.is_save_due.clear()
                    self._capture(is_save_due=word.is_save_due)
                if word.reason is not None if self.ranks.are_many else self._is_over():
                    break
                if word.is_ready:
                    self._take_turn()
        finally:
            # A loader's own thread may be waiting for us.
            self.loader.close()
            # The end has a watch of its own.
            channels.watchdog.rest()
        most = self.section.most_passes
        left = self._ring.drain()
        if self._held is not None and self._held.item not in left:
            left.append(self._held.item)
        for loaded in left:
            loaded.drop(loaded.alive_B.copy(), "shutdown")
            channels.settlements.post(loaded.settle(most, most))
        channels.reports.post(self._report(is_last=True))
        self._capture()

    def _capture(self, *, is_save_due: bool = True) -> None:
        self._check_weights()
        if is_save_due or self.ranks.place.is_first:
            captured = handoff.Captured(self.progress, self.step.capture(), is_save_due)
            self.channels.captures.post(captured)

    def _check_weights(self) -> None:
        if self.ranks.are_many:
            self.ranks.check_equal(self.step.policy.named_tensors(), "the weights")

    def _agree(self, *, is_asked: bool) -> Word:
        """The word of all ranks. One alone need not wait for a batch to say it."""
        channels = self.channels
        is_save_due = channels.is_save_due.is_set()
        is_capture_due = channels.is_capture_due.is_set() or is_save_due
        own = Word(is_capture_due=is_capture_due, is_save_due=is_save_due)
        if not self.ranks.are_many:
            return own
        if self._held is None and not self._is_over():
            self._held, self._held_at = self._draw(), time.perf_counter()
        num_rows = 0
        if self._held is not None:
            self._drop_stale(self._held.item)
            num_rows = self._held.item.num_valid_rows
        # One that holds a batch, while another has none, does not hear that no more come.
        is_over = self._is_over() or (bool(channels.end_reasons) and self._is_between_updates)
        reason = self._stop_reason or next(iter(channels.end_reasons), None)
        if is_over and reason is None:
            # The service has died: the others are to hear that, and not of an end in good order.
            raise handoff.ClosedError("no batch comes any more, and nobody has said why")
        returns = self._returns if self.is_lockstep else channels.returns[0]
        are_others_ready = self._word.num_ready > (self._held is not None)
        num_joined, num_sessions = channels.count_actors(are_others_ready=are_others_ready)
        own = own._replace(
            is_ready=self._held is not None,
            num_rows=num_rows,
            reason=reason if is_over else None,
            returns=(math.fsum(returns), len(returns)),
            is_report_due=is_asked and self.ranks.place.is_first,
            num_joined=(num_joined,),
            num_sessions=(num_sessions,),
            saved=(channels.saved[0],),
        )
        word = agree(self.ranks, own)
        self._tell_news(word)
        if word.is_ready:
            self._stats.add_rank_wait(time.perf_counter() - self._held_at)
        goal, reached = self.stop.mean_return, word.mean_return
        is_open = word.reason is None and self._is_between_updates
        if is_open and goal is not None and reached is not None and reached >= goal:
            word = word._replace(reason="mean_return")
            channels.goals.append(reached)
        if word.reason is not None and self._stop_reason is None:
            self._stop_reason = word.reason
            channels.stops.post(word.reason)
        return word

    def _tell_news(self, word: Word) -> None:
        """Tell the loop what is new of other ranks."""
        channels, before = self.channels, self._word
        counts = word.num_joined, word.num_sessions
        if counts != (before.num_joined, before.num_sessions):
            channels.counts.post(counts)
        if word.common not in (None, before.common):
            channels.common.post(word.common)
        if self._is_late(word):
            channels.cuts.post(self.progress.update)

    def _is_late(self, word: Word) -> bool:
        """Whether so many ranks wait for this one that its actors cut what they write."""
        if self.cut_share is None or self._held is not None or word.reason is not None:
            return False
        return word.num_ready / self.ranks.place.count >= self.cut_share

    @property
    def _poll_s(self) -> float:
        """How long to wait for a batch until the next word."""
        usual_s = min(POLL_S, self.section.starved_after_s)
        if self.cut_share is None or not self.ranks.are_many:
            return usual_s
        idle_s = 0.0 if self._word.num_ready else CUT_POLL_SHARE * self._stats.waited_s
        return min(usual_s, max(CUT_POLL_S, idle_s))

    def _take_turn(self) -> None:
        draw, self._held = self._held or self._draw(), None
        if draw is None:
            return
        loaded, is_first = draw.item, draw.pass_index == 0
        started_s = time.perf_counter()
        num_updates = self._learn_from(loaded, is_first=is_first)
        loaded.use()
        self._stats.end_pass(time.perf_counter() - started_s, is_first=is_first)
        is_last_pass = draw.is_last_pass
        if not is_last_pass and self._is_enough(loaded, num_updates):
            self._ring.end(loaded)
            is_last_pass = True
        self._is_mid_batch = not is_last_pass
        if self.is_lockstep:
            num_updates = int(is_last_pass)
            self._returns.extend(loaded.returns if is_last_pass else ())
        before, every = self.progress.update, self.section.publish_every_updates
        self.progress = self.progress._replace(update=before + num_updates)
        if self.is_lockstep:
            # Before the version is out by which others go on: what they do then does not count.
            self._is_over()
        if self.progress.update // every > before // every:
            self._publish()
        if self.progress.update // CHECK_EVERY > before // CHECK_EVERY:
            self._check_weights()
        if is_last_pass:
            slot = self.loader.release(loaded)
            most = self.section.most_passes
            self.channels.settlements.post(loaded.settle(most, draw.num_passes, slot))
        self._stats.note_queue()

    def _draw(self) -> Draw[LoadedBatch] | None:
        started_s = time.perf_counter()
        self._ring.timeout_s = self._poll_s
        try:
            draw = self._ring.get()
        except (handoff.ClosedError, queue.Empty) as error:
            draw, self._is_closed = None, isinstance(error, handoff.ClosedError)
        self._stats.add_wait(time.perf_counter() - started_s, has_batch=draw is not None)
        if draw is not None:
            self._stats.end_wait(is_first=draw.pass_index == 0)
        return draw

    def _is_enough(self, loaded: LoadedBatch, num_updates: int) -> bool:
        """Whether the passes that a batch has left are not made."""
        if self._is_eager:
            lag_B = self.progress.update + num_updates - loaded.updates_B[loaded.alive_B]
            # Nothing is dropped for a pass that need not be made.
            is_old = not (len(lag_B) and lag_B.max() <= self.section.max_lag)
            if is_old or self._has_one_pass or self.loader.num_waiting():
                return True
        # A pass without an update says nothing new.
        return (
            num_updates > 0 and self._stats.newest.get("policy/kl", 0.0) > self.section.largest_kl
        )

    def _learn_from(self, loaded: LoadedBatch, *, is_first: bool) -> int:
        self._drop_stale(loaded)
        num_rows = self._word.num_rows if self.ranks.are_many else loaded.num_valid_rows
        if num_rows == 0:
            self._stats.num_skipped += 1
            return 0
        # Steps count once, at their first pass.
        env_steps = self.progress.env_steps_trained
        with self._stats.timing(is_first=is_first):
            # Where another batch waits, an eager learner makes one pass: nothing is computed for
            # later ones, so there is none, though the other batch may be on its way meanwhile.
            if is_first:
                self._has_one_pass = self._is_eager and self.loader.num_waiting() > 0
            if is_first and self.section.most_passes > 1 and not self._has_one_pass:
                loaded.batch = self.step.begin(loaded.batch)
            result = self.step.run(
                loaded.batch,
                torch.from_numpy(loaded.alive_B),
                env_steps + num_rows * is_first,
                is_first_pass=is_first,
                num_rows=num_rows,
            )
        is_logged = self.section.log_updates and self.ranks.place.is_first
        self._stats.add_result(result, self.progress.version, is_logged=is_logged)
        if result.not_finite:
            self._skip(loaded, result)
        if result.num_updates:
            num_own = loaded.num_valid_rows
            if result.not_finite or not self.ranks.are_many:
                num_rows = round(self.ranks.totals(num_own)[0])
            lags = (self.progress.update - loaded.updates_B)[loaded.alive_B]
            self._stats.add_batch(lags, num_own)
            env_steps += num_rows * is_first
            self.progress = self.progress._replace(env_steps_trained=env_steps)
        if self._first_update is None:
            # Or skipped: a run whose every loss is NaN must reach its time limit.
            self._first_update = time.monotonic(), self.progress.env_steps_trained
        return result.num_updates

    def _drop_stale(self, loaded: LoadedBatch) -> None:
        loaded.drop(self.progress.update - loaded.updates_B > self.section.max_lag, "stale")

    def _skip(self, loaded: LoadedBatch, result: StepResult) -> None:
        """Something in an update is not finite: nothing more of these columns is learned."""
        self._stats.num_skipped += 1
        is_failed_B = result.is_failed_B.numpy() & loaded.alive_B
        loaded.drop(is_failed_B, "nonfinite_update")
        what = ", ".join(result.not_finite)
        if result.num_updates and not is_failed_B.any():
            return  # it was another rank's
        if result.num_updates:
            actors = np.unique(loaded.actors_B[is_failed_B])
            self._log.warning(
                "updates go on without %d columns of actors %s that made one fail: %s not "
                "finite. Is it their environment?",
                np.count_nonzero(is_failed_B),
                ", ".join(map(str, actors[:MAX_NAMED])) + ", ..." * (len(actors) > MAX_NAMED),
                what,
            )
        else:
            text = "update skipped: %s not finite (%d skipped so far)"
            self._log.warning(text, what, self._stats.num_skipped)
        num_failed = result.num_failed_in_a_row
        if num_failed >= MOST_SKIPPED_IN_A_ROW and self._stop_reason is None:
            epoch, update = self.progress.version
            path = self.channels.run_path / f"not-finite-{epoch}-{update}.safetensors"
            about = {"not_finite": what, "stats": str(result.stats)}
            kept = loaded.batch.keep(path, about, is_failed_B=result.is_failed_B)
            self._give_up(
                f"{num_failed} updates in a row were skipped since update {update}, as these are "
                f"not finite: {what}; {kept}"
            )

    def _give_up(self, why: str) -> None:
        logger.error("%s", why)
        self._stop_reason = handoff.NOT_FINITE
        self.channels.stops.post(handoff.NOT_FINITE)

    def _publish(self) -> None:
        weights = self.snapshot.take(self.progress.version)
        if weights is not None:
            self.channels.weights.post(weights)
        elif self._stop_reason is None:
            self._give_up(
                f"the weights of update {self.progress.update} are not finite: they are neither "
                "published nor saved"
            )

    @property
    def _is_between_updates(self) -> bool:
        return not (self.is_lockstep and self._is_mid_batch)

    def _is_over(self) -> bool:
        """Whether a limit is reached, which the loop is told once, or no batch comes any more."""
        if self._stop_reason is None and self._is_between_updates:
            first, made = self._first_update, self.progress
            reached = {
                "env_steps": made.env_steps_trained,
                "updates": made.update,
                "wall_s": time.monotonic() - first[0] if first else 0.0,
            }
            for name, value in reached.items():
                limit = getattr(self.stop, name)
                if limit is not None and value >= limit and self._stop_reason is None:
                    self._stop_reason = name
                    self.channels.stops.post(name)
        return self._is_closed or self._stop_reason is not None or self._is_waited_for()

    def _is_waited_for(self) -> bool:
        """Whether the loop has waited for a while for our end: a batch may have many passes left.
        In lockstep a batch is whole, and several ranks end together."""
        if not self.channels.end_reasons or self.is_lockstep or self.ranks.are_many:
            return False
        self._told_at = self._told_at or time.monotonic()
        return time.monotonic() - self._told_at > LAST_PASSES_S

    def _report(
        self, others: Sequence[bytes] = (), *, is_last: bool = False
    ) -> handoff.LearnerReport:
        stats, first = self._stats, self._first_update
        metrics = stats.report(is_last=is_last)
        lags, updates = stats.lag_histogram, stats.take_updates()
        return handoff.LearnerReport(
            self.progress, stats.starved_at, first, metrics, lags, others, updates
        )
