"""The learner thread, run to its end on the test's own thread: passes, lag, skips, publishing."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from impala_async.config.learner import LearnerSection
from impala_async.config.run import StopSection
from impala_async.learner.handoff import Progress
from impala_async.learner.loop.ledger import Settlement
from impala_async.learner.threads import learner_thread
from impala_async.learner.threads.learner_thread import LearnerThread
from impala_async.learner.threads.loader import LoadedBatch
from impala_async.learner.watchdog import BUILD_PATIENCE
from impala_async.metrics.report import merge
from tests.learner.fakes import FakeLoader, FakeSnapshot, FakeStep, Listener, batch_of
from tests.learner.threads.conftest import Clock

Script = Iterable[LoadedBatch | Callable[[], None] | None]
ALL, NONE = [True] * 4, [False] * 4


pytestmark = pytest.mark.usefixtures("clock")


class Run:
    """A learner thread over a script, and everything that came out of it."""

    def __init__(
        self,
        script: Script,
        *,
        step: FakeStep | None = None,
        stop: dict[str, Any] | None = None,
        progress: Progress | None = None,
        listener: Listener | None = None,
        is_lockstep: bool = False,
        **section: Any,
    ) -> None:
        self.listener = listener or Listener()
        self.loader = FakeLoader(script)
        self.step = step or FakeStep()
        fake: Any = self.step
        snapshot: Any = FakeSnapshot(self.step)
        self.thread = LearnerThread(
            step=fake,
            snapshot=snapshot,
            loader=self.loader,
            section=LearnerSection(**section),
            stop=StopSection(**(stop or {})),
            progress=progress or Progress(1),
            channels=self.listener.channels,
            device=torch.device("cpu"),
            max_waiting=2,
            is_lockstep=is_lockstep,
        )

    def __call__(self) -> "Run":
        self.thread.run()
        return self

    @property
    def settlements(self) -> list[Settlement]:
        return self.listener.settlements

    @property
    def report(self) -> dict[str, Any]:
        """The last one."""
        return self.listener.reports[-1].metrics


def closes(settlements: list[Settlement], num_passes: int) -> bool:
    """passes done + init_short = num_passes * trained + partial."""
    done = sum(s.passes_done + s.passes_init_short for s in settlements)
    trained = sum(s.trained for s in settlements)
    partial = sum(sum(s.passes_partial.values()) for s in settlements)
    return done == num_passes * trained + partial


def test_it_goes_to_its_device_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all that it launches on a second GPU would be kept by the first."""
    run, went = Run([]), []

    def make_current(device: torch.device) -> None:
        went.append((device, list(run.listener.weights)))

    monkeypatch.setattr(learner_thread, "make_current", make_current)
    run()
    assert went == [(torch.device("cpu"), [])]
    assert run.listener.weights


def test_each_batch_is_used_as_often_as_it_has_passes_and_counts_once() -> None:
    run = Run([batch_of(1), batch_of(2)], num_passes=3)()
    assert run.step.uses == [(1, ALL, 12)] * 3 + [(2, ALL, 24)] * 3
    assert run.step.first_passes == [True, False, False] * 2
    assert run.thread.progress == Progress(1, update=6, env_steps_trained=24)
    assert run.settlements == [Settlement(n, trained=4, passes_done=12) for n in (1, 2)]
    assert run.loader.released == [1, 2]
    assert closes(run.settlements, 3)


def test_however_it_ends_the_loader_is_told() -> None:
    """Its own thread may wait for a batch to be taken."""

    def die() -> None:
        raise MemoryError

    assert Run([])().loader.is_abandoned
    assert Run([batch_of(1)] * 9, stop={"env_steps": 1})().loader.is_abandoned
    dying = Run([die])
    with pytest.raises(MemoryError):
        dying()
    assert dying.loader.is_abandoned


def test_the_first_fill_may_have_fewer_passes() -> None:
    run = Run([batch_of(n) for n in (1, 2, 3)], num_passes=3, init_num_passes=1)()
    assert run.step.batches == [1, 2, 2, 3, 3, 3]
    assert [s.passes_init_short for s in run.settlements] == [8, 4, 0]
    assert closes(run.settlements, 3)


def test_a_ring_replays_its_batches_in_turn() -> None:
    script = [batch_of(n) for n in (1, 2, 3, 4)]
    run = Run(script, num_passes=2, minibatch_buffer_size=2)()
    assert run.step.batches == [1, 2, 1, 2, 3, 4, 3, 4]
    assert run.loader.released == [1, 2, 3, 4]


def test_what_goes_stale_between_passes_leaves_with_its_partial_passes() -> None:
    start = Progress(1, update=10)
    run = Run([batch_of(1, updates=(10, 9, 8, 7))], progress=start, num_passes=3, max_lag=2)()
    assert [alive for _, alive, _ in run.step.uses] == [
        [True, True, True, False],
        [True, True, False, False],
        [True, False, False, False],
    ]
    assert run.settlements == [
        Settlement(1, trained=1, dropped={"stale": 3}, passes_done=6, passes_partial={"stale": 3})
    ]
    # A column that never had a pass is in no count of steps.
    assert run.thread.progress.env_steps_trained == 9
    assert closes(run.settlements, 3)
    assert run.listener.reports[-1].lag_histogram == [1, 2, 3]
    assert run.report["lag/max"] == 2


def test_a_batch_that_is_all_stale_is_no_update() -> None:
    start = Progress(1, update=10)
    run = Run([batch_of(1, updates=(4,) * 4), batch_of(2, (10,) * 4)], progress=start, max_lag=5)()
    assert run.step.batches == [2]
    assert run.thread.progress == Progress(1, update=11, env_steps_trained=12)
    assert run.settlements[0] == Settlement(1, dropped={"stale": 4}, passes_partial={"stale": 0})
    assert run.report["learner/skipped_updates"] == 1


def test_a_batch_without_a_valid_row_is_no_update() -> None:
    run = Run([batch_of(1, valid_rows=(0,) * 4), batch_of(2, valid_rows=(0, 0, 0, 1))])()
    assert run.step.batches == [2]
    assert run.thread.progress == Progress(1, update=1, env_steps_trained=1)
    assert run.report["learner/skipped_updates"] == 1
    assert run.loader.released == [1, 2]
    assert run.settlements[0].num_columns == 4


def test_an_update_that_is_not_finite_is_skipped_and_its_batch_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = FakeStep(nonfinite=[1])
    run = Run([batch_of(1), batch_of(2)], step=step, num_passes=2)()
    # The second pass of the first batch was not taken: it counts nowhere.
    assert run.step.batches == [1, 1, 2, 2]
    assert run.thread.progress.update == 3
    assert run.settlements == [
        Settlement(
            1,
            dropped={"nonfinite_update": 4},
            passes_done=4,
            passes_partial={"nonfinite_update": 4},
        ),
        Settlement(2, trained=4, passes_done=8),
    ]
    assert run.report["learner/skipped_updates"] == 1
    assert run.loader.released == [1, 2]
    assert caplog.text.count("update skipped") == 1
    assert closes(run.settlements, 2)


def test_columns_whose_part_is_not_finite_are_dropped_and_the_others_trained(caplog) -> None:
    step = FakeStep(nonfinite=[0], failing=[1, 3], num_updates=2)
    run = Run([batch_of(1, valid_rows=(3, 4, 5, 6)), batch_of(2)], step=step, num_passes=2)()
    assert run.step.uses[:2] == [(1, ALL, 18), (1, [True, False, True, False], 8)]
    # Steps of what failed are not trained.
    assert run.thread.progress == Progress(1, update=8, env_steps_trained=20)
    assert run.settlements[0] == Settlement(
        1,
        trained=2,
        dropped={"nonfinite_update": 2},
        passes_done=4,
        passes_partial={"nonfinite_update": 0},
    )
    assert run.report["learner/skipped_updates"] == 1
    assert "without 2 columns of actors 0 that made one fail: loss/value" in caplog.text
    assert run.listener.reports[-1].lag_histogram[:7] == [2, 0, 2, 0, 4, 0, 4]
    assert closes(run.settlements, 2)


@pytest.mark.parametrize(
    ("every", "versions"), [(1, [0, 4, 8, 12]), (4, [0, 4, 8, 12]), (6, [0, 8, 12])]
)
def test_several_updates_of_a_batch_count_each_and_publish_once(
    every: int, versions: list[int]
) -> None:
    script = [batch_of(n) for n in range(1, 4)]
    run = Run(script, step=FakeStep(num_updates=4), publish_every_updates=every)()
    assert run.thread.progress.update == 12
    assert [version.update for version in run.listener.versions] == versions
    assert run.step.first_passes == [True] * 3


def test_a_run_whose_losses_are_all_nan_says_so_now_and_then_and_reaches_its_time_limit(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    script: list[Any] = []
    for number in range(40):
        script += [clock.pass_s(1.0), batch_of(number)]
    run = Run(script, step=FakeStep(nonfinite=range(99)), stop={"wall_s": 25.0})()
    assert run.listener.stops == ["wall_s"]
    assert run.thread.progress.update == 0
    lines = [record.getMessage() for record in caplog.records]
    ends = [line.rpartition("(")[2] for line in lines]
    assert ends == ["1 skipped so far)", "11 skipped so far)", "21 skipped so far)"]


def test_a_run_of_updates_that_all_fail_is_ended_and_its_last_batch_kept(monkeypatch, caplog):
    batches = [batch_of(number) for number in range(20)]
    # One that is taken in between, and they are counted anew.
    step = FakeStep(nonfinite={*range(4), *range(5, 99)})
    monkeypatch.setattr(learner_thread, "MOST_SKIPPED_IN_A_ROW", 5)
    run = Run(batches, step=step)()
    assert run.step.batches == list(range(10))
    assert run.listener.stops == ["not_finite"]
    assert not any(loaded.tensors.kept for loaded in batches[:9])
    ((path, about, others),) = batches[9].tensors.kept
    assert path.name == "not-finite-1-1.safetensors"
    assert about["not_finite"] == "loss/value, loss/total"
    assert others["is_failed_B"].tolist() == ALL
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert line == (
        "5 updates in a row were skipped since update 1, as these are not finite: loss/value, "
        "loss/total; it is kept"
    )
    # What it has learned is saved.
    assert [captured.progress.update for captured in run.listener.captures] == [1]
    assert len(run.listener.versions) == 2


def test_weights_that_are_not_finite_are_not_published(
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = FakeStep()
    run = Run([batch_of(1), batch_of(2), batch_of(3)], step=step)

    def overflow(version: Any) -> None:
        # As float32, a byte of 255 four times is no number.
        step.tensors[0].fill_(254)

    run.listener.channels.weights.post = overflow  # type: ignore[method-assign]
    run()
    assert run.listener.stops == ["not_finite"]
    assert run.step.batches == [1]
    assert "the weights of update 1 are not finite" in caplog.text


def test_it_shows_that_it_moves_and_may_take_longer_for_its_first_update() -> None:
    seen: list[tuple[int, int]] = []
    step = FakeStep()
    script: list[Any] = [None, batch_of(1), batch_of(2), None, batch_of(3)]
    run = Run(script, step=step)
    pulse, learn = run.listener.channels.pulse, step.run

    def noted(*args: Any, **how: Any) -> Any:
        seen.append((pulse.num_beats, pulse.patience))
        return learn(*args, **how)

    step.run = noted  # type: ignore[method-assign]
    run()
    # While it waits, too; and at its end nobody waits for it.
    assert seen == [(2, BUILD_PATIENCE), (3, 1), (5, 1)]
    assert pulse.num_beats == 0


def test_lags_are_counted_for_every_trajectory_at_every_pass() -> None:
    start = Progress(1, update=20)
    batches = [batch_of(1, updates=(20, 19, 17, 20)), batch_of(2, updates=(21, 21, 18, 20))]
    run = Run(batches, progress=start, num_passes=2, max_lag=9)()
    # First batch at updates 20 and 21, second at 22 and 23.
    lags = [*(0, 1, 3, 0), *(1, 2, 4, 1), *(1, 1, 4, 2), *(2, 2, 5, 3)]
    histogram = [lags.count(lag) for lag in range(10)]
    assert run.listener.reports[-1].lag_histogram == histogram
    assert run.report["lag/max"] == 5
    assert math.isclose(run.report["lag/mean"], sum(lags) / 16)
    assert run.report["lag/quantiles"][0] == 0
    assert run.report["lag/quantiles"][4] == 5


@pytest.mark.parametrize(
    ("every", "first", "versions"),
    [(1, 0, [0, 1, 2, 3, 4, 5]), (2, 0, [0, 2, 4]), (3, 4, [4, 6, 9])],
)
def test_a_version_is_published_every_so_many_updates(
    every: int, first: int, versions: list[int]
) -> None:
    script = [batch_of(n, (first,) * 4) for n in range(1, 6)]
    run = Run(script, progress=Progress(3, update=first), publish_every_updates=every)()
    assert run.listener.versions == [(3, update) for update in versions]
    # Each holds the weights of its own update.
    assert [w.buffer[0] for w in run.listener.weights] == [v - first for v in versions]


def test_the_depth_of_the_queue_is_taken_after_each_update() -> None:
    run = Run([batch_of(n) for n in range(1, 5)], num_passes=2)()
    assert run.report["learner_queue/size_count"] == 8
    # Waiting after each pass: 3 3 2 2 1 1 0 0.
    assert run.report["learner_queue/size_mean"] == 1.5
    assert run.report["learner_queue/size_quantiles"] == [0.0, 0.0, 1.5, 3.0, 3.0]


@pytest.mark.parametrize(("limit", "updates"), [(12, 1), (13, 2), (24, 2), (1000, 4)])
def test_it_stops_when_enough_steps_are_trained(limit: int, updates: int) -> None:
    run = Run([batch_of(n) for n in range(1, 5)], stop={"env_steps": limit})()
    assert run.thread.progress.update == updates
    assert run.listener.stops == (["env_steps"] if limit <= 48 else [])


@pytest.mark.parametrize("num_passes", [1, 2])
def test_it_stops_when_enough_updates_are_made(num_passes: int) -> None:
    batches = [batch_of(n) for n in range(1, 5)]
    run = Run(batches, stop={"updates": 3}, num_passes=num_passes)()
    assert run.thread.progress.update == 3
    assert run.listener.stops == ["updates"]


@pytest.mark.parametrize("stop", [{"env_steps": 50}, {"updates": 9}])
def test_a_stop_that_a_resumed_run_has_reached_already(stop: dict[str, int]) -> None:
    run = Run([batch_of(1)], stop=stop, progress=Progress(2, 9, 50))()
    assert run.step.uses == []
    assert run.listener.stops == list(stop)


def test_wall_time_runs_from_the_first_update(clock: Clock) -> None:
    wait = clock.pass_s(4.0)
    run = Run([wait, batch_of(1), wait, batch_of(2), wait, batch_of(3)], stop={"wall_s": 5.0})()
    # Updates at 4, 8 and 12 s: the first that ends 5 s after the first is the third.
    assert run.step.batches == [1, 2, 3]
    assert run.listener.stops == ["wall_s"]
    # What that was made of was gathered before.
    assert run.listener.reports[-1].first_update == (1004.0, 12)


def test_the_ring_is_settled_at_the_end() -> None:
    run = Run([batch_of(1), batch_of(2)], num_passes=3, minibatch_buffer_size=2,
              stop={"env_steps": 24})()  # fmt: skip
    assert run.step.batches == [1, 2]
    shutdown = {"dropped": {"shutdown": 4}, "passes_done": 4, "passes_partial": {"shutdown": 4}}
    assert run.settlements == [Settlement(1, **shutdown), Settlement(2, **shutdown)]
    assert closes(run.settlements, 3)


def test_its_last_words_are_a_report_and_a_capture() -> None:
    run = Run([batch_of(1), batch_of(2)])()
    (capture,) = run.listener.captures
    assert capture.progress == Progress(1, 2, 24)
    assert capture.training == 2
    assert run.listener.reports[-1].progress == capture.progress


def test_reports_and_captures_are_given_when_asked_for_between_updates() -> None:
    listener = Listener()

    def ask() -> None:
        listener.channels.is_report_due.raise_()
        listener.channels.is_capture_due.raise_()

    Run([batch_of(1), ask, batch_of(2), batch_of(3)], listener=listener)()
    assert [report.progress.update for report in listener.reports] == [2, 3]
    assert [capture.progress.update for capture in listener.captures] == [2, 3]


def test_every_key_of_a_report_is_declared() -> None:
    busy, idle = Run([batch_of(1)])(), Run([])()
    merge(busy.report)
    assert busy.report.keys() - idle.report.keys() == {"loss/total"}
