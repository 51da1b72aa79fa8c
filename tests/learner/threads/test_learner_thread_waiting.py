"""The learner thread with nothing to do, and as a real thread over real slots and a real update."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from impala_async.config.learner import LearnerSection
from impala_async.learner.build import build_learner
from impala_async.learner.handoff import Progress, start_thread
from impala_async.learner.loop.filler import Arrival, SlotFiller
from impala_async.learner.loop.ledger import Ledger, Settlement
from impala_async.learner.slots import Slot
from impala_async.learner.threads import learner_thread
from impala_async.training.step import UpdateStep
from impala_async.weights import Version
from tests.learner.columns import planes_of, small_schema
from tests.learner.fakes import Listener, batch_of
from tests.learner.hand_actor import DEADLINE_S
from tests.learner.server_harness import config_of
from tests.learner.threads.conftest import Clock
from tests.learner.threads.test_learner_thread import Run

STARVED_AFTER_S = LearnerSection().starved_after_s


def famine(clock: Clock, script: str, wait_s: float = 5.0, **stop: Any) -> Run:
    """A letter is a batch; at a dot a report is asked for, and none comes for a while."""
    listener, steps = Listener(), list[Any]()
    for number, letter in enumerate(script):
        if letter == ".":
            steps += [listener.channels.is_report_due.raise_, clock.pass_s(wait_s), None]
        else:
            steps.append(batch_of(number))
    return Run(steps, listener=listener, stop=stop)()


def test_starvation_is_logged_once_at_onset_and_once_at_its_end(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    run = famine(clock, "A...BC....D")
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "learner starved: no batch for 5.0 s; it waits for actors to send more",
        "learner no longer starved, after 15.0 s",
        "learner starved: no batch for 5.0 s; it waits for actors to send more",
        "learner no longer starved, after 20.0 s",
    ]
    assert run.thread.progress.update == 4
    assert set(run.loader.timeouts) == {learner_thread.POLL_S}


def test_short_waits_add_up_to_starvation(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    run = famine(clock, "A.........B", wait_s=1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "learner starved: no batch for 5.0 s; it waits for actors to send more",
        "learner no longer starved, after 9.0 s",
    ]
    # Each of the nine requests was answered while it waited, and the whole wait is one.
    assert len(run.listener.reports) == 9 + 1
    assert run.listener.report["timing_breakdown/learner_dequeue_time_ms"] == 4500.0


def test_the_time_limit_holds_while_it_waits(clock: Clock) -> None:
    run = famine(clock, "A......B", wait_s=1.0, wall_s=3.0)
    assert run.listener.stops == ["wall_s"]
    assert clock.now == 1003.0


def test_starvation_is_in_the_reports_while_it_lasts(clock: Clock) -> None:
    run = famine(clock, "A..B.C")
    reports = [
        (report.starved_at, report.metrics["learner/starved_total_s"])
        for report in run.listener.reports
    ]
    # It began when the wait began, not when it was noticed; a wait that ended is added up.
    assert reports == [(1000.0, 5.0), (1000.0, 10.0), (1010.0, 15.0), (None, 15.0)]


def test_without_a_batch_ever_it_ends_as_soon_as_it_is_closed(
    clock: Clock,
) -> None:
    run = famine(clock, "...")
    last = run.listener.reports[-1]
    assert last.first_update is None
    assert last.progress == Progress(1)
    assert last.metrics["lag/mean"] is None
    assert last.lag_histogram == [0] * 101
    assert run.listener.settlements == []


class Works:
    """A whole learner behind a filler, its thread running; the test is the loop."""

    def __init__(self, **sections: Any) -> None:
        self.schema = small_schema()
        self.config = config_of(self.schema, **sections)
        self.listener = Listener()
        self.ledger = Ledger()
        self.ends: list[BaseException | None] = []
        self._num_settled = 0
        self.learner = build_learner(
            self.config,
            self.schema,
            start=Progress(1),
            training=None,
            channels=self.listener.channels,
            release=lambda slot: None,
        )
        self.filler = SlotFiller(lambda _: None)
        self.filler.open(self.learner.slots, self._submit)

    def _submit(self, slot: Slot) -> None:
        self.ledger.submit(slot.batch, len(slot.obs))
        self.learner.full.put(slot.index)

    def start(self) -> threading.Thread:
        done: Any = type("Done", (), {"post": staticmethod(self.ends.append)})
        return start_thread("learner", self.learner.bodies["learner"], done)

    def put(self, seed: int) -> None:
        """One message of three columns, as soon as there is room."""
        self.wait_for(self._has_room)
        planes = planes_of(self.schema, 3, seed=seed)
        region = self.filler.assign(3, 0)
        assert region is not None
        region.obs[:], region.small[:] = planes.obs, planes.small
        self.ledger.admit(3)
        valid_rows = planes.columns.mask_CT.sum(1)
        self.filler.commit([Arrival(0, region, valid_rows, Version(1, 0))])

    def _has_room(self) -> bool:
        settled = self.listener.settlements[self._num_settled :]
        self._num_settled += len(settled)
        for settlement in settled:
            assert settlement.slot is not None
            self.filler.release(settlement.slot)
        return self.filler.free_columns >= 3

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < give_up_at
            time.sleep(0.001)

    def wind_up(self) -> None:
        """As the service ends it."""
        self.ledger.abandon_filling()
        self.learner.loader.close()
        self.wait_for(lambda: bool(self.ends))
        for settlement in self.listener.settlements:
            self.ledger.settle(settlement)
        for batch in self.learner.loader.leftovers():
            self.ledger.settle(
                Settlement(batch, dropped={"shutdown": self.config.learner.batch_columns})
            )


@pytest.mark.parametrize(("num_passes", "ring"), [(1, 1), (3, 2)])
def test_every_column_is_accounted_for(num_passes: int, ring: int) -> None:
    works = Works(learner={"num_passes": num_passes, "minibatch_buffer_size": ring})
    running = works.start()
    for seed in range(41):
        works.put(seed)
    works.wind_up()
    running.join(DEADLINE_S)
    assert works.ends == [None]
    report = works.ledger.report()
    assert report["trajectories/in_slots"] == 0
    assert report["trajectories/admitted"] == 123
    assert report["trajectories/trained"] + report["dropped/shutdown"] == 123
    assert report["trajectories/trained"] >= 80
    assert (
        report["passes/done"]
        == num_passes * report["trajectories/trained"] + report["passes/partial"]
    )
    last = works.listener.reports[-1]
    assert sum(last.lag_histogram) == report["passes/done"]
    assert last.metrics["learner_queue/size_count"] == last.progress.update
    (captured,) = works.listener.captures
    assert captured.progress == last.progress
    assert works.listener.versions[-1] == Version(1, last.progress.update)


def test_waiting_takes_next_to_no_processor_time() -> None:
    works = Works(learner={"lease_s": 1})
    works.start()
    works.wait_for(lambda: bool(works.listener.weights))
    before = time.process_time()
    threading.Event().wait(0.7)
    spent_s = time.process_time() - before
    works.wind_up()
    assert spent_s < 0.05
    assert works.listener.reports[-1].starved_at is not None


def test_the_death_of_an_update_is_told_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    works = Works()
    error = RuntimeError("out of memory")

    def die(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(UpdateStep, "run", die)
    works.start()
    for seed in range(2):
        works.put(seed)
    works.wait_for(lambda: bool(works.ends))
    assert works.ends == [error]
