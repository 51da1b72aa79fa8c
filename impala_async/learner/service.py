"""The learner service: the server, the learner thread, reports and checkpoints, and one way out:
a reached goal, a signal and the death of a task or a thread resolve `_ended` and nothing else.

Runs on: event loop
"""

import asyncio
import functools
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from impala_async.config.run import RunConfig, StopSection
from impala_async.config.warnings import warnings_of
from impala_async.errors import (
    CheckpointError,
    ConfigError,
    Exit,
    RankError,
    ServiceError,
    SpacesError,
)
from impala_async.learner import handoff
from impala_async.learner.build import build_learner, find_layout
from impala_async.learner.loader import HostLoader
from impala_async.learner.loop.evaluations import Evaluations
from impala_async.learner.loop.others import OtherRanks
from impala_async.learner.loop.reporter import EpisodeStats, Reporter
from impala_async.learner.loop.saver import Saver, begin_epoch
from impala_async.learner.loop.server import ActorServer
from impala_async.learner.recorder import Recorder
from impala_async.learner.slots import Episodes
from impala_async.learner.watchdog import Watchdog
from impala_async.metrics.names import Value
from impala_async.metrics.report import merge
from impala_async.metrics.sinks import JsonlSink, Sink
from impala_async.output import told_of
from impala_async.processes import CTRL_C, GIVE_UP, REQUESTS, without_echo
from impala_async.runs.folder import UNSAVED, RunFolder
from impala_async.runs.summary import summarise
from impala_async.schema import Schema
from impala_async.training.checkpoint import read_digests
from impala_async.training.ranks import Ranks
from impala_async.weights import Lineage
from impala_async.wire.keys import Key

logger = logging.getLogger(__name__)

REAP_EVERY_S = 1.0
GOODBYE_S = 1.0
# An update may take long; one that hangs is found by the watchdog, mostly before.
THREAD_END_S = 60.0
SAVE_WITHIN_S = 600.0
EXITS = {
    "interrupted": Exit.INTERRUPTED,
    handoff.ACTOR_LOST: Exit.TRY_AGAIN,
    UNSAVED: Exit.TRY_AGAIN,
    handoff.NOT_FINITE: Exit.BUG,
}


class LearnerService:
    """One learner, from bind to summary. Make it inside a running event loop."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        sinks: Sequence[Sink],
        *,
        schema: Schema | None,
        restored: handoff.Captured | None = None,
        recorder: Recorder | None = None,
        is_watched: bool = False,
        ranks: Ranks | None = None,
        nonce: bytes | None = None,
        key: Key | None = None,
        settings: RunConfig | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Where there are other ranks, `config` is the share of this one of the `settings`."""
        self._settings = settings or config
        self._config, self._folder, self._recorder = config, folder, recorder
        self._ranks = ranks or Ranks()
        self._place, self._others = self._ranks.place, OtherRanks(self._ranks)
        self._schema, self._on_ready, self._is_watched = schema, on_ready, is_watched
        self._training = restored.training if restored else None
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_loop_error)
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self._watchdog = Watchdog(config.learner.stuck_end_s)
        self._ended.add_done_callback(lambda _: self._watchdog.end_begins())
        self._threads: list[asyncio.Task[object]] = []
        self._loader: HostLoader | None = None
        self._is_building = self._is_interrupted = False
        self._last_words: handoff.Captured | None = None
        self._saving: asyncio.Task[object] | None = None
        self._late_death: ServiceError | RankError | None = None
        self._start, lineage = begin_epoch(folder, restored)
        self._reading = handoff.LearnerReport(self._start)
        self._update_log = JsonlSink(
            folder.updates, lambda: 2 * folder.checkpoint_bytes, folder.is_gone
        )
        self._episodes = EpisodeStats()
        state = self._training.state if self._training else None
        self._server = ActorServer(
            config,
            run_id=folder.run_id,
            lineage=lineage,
            schema=schema,
            on_schema=self._open_told,
            on_episodes=self._on_episodes,
            on_loss=functools.partial(self.stop, handoff.ACTOR_LOST),
            find_layout=functools.partial(find_layout, config.model),
            accounts=state,
            recorder=recorder,
            actor_seed=self._place.actor_seed(config.seed),
            place=self._place,
            nonce=nonce,
            key=key,
        )
        self._make_reporter(sinks, state["run_s"] if state else 0.0)
        self._make_saver(lineage)

    def _make_reporter(self, sinks: Sequence[Sink], earlier_s: float) -> None:
        # In lockstep no version may be passed over.
        weights = handoff.Inbox if self._config.pace.is_lockstep else handoff.Mailbox
        self._channels = handoff.Channels(
            settlements=handoff.Inbox(self._loop, self._server.settle),
            weights=weights(self._loop, self._server.publish),
            reports=handoff.Inbox(self._loop, self._on_reading),
            counts=handoff.Mailbox(self._loop, self._server.placement.note),
            count_actors=self._server.counts,
            reported=self._others.newest,
            cuts=handoff.Mailbox(self._loop, self._server.cut),
            common=handoff.Mailbox(self._loop, lambda version: self._saver.note_common(version)),
            captures=handoff.Inbox(self._loop, self._on_captured),
            stops=handoff.Inbox(self._loop, self.stop),
            run_path=self._folder.absolute,
            watchdog=self._watchdog,
        )
        self._reporter = Reporter(
            every_s=self._config.learner.report_every_s,
            sinks=sinks if self._place.is_first else [*sinks, self._others],
            parts=[
                *(self._report_learner, self._server.report, self._episodes.report),
                lambda: self._evaluations.report(),
            ],
            env_steps=lambda: self._reading.progress.env_steps_trained,
            frames_per_step=self._config.env.frames_per_step,
            ask=self._channels.is_report_due.set,
            others=lambda: self._others.reports,
            earlier_s=earlier_s,
            earlier_updates=self._start.update,
            earlier_counts=self._server.ledger.report(),
            lr_is_0_at=self._config.idle_from,
        )

    def _make_saver(self, lineage: Lineage) -> None:
        config = self._config
        self._saver = Saver(
            folder=self._folder,
            keep=config.checkpoint.keep,
            accounts=self._server.accounts,
            lineage=lineage,
            episodes=self._episodes,
            run_s=lambda: self._reporter.run_s(time.monotonic()),
            evaluate=config.evaluate,
            num_ranks=self._place.count,
            saved=self._channels.saved,
        )
        if self._training is not None:
            self._saver.restore(self._training)
            self._channels.returns[0] = self._episodes.returns
        self._evaluations = Evaluations(
            config.evaluate,
            self._saver,
            ask=self._channels.is_capture_due.set,
            on_return=self._on_evaluated,
        )

    async def run(self) -> int:
        """Serve until the run ends; returns its exit code. A death is raised as ServiceError."""
        self._watchdog.start(self._loop.call_later, has_child=self._is_watched)
        try:
            if self._others.are_some:
                accounts = merge(self._server.ledger.report(), self._episodes.report())
                urls = await self._others.meet(self._server.data_url, self._schema, accounts)
                self._server.placement.open(urls)
            if self._schema is not None:
                try:
                    self._open(self._schema)
                except SpacesError as error:
                    # These are the spaces of the config, which is at fault.
                    raise ConfigError(f"cannot train on {self._config.env.id}: {error}") from error
            self._announce()
            await self._serve()
            reason = await self._wind_down(self._ended.result())
        finally:
            # The last words of a thread are not saved any more.
            self._ended.cancel()
            self._watchdog.close()
            if self._loader is not None:
                self._loader.close()
            self._server.close()
            self._evaluations.close()
            for sink in self._reporter.sinks:
                sink.close()
            self._folder.remove("service.json")
            self._folder.let_go()
        # Without the recording that was wanted, training was not all that was asked for.
        is_recorded = self._recorder is None or not self._recorder.is_empty
        return EXITS.get(reason, Exit.DONE if is_recorded else Exit.TRY_AGAIN)

    async def _serve(self) -> None:
        bodies = {
            "reporter": self._reporter.report_regularly(),
            "loop lag": self._reporter.watch_lag(),
            "connections": self._server.watch(),
            "reaper": self._reap(),
            "checkpoints": self._checkpoint_regularly(),
            "evaluations": self._evaluations.run(),
            "ranks": self._others.watch(self.stop),
        }
        tasks = [self._begin(f"the {name} task", body) for name, body in bodies.items()]
        try:
            # Unlike `await`, this does not raise.
            await asyncio.wait([self._ended])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _begin(self, what: str, body: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        def note_end(task: asyncio.Task[object]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._fail(what, error)

        task = self._loop.create_task(body, name=what)
        task.add_done_callback(note_end)
        return task

    def stop(self, reason: str) -> None:
        """End the run in good order: from now on nothing comes in."""
        if not self._ended.done():
            self._channels.end_reasons.append(reason)
            self._server.admission.close()
            self._ended.set_result(reason)

    def _open(self, schema: Schema) -> None:
        """The spaces are known: build the model and the slots, start learning, give credit."""
        assert self._loader is None, "two schemas"
        self._watchdog.loop_builds()
        thread, layout = build_learner(
            self._config,
            schema,
            start=self._start,
            training=self._training,
            channels=self._channels,
            release=handoff.Inbox(self._loop, self._server.release).post,
            ranks=self._ranks,
        )
        loader = self._loader = thread.loader
        self._folder.confirm(self._settings)
        self._server.open(schema, loader.slots, loader.full.put, layout)
        for name, body in {"learner": thread.run, **loader.bodies}.items():
            self._threads.append(self._begin(f"the {name} thread", handoff.on_thread(name, body)))

    def _open_told(self, schema: Schema) -> None:
        """The spaces are those of an actor. Nobody is heard meanwhile, so it is told before."""
        self._is_building = True
        try:
            self._reporter.report()
            with told_of("building what is trained", logger.info):
                self._open(schema)
        finally:
            self._is_building = False

    def _announce(self) -> None:
        for number in {*REQUESTS} - CTRL_C:
            self._loop.add_signal_handler(number, self.stop, "terminated")
        self._loop.add_signal_handler(GIVE_UP, self.stop, "actor_failed")
        self._loop.add_signal_handler(signal.SIGINT, without_echo(self._on_interrupt))
        self._on_ready()
        server = self._server
        urls, is_encrypted = (server.data_url, server.weights_url), server.key is not None
        command = self._folder.announce(*urls, self._start.epoch, is_encrypted=is_encrypted)
        trained, num_ranks = self._start.env_steps_trained, self._place.count
        for warning in warnings_of(self._config, trained, num_ranks):
            logger.warning("%s", warning)
        logger.info("run folder: %s", self._folder.path)
        if self._place.is_first:  # that one sends actors to the others
            # Lockstep begins with all of them.
            many = f"{self._settings.train.num_actors} " if self._config.pace.is_lockstep else ""
            logger.info("waiting for %sactors: %s", many, command)

    def _on_interrupt(self) -> None:
        # A run that ends by itself saves as well; one that dies does not. A SIGTERM was a request.
        reasons = {*self._channels.end_reasons}
        has_died = self._ended.done() and not reasons
        if has_died or self._is_interrupted or reasons & {"interrupted", "terminated"}:
            os._exit(Exit.INTERRUPTED)
        self._is_interrupted = True
        logger.warning("interrupted: saving; press Ctrl-C again to quit at once")
        self.stop("interrupted")

    def _on_episodes(self, episodes: Episodes) -> None:
        self._episodes.take(episodes)
        if self._place.count > 1:  # the threads decide, by the episodes of all
            self._channels.returns[0] = self._episodes.returns
            return
        goal, reached = self._config.stop.mean_return, self._episodes.mean_return
        if goal is None or reached is None or self._ended.done():
            return
        if reached >= goal:
            self._channels.goals.append(reached)
            self.stop("mean_return")

    def _on_evaluated(self, mean_return: float) -> None:
        goal = self._config.stop.eval_return
        if goal is not None and mean_return >= goal:
            self.stop("eval_return")

    def _on_reading(self, reading: handoff.LearnerReport) -> None:
        self._reading = reading
        self._others.take(reading.others)
        if reading.updates:
            self._update_log.append(reading.updates)
        self._reporter.answered.set()

    def _on_captured(self, captured: handoff.Captured) -> None:
        # The newest is saved once more at the end. Where the disk is slow, others are left out.
        self._last_words = captured
        if self._ended.done():
            return
        self._evaluations.take(captured)
        if captured.is_save_due and (self._saving is None or self._saving.done()):
            self._saving = self._begin("a save", self._saver.save(captured))

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback of ours raised: nothing of it can be trusted any more."""
        self._fail("the event loop", context.get("exception") or RuntimeError(context["message"]))

    def _fail(self, what: str, cause: BaseException) -> None:
        death = ServiceError(f"{what} died: {cause!r}")
        death.__cause__ = cause
        if self._ended.done():
            late = cause if isinstance(cause, RankError) else death
            trace = None if late is cause else cause
            logger.error("%s died while the run was ending", what, exc_info=trace)
            self._late_death = self._late_death or late
        else:
            is_told = isinstance(cause, ConfigError | CheckpointError | RankError)
            self._ended.set_exception(cause if is_told else death)

    async def _reap(self) -> None:
        """Sessions end, and so does a run that has lost its folder."""
        # Often enough that the table does not take our own pace for a standstill.
        every_s = min(REAP_EVERY_S, self._config.learner.lease_s / 4)
        while True:
            await asyncio.sleep(every_s)
            self._server.reap()
            if self._folder.is_gone():
                self.stop(UNSAVED)

    async def _checkpoint_regularly(self) -> None:
        """All ranks save when rank 0 does, so that they have the same."""
        while self._place.is_first:
            await asyncio.sleep(self._config.checkpoint.every_s)
            self._channels.is_save_due.set()

    async def _wind_down(self, reason: str) -> str:
        """Close the doors, let the threads end, settle every column, save, say goodbye."""
        logger.info("ending: %s", reason)
        self._server.admission.close()
        num_actors = max(len(self._server.table.joined), self._server.placement.num_joined)
        # Nobody is to look for us here any more.
        self._folder.remove("service.json")
        if not self._ranks.have_met:
            await self._others.leave(reason, has_built=self._loader is not None)
        if self._loader is not None:
            with told_of("ending: waiting for the last updates", logger.info):
                await self._end_threads(self._loader)
        if self._others.are_some and self._ranks.have_met:
            report = await self._others.report_last(self._reporter.report)
        else:
            report = self._reporter.report()
        self._watchdog.end_begins(SAVE_WITHIN_S)
        with told_of("ending: waiting for the last checkpoint to be written", logger.info):
            if saving := [each for each in (self._saving, self._evaluations.saving) if each]:
                await asyncio.wait(saving)
            is_saved = self._last_words is None or await self._saver.save(self._last_words)
        if self._late_death is not None:
            raise self._late_death
        if self._recorder is not None:
            digests = read_digests(self._folder.checkpoints, self._reading.progress.version)
            with told_of("ending: waiting for the recording to be written", logger.info):
                await self._recorder.finish(reason, self._reading.progress.update, digests)
        # Weights that are not finite are no fault of the disk, and no second try mends them.
        if reason != handoff.NOT_FINITE and (not is_saved or self._folder.is_gone()):
            reason = UNSAVED
        # Only now: where something is not on the disk, the learner is started again.
        is_goal = reason in StopSection.model_fields
        await self._server.say_bye("finished" if is_goal else "restarting", GOODBYE_S)
        self._summarise(reason, {**report, "num_actors": num_actors})
        return reason

    async def _end_threads(self, loader: HostLoader) -> None:
        # In lockstep a full batch is trained on: else the end would hang on the clock.
        loader.close(is_drained=self._config.pace.is_lockstep)
        _, running = await asyncio.wait(self._threads, timeout=THREAD_END_S)
        if running:
            left = " and ".join(sorted(thread.get_name() for thread in running))
            raise ServiceError(f"still running after {THREAD_END_S:.0f} s: {left}")
        self._server.ledger.abandon(*loader.leftovers())

    def _summarise(self, reason: str, report: dict[str, Value]) -> None:
        reading, first = self._reading, self._reading.first_update
        summary = summarise(
            self._config,
            report,
            exit_reason=reason,
            # The report was written when the threads had ended.
            wall_s=float(report["learner/wall_s"] or 0.0),  # type: ignore[arg-type]
            env_steps_since=reading.progress.env_steps_trained - (first[1] if first else 0),
            lag_histogram=reading.lag_histogram,
            mean_return=(*self._channels.goals, report["mean_return_100"])[0],  # type: ignore[arg-type]
            best_evaluated=self._saver.best_evaluated,
            verdict=self._reporter.verdict(report),
        )
        try:
            self._folder.write_json("summary.json", summary)
        except OSError as error:
            logger.error("cannot write summary.json: %s; it would say %s", error.strerror, summary)

    def _report_learner(self) -> dict[str, object]:
        reading = self._reading
        starved_at, first = reading.starved_at, reading.first_update
        return {
            "updates": reading.progress.update,
            "learner/building": int(self._is_building),
            "learner/starved_since_s": starved_at and self._reporter.run_s(starved_at),
            "learner/wall_s": first and time.monotonic() - first[0],
            **reading.metrics,
            **(self._loader.report() if self._loader else {}),
        }
