"""The learner thread with nothing to do: it answers, says that it starves, and costs nothing."""

import threading
import time
from typing import Any

from impala_async.learner import learner_thread
from impala_async.learner.build import build_learner
from impala_async.learner.handoff import Progress
from tests.learner.columns import small_schema
from tests.learner.conftest import Clock
from tests.learner.fakes import Listener, batch_of
from tests.learner.hand_actor import DEADLINE_S
from tests.learner.server_harness import config_of
from tests.learner.test_learner_thread import Run


def famine(clock: Clock, script: str, wait_s: float = 5.0, **stop: Any) -> Run:
    """A letter is a batch; at a dot a report is asked for, and none comes for a while."""
    listener, steps = Listener(), list[Any]()
    for number, letter in enumerate(script):
        if letter == ".":
            steps += [listener.channels.is_report_due.set, clock.pass_s(wait_s), None]
        else:
            steps.append(batch_of(number))
    return Run(steps, listener=listener, stop=stop)()


def test_starvation_is_told_once_at_onset_and_once_at_its_end_and_reported_while_it_lasts(
    clock, caplog
):
    run = famine(clock, "A...BC....D")
    starved = "learner starved: no batch for 5.0 s; it waits for actors to send more"
    ends = [f"learner no longer starved, after {seconds:.1f} s" for seconds in (15, 20)]
    assert caplog.messages == [starved, ends[0], starved, ends[1]]
    assert run.thread.progress.update == 4
    assert set(run.loader.timeouts) == {learner_thread.POLL_S}
    totals = [report.metrics["learner/starved_total_s"] for report in run.listener.reports]
    assert totals == [5, 10, 15, 20, 25, 30, 35, 35]
    # It began when the wait began, not when it was noticed; a wait that ended is added up.
    begun = [report.starved_at for report in run.listener.reports]
    assert begun == [1000.0] * 3 + [1015.0] * 4 + [None]


def test_short_waits_add_up_to_starvation(clock, caplog):
    run = famine(clock, "A.........B", wait_s=1.0)
    assert caplog.messages == [
        "learner starved: no batch for 5.0 s; it waits for actors to send more",
        "learner no longer starved, after 9.0 s",
    ]
    # Each of the nine requests was answered while it waited, and the whole wait is one.
    assert len(run.listener.reports) == 9 + 1
    assert run.listener.report["timing_breakdown/learner_dequeue_time_ms"] == 4500.0


def test_the_time_limit_holds_while_it_waits(clock):
    run = famine(clock, "A......B", wait_s=1.0, wall_s=3.0)
    assert run.listener.stops == ["wall_s"]
    assert clock.now == 1003.0


def test_without_a_batch_ever_it_ends_as_soon_as_it_is_closed(clock):
    run = famine(clock, "...")
    last = run.listener.reports[-1]
    assert last.first_update is None
    assert last.progress == Progress(1)
    assert last.metrics["lag/mean"] is None
    assert last.lag_histogram == [0] * 101
    assert run.listener.settlements == []


def test_waiting_takes_next_to_no_processor_time():
    listener, schema = Listener(), small_schema()
    learner, _ = build_learner(
        config_of(schema, learner={"lease_s": 1}),
        schema,
        start=Progress(1),
        training=None,
        channels=listener.channels,
        release=lambda slot: None,
    )
    thread = threading.Thread(target=learner.run)
    thread.start()
    give_up_at = time.monotonic() + DEADLINE_S
    while not listener.weights:
        assert time.monotonic() < give_up_at
        time.sleep(0.001)
    before = time.process_time()
    threading.Event().wait(0.7)
    spent_s = time.process_time() - before
    learner.loader.close()
    thread.join(DEADLINE_S)
    assert spent_s < 0.05
    assert listener.reports[-1].starved_at is not None
