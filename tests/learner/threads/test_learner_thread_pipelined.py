"""The learner thread where updates are launched before the host has looked at the one before.

What comes of it is what comes of looking at each at once; only the order of the work is another.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.learner.handoff import ClosedError, Progress
from tests.learner.fakes import FakeStep, Listener, batch_of
from tests.learner.threads.test_learner_thread import Run, closes

NUM_BATCHES = 8


def pipelined(script: Any, *, nonfinite: Any = (), **settings: Any) -> Run:
    return Run(script, step=FakeStep(nonfinite, is_pipelined=True), **settings)()


def test_an_update_is_looked_at_when_the_next_is_launched_and_the_last_before_the_wait() -> None:
    run = pipelined([batch_of(n) for n in (1, 2, 3)])
    assert run.step.log == [
        ("launch", 1),
        ("launch", 2),
        ("look", 1),
        ("launch", 3),
        ("look", 2),
        ("look", 3),
    ]
    assert run.loader.launched == run.loader.released == [1, 2, 3]
    assert run.thread.progress == Progress(1, update=3, env_steps_trained=36)


def test_before_a_wait_all_is_told_that_is_known() -> None:
    listener = Listener()
    step = FakeStep(is_pipelined=True)
    known: list[Any] = []

    def look() -> None:
        known.extend([step.log[-1], listener.versions[-1].update, len(listener.settlements)])
        raise ClosedError

    Run([batch_of(1), batch_of(2), look], step=step, listener=listener)()
    assert known == [("look", 2), 2, 2]


def test_a_further_pass_is_launched_before_a_look_even_where_nothing_waits() -> None:
    run = pipelined([batch_of(1), batch_of(2)], num_passes=2, minibatch_buffer_size=2)
    launches_and_looks = [("launch", 1), ("launch", 2), ("look", 1), ("launch", 1), ("look", 2)]
    assert run.step.log[:5] == launches_and_looks


def test_what_is_pending_at_the_close_is_told_too() -> None:
    def close() -> None:
        raise ClosedError

    run = pipelined([batch_of(1), close, batch_of(2)])
    assert run.step.log == [("launch", 1), ("look", 1)]
    assert [settlement.trained for settlement in run.settlements] == [4]
    assert run.thread.progress.update == run.listener.versions[-1].update == 1
    assert run.listener.captures[-1].progress == run.thread.progress


def test_a_version_has_the_weights_behind_its_own_update_and_not_behind_the_next() -> None:
    run = pipelined([batch_of(n) for n in range(1, 6)], nonfinite=[2])
    assert [version.update for version in run.listener.versions] == [0, 1, 2, 3, 4]
    assert [int(weights.buffer[0]) for weights in run.listener.weights] == [0, 1, 2, 3, 4]


def test_weights_are_copied_only_where_they_may_be_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(
        [batch_of(n) for n in range(12)], step=FakeStep(is_pipelined=True), publish_every_updates=4
    )
    snapshot: Any = run.thread._snapshot
    take, taken = snapshot.take, []

    def noted() -> Any:
        taken.append(len(run.step.uses))
        return take()

    monkeypatch.setattr(snapshot, "take", noted)
    run()
    # Behind 4 and, should that be skipped, behind 5.
    assert taken == [0, 4, 5, 8, 9, 12]
    assert [version.update for version in run.listener.versions] == [0, 4, 8, 12]


@settings(deadline=None)
@given(
    nonfinite=st.sets(st.integers(0, 2 * NUM_BATCHES)),
    failing=st.sampled_from([None, [1, 3]]),
    is_empty=st.sets(st.integers(0, NUM_BATCHES - 1)),
    section=st.fixed_dictionaries(
        {
            "num_passes": st.integers(1, 3),
            "minibatch_buffer_size": st.integers(1, 3),
            "publish_every_updates": st.integers(1, 4),
        }
    ),
    stop=st.one_of(
        st.just({}),
        st.builds(lambda n: {"updates": n}, st.integers(1, 2 * NUM_BATCHES)),
        st.builds(lambda n: {"env_steps": n}, st.integers(1, 12 * NUM_BATCHES)),
    ),
)
def test_all_that_it_tells_is_the_same(
    nonfinite: set[int],
    failing: list[int] | None,
    is_empty: set[int],
    section: dict[str, int],
    stop: dict[str, int],
) -> None:
    told: list[Any] = []
    for is_pipelined in (False, True):
        script = [
            batch_of(n, valid_rows=(0,) * 4 if n in is_empty else (1, 2, 3, 3))
            for n in range(NUM_BATCHES)
        ]
        step = FakeStep(nonfinite, failing, is_pipelined=is_pipelined)
        run = Run(script, step=step, stop=stop, **section)()
        assert closes(run.settlements, section["num_passes"])
        last = run.listener.reports[-1]
        told.append(
            (
                # How far the schedules have come is known one update late.
                [(number, alive) for number, alive, _ in step.uses],
                [(weights.version, int(weights.buffer[0])) for weights in run.listener.weights],
                run.settlements,
                run.listener.stops,
                last.progress,
                last.lag_histogram,
                last.metrics["learner/skipped_updates"],
                run.loader.released,
                run.listener.captures,
            )
        )
    assert told[0] == told[1]


def test_the_lag_counts_the_update_that_nobody_has_looked_at() -> None:
    batches = [batch_of(1), batch_of(2), batch_of(3, (0, 1, 2, 0))]
    run = pipelined(batches, max_lag=1)
    assert run.step.uses[2][1] == [False, True, True, False]
    assert run.settlements[2].dropped == {"stale": 2}
    assert run.listener.reports[-1].lag_histogram == [5, 5]


def test_schedules_count_it_too() -> None:
    run = pipelined([batch_of(n) for n in (1, 2, 3)])
    assert [env_steps for _, _, env_steps in run.step.uses] == [12, 24, 36]


def test_the_pass_of_a_batch_that_is_under_way_waits_for_what_that_drops() -> None:
    step = FakeStep([0], failing=[0, 2], is_pipelined=True)
    run = Run([batch_of(1), batch_of(2)], step=step, num_passes=2)()
    assert [alive for _, alive, _ in step.uses][:2] == [[True] * 4, [False, True, False, True]]
    assert run.step.log[:3] == [("launch", 1), ("look", 1), ("launch", 1)]


def test_a_checkpoint_and_its_progress_are_of_one_moment() -> None:
    listener = Listener()
    script = [batch_of(1), listener.channels.is_capture_due.raise_, batch_of(2), batch_of(3)]
    run = pipelined(script, listener=listener)
    assert [(each.progress.update, each.training) for each in listener.captures] == [(2, 2), (3, 3)]
    assert run.step.log[2:4] == [("look", 1), ("look", 2)]
