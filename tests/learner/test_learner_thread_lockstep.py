"""The learner thread in lockstep: a batch with all its passes and minibatches is one update."""

from typing import Any

import pytest

from impala_async.learner.handoff import Progress
from impala_async.learner.loop.ledger import Settlement
from tests.learner.fakes import FakeStep, Listener, batch_of
from tests.learner.test_learner_thread import Run, closes

pytestmark = pytest.mark.usefixtures("clock")


def run_of(script: Any, **settings: Any) -> Run:
    return Run(script, is_lockstep=True, **settings)()


@pytest.mark.parametrize("num_updates", [1, 4])
def test_all_passes_and_minibatches_of_a_batch_are_one_version(num_updates):
    batches = [batch_of(n, updates=(n - 1,) * 4) for n in (1, 2, 3)]
    run = run_of(batches, step=FakeStep(num_updates=num_updates), num_passes=3)
    assert run.step.batches == [1] * 3 + [2] * 3 + [3] * 3
    assert [version.update for version in run.listener.versions] == [0, 1, 2, 3]
    # Weights of the last pass.
    assert [weights.buffer[0] for weights in run.listener.weights] == [0, 3, 6, 9]
    assert run.thread.progress == Progress(1, update=3, env_steps_trained=36)
    assert run.lag_histogram[:2] == [36, 0]
    assert run.report["lag/max"] == 0
    assert closes(run.settlements, 3)


def test_with_a_lag_every_pass_has_it():
    batches = [batch_of(1, updates=(0,) * 4), batch_of(2, updates=(0,) * 4), batch_of(3, (1,) * 4)]
    run = run_of(batches, num_passes=2, max_lag=1)
    assert run.lag_histogram == [8, 16]
    assert sum(settlement.trained for settlement in run.settlements) == 12


def nobody_filled() -> Any:
    empty = batch_of(1)
    empty.alive_B[:] = False
    return empty


@pytest.mark.parametrize(
    ("batch", "nonfinite"),
    [(batch_of(1), [0]), (batch_of(1, valid_rows=(0,) * 4), []), (nobody_filled(), [])],
    ids=["not finite", "no valid row", "nobody filled it"],
)
def test_an_update_that_is_skipped_has_a_version_all_the_same(batch, nonfinite):
    run = run_of([batch, batch_of(2, (1,) * 4)], step=FakeStep(nonfinite=nonfinite))
    assert [version.update for version in run.listener.versions] == [0, 1, 2]
    assert run.report["learner/skipped_updates"] == 1
    assert run.lag_histogram[0] == 4
    assert run.loader.released == [1, 2]
    assert run.settlements[1] == Settlement(2, trained=4, passes_done=4)


def test_a_limit_that_is_reached_waits_for_the_end_of_the_update():
    batches = [batch_of(1), batch_of(2, (1,) * 4), batch_of(3, (2,) * 4)]
    run = run_of(batches, num_passes=3, stop={"env_steps": 13})
    assert run.step.batches == [1] * 3 + [2] * 3
    assert run.listener.stops == ["env_steps"]
    assert run.thread.progress == Progress(1, update=2, env_steps_trained=24)
    assert [settlement.trained for settlement in run.settlements] == [4, 4]


def test_the_end_is_told_before_the_version_by_which_others_would_go_on():
    listener = Listener()
    told = []
    post = listener.channels.stops.post

    def noted(reason):
        told.append((reason, [version.update for version in listener.versions]))
        post(reason)

    listener.channels.stops.post = noted  # type: ignore[method-assign]
    batches = [batch_of(1), batch_of(2, (1,) * 4), batch_of(3, (2,) * 4)]
    run_of(batches, listener=listener, stop={"env_steps": 24})
    assert told == [("env_steps", [0, 1])]
    assert [version.update for version in listener.versions] == [0, 1, 2]


def test_nothing_is_saved_between_the_passes_of_an_update():
    listener = Listener()
    step = FakeStep()
    learn = step.run

    def ask_in_the_middle(*arguments, **settings):
        listener.channels.is_capture_due.set()
        return learn(*arguments, **settings)

    step.run = ask_in_the_middle  # type: ignore[method-assign]
    run_of([batch_of(1), batch_of(2, (1,) * 4)], listener=listener, step=step, num_passes=3)
    # The last is the capture of the end.
    assert [capture.training for capture in listener.captures] == [3, 6, 6]
    assert [capture.progress.update for capture in listener.captures] == [1, 2, 2]
