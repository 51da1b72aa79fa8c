"""The learner thread, run to its end on the test's own thread: passes, lag, skips, publishing."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from impala_async.config.learner import LearnerSection
from impala_async.config.ranks import Place
from impala_async.config.run import StopSection
from impala_async.learner import learner_thread
from impala_async.learner.agreement import REASONS
from impala_async.learner.handoff import ClosedError, Progress
from impala_async.learner.learner_thread import LearnerThread
from impala_async.learner.slots import Settlement
from impala_async.learner.stats import LearnerStats
from impala_async.learner.watchdog import BUILD_PATIENCE
from impala_async.metrics.names import REGISTRY
from impala_async.metrics.report import merge
from impala_async.metrics.timer import TimerStat
from impala_async.training.ranks import Ranks
from impala_async.weights import Version
from tests.learner.fakes import FakeLoader, FakeStep, Listener, batch_of

ALL = [True] * 4

pytestmark = pytest.mark.usefixtures("clock")


class Run:
    """A learner thread over a script, and everything that came out of it."""

    def __init__(
        self,
        script,
        step=None,
        stop=None,
        progress=None,
        listener=None,
        lockstep=False,
        cut_share=None,
        ranks=None,
        **section,
    ):
        self.listener = listener or Listener()
        if ranks is not None:
            # Behind its last batch the loop has said why no more come.
            script = [*script, lambda: self.listener.channels.end_reasons.append("terminated")]
        self.loader = FakeLoader(script)
        self.step = step or FakeStep()
        self.thread = LearnerThread(
            step=self.step,
            snapshot=self.step,
            loader=self.loader,
            section=LearnerSection(**section),
            stop=StopSection(**(stop or {})),
            progress=progress or Progress(1),
            channels=self.listener.channels,
            device=torch.device("cpu"),
            is_lockstep=lockstep,
            cut_share=cut_share,
            ranks=ranks or Ranks(),
        )
        self.settlements = self.listener.settlements

    def __call__(self):
        self.thread.run()
        self.report = self.listener.reports[-1].metrics
        self.lag_histogram = self.listener.reports[-1].lag_histogram
        # The accounts of passes close.
        made = ("passes_done", "passes_init_short", "passes_ended_early")
        done = sum(getattr(settled, each) for settled in self.settlements for each in made)
        trained = sum(s.trained for s in self.settlements)
        partial = sum(sum(s.passes_partial.values()) for s in self.settlements)
        assert done == self.thread.section.most_passes * trained + partial
        assert merge(self.report).keys() <= REGISTRY.keys()
        return self


@pytest.mark.parametrize(("late_s", "num_made"), [(0.0, 8), (6.0, 2)])
def test_passes_that_a_batch_has_left_hold_up_no_end(late_s, num_made, clock):
    """Each may take long, and the loop waits no longer than for one."""

    class Slow(FakeStep):
        def run(self, *args, **kwargs):
            clock.now += late_s
            if not run.listener.channels.end_reasons:
                run.listener.channels.end_reasons.append("terminated")
            return super().run(*args, **kwargs)

    run = Run([batch_of(1)], num_passes=8, step=Slow())
    run()
    assert len(run.step.uses) == num_made


def test_it_goes_to_its_device_before_anything_else(monkeypatch):
    """The first GPU would otherwise keep all that it launches on a second one."""
    run, went = Run([]), []

    def make_current(device):
        went.append((device, list(run.listener.weights)))

    monkeypatch.setattr(learner_thread, "make_current", make_current)
    run()
    assert went == [(torch.device("cpu"), [])]
    assert run.listener.weights


def test_each_batch_is_used_as_often_as_it_has_passes_and_counts_once():
    run = Run([batch_of(1), batch_of(2)], num_passes=3)()
    assert run.step.uses == [(1, ALL, 12)] * 3 + [(2, ALL, 24)] * 3
    assert run.step.first_passes == [True, False, False] * 2
    assert run.step.begun == [1, 2]
    assert run.thread.progress == Progress(1, update=6, env_steps_trained=24)
    assert run.settlements == [Settlement(n, trained=4, passes_done=12) for n in (1, 2)]
    assert run.loader.released == [1, 2]
    # Its last words are a report and a capture.
    (capture,) = run.listener.captures
    assert (capture.progress, capture.training) == (run.thread.progress, 6)
    assert run.listener.reports[-1].progress == capture.progress
    # The depth of the queue is taken after each pass: 1 1 1 0 0 0.
    assert run.report["learner_queue/size_count"] == 6
    assert run.report["learner_queue/size_mean"] == 0.5
    assert run.report.keys() - Run([])().report.keys() == {"loss/total"}


def test_nothing_is_looked_at_before_a_single_pass():
    def begun(**section):
        return Run([batch_of(1), batch_of(2, valid_rows=[0] * 4), batch_of(3)], **section)()

    assert begun(num_passes=1).step.begun == []
    assert begun(num_passes=3).step.begun == [1, 3]
    # Behind the last one nothing new waits.
    assert begun(num_passes="auto").step.begun == [3]


def test_a_batch_that_nothing_was_looked_at_for_has_one_pass_though_the_next_is_under_way():
    """A batch of a GPU is counted nowhere for a moment, on its way from slot to slot."""
    run = Run([batch_of(1), batch_of(2)], num_passes="auto")
    told = iter([1, *[0] * 99])
    run.loader.num_waiting = lambda: next(told)
    run()
    assert run.step.begun == [2]
    assert run.step.batches.count(1) == 1


def test_all_that_is_measured_is_declared_and_counted(clock):
    never = Run([None])()
    nothing = never.report
    assert (nothing["lag/mean"], nothing["timing_breakdown/learner_grad_time_ms"]) == (None, None)
    assert (never.listener.reports[-1].first_update, never.settlements) == (None, [])
    assert (never.lag_histogram, never.thread.progress) == ([0] * 1001, Progress(1))
    batches = batch_of(1, (0, 1, 1, 3)), batch_of(2, (1,) * 4, (3, 3, 0, 0))
    first, second = batches
    run = Run([first, clock.pass_s(2.0), second], progress=Progress(1, 3), max_lag=4)
    run.loader.load_timer.push(0.004)
    report = run().report
    assert run.lag_histogram == [1, 0, 2, 5, 0]
    assert (report["lag/mean"], report["lag/max"]) == (19 / 8, 3)
    assert (report["batch/valid_rows_mean"], report["learner_queue/capacity"]) == (9, 2)
    assert report["timing_breakdown/learner_grad_time_ms"] > 0
    timings = {"load": 4, "load_wait": 0, "dequeue": 1000}
    for name, mean_ms in timings.items():
        assert report[f"timing_breakdown/learner_{name}_time_ms"] == mean_ms


def test_statistics_are_means_over_the_updates_since_the_last_report():
    def losses(run, *values):
        """A batch for each, and a report behind the last one."""
        for number, value in enumerate(values):
            yield lambda value=value: run.step.stats.update({"loss/total": value})
            yield batch_of(number)
        yield run.listener.channels.is_report_due.set
        yield None

    run = Run([])
    for values in ((1.0, 2.0, 6.0), (5.0, 9.0), (), (8.0, 4.0)):
        run.loader._script += losses(run, *values)
    # The end comes before that one is asked for.
    run.loader._script = run.loader._script[:-2]
    run()
    said = [report.metrics.get("loss/total") for report in run.listener.reports]
    # The last one is that of the last batch, wherever the clock has cut: it can be made again.
    assert said == [3.0, 7.0, 7.0, 4.0]


def test_waits_are_means_of_whole_batches_however_many_passes_these_have(clock):
    script = [step for n in range(3) for step in (clock.pass_s(1.0), batch_of(n))]
    report = Run(script, num_passes=20)().report
    # That before the first batch counts as none.
    assert report["timing_breakdown/learner_dequeue_time_ms"] == pytest.approx(2000 / 60)


def test_the_lag_that_is_reported_is_that_of_all_columns_of_a_batch():
    old, new = (0,) * 60, (9,) * 60  # as they came: the oldest first
    batch = batch_of(1, old + new, (3,) * 120)
    report = Run([batch], progress=Progress(1, 9), batch_columns=120)().report
    assert (report["lag/mean"], report["lag/max"]) == (4.5, 9)
    assert report["lag/quantiles"] == [0, 0, 4.5, 9, 9]


def test_waits_for_copies_are_means_of_all_passes_as_all_times_of_the_learner_are(clock):
    def copy():
        with run.loader.load_wait_timer:
            clock.pass_s(8.0)()

    # The wait for the second batch goes on in a second request.
    empty = [copy, None, copy, batch_of(2)]
    run = Run([copy, batch_of(1), clock.pass_s(1.0), *empty], num_passes=4)
    run.loader.load_wait_timer = TimerStat(clock=clock.perf_counter)
    report = run().report
    assert report["timing_breakdown/learner_load_wait_time_ms"] == pytest.approx(24_000 / 8)
    assert report["timing_breakdown/learner_dequeue_time_ms"] == pytest.approx(1000 / 8)


def test_however_it_ends_the_loader_is_told():
    """Its own thread may wait for a batch to be taken."""
    assert Run([batch_of(1)] * 9, stop={"env_steps": 1})().loader.is_closed
    dying = Run([lambda: 1 / 0])
    with pytest.raises(ZeroDivisionError):
        dying()
    assert dying.loader.is_closed


def test_the_ring_is_settled_at_the_end():
    batches, stop = [batch_of(1), batch_of(2)], {"env_steps": 24}
    run = Run(batches, num_passes=3, minibatch_buffer_size=2, stop=stop)()
    assert run.step.batches == [1, 2]
    shutdown = {"dropped": {"shutdown": 4}, "passes_done": 4, "passes_partial": {"shutdown": 4}}
    assert run.settlements == [Settlement(1, **shutdown), Settlement(2, **shutdown)]


# -------------------- passes that are not made


def eager(clock, *, num_uses=99, waited_s=2.0, **section):
    """Two batches, of which the second waits when there have been so many uses."""
    script = [batch_of(1), clock.pass_s(waited_s), batch_of(2)]
    run = Run(script, num_passes="auto", **section)
    run.loader.num_waiting = lambda: int(len(run.step.uses) >= num_uses)
    return run


def slowly(clock, run, update_s):
    """Make its updates take so long."""
    step_run = run.step.run

    def run_slowly(*given, **how):
        clock.pass_s(update_s)()
        return step_run(*given, **how)

    run.step.run = run_slowly
    return run


def test_a_batch_is_used_while_nothing_new_waits(clock, monkeypatch):
    timed, timing = [], LearnerStats.timing
    monkeypatch.setattr(
        LearnerStats, "timing", lambda *given, **how: timed.append(how) or timing(*given, **how)
    )
    # The second one comes during the third pass.
    run = slowly(clock, eager(clock, num_uses=3), 0.5)()
    assert run.step.batches == [1, 1, 1, 2]
    one, other = run.settlements
    assert one == Settlement(1, trained=4, passes_done=12, passes_ended_early=52)
    assert other == Settlement(2, trained=4, passes_done=4, passes_ended_early=60)
    assert [how["is_first"] for how in timed] == [True, False, False, True]
    # In the time of one pass, and in 2 s more, there was nothing new: it would have waited.
    assert run.report["timing_breakdown/learner_dequeue_time_ms"] == (0.0 + 0.5 + 2.0) * 1000 / 2
    # One that waits already has the next turn.
    assert eager(clock, num_uses=1)().step.batches == [1, 2]
    assert eager(clock)().step.batches == [1] * 16 + [2] * 16


def test_passes_of_idle_time_are_no_starvation(clock, caplog):
    for waited_s, is_told in ((0.25, False), (6.0, True)):
        caplog.clear()
        run = slowly(clock, eager(clock, waited_s=0.0), 0.5)
        batch = run.loader._script.pop()
        run.loader._script += [clock.pass_s(waited_s), None, batch]
        run()
        assert ("learner starved" in caplog.text) == is_told
        assert run.report["learner/starved_total_s"] == waited_s * is_told


def test_a_pass_without_an_update_says_nothing_of_the_kl():
    run = Run([batch_of(1), batch_of(2, valid_rows=(0, 0, 0, 0))], num_passes=3, stop_kl=0.1)
    run.step.stats = {"policy/kl": 0.2}
    run()
    assert [settled.passes_ended_early > 0 for settled in run.settlements] == [True, False]


def test_a_batch_that_is_old_or_far_from_what_acted_is_used_no_more(clock):
    assert eager(clock, max_lag=2)().step.batches == [1] * 3
    for section, kl, num_uses in (
        ({"num_passes": 3}, 0.2, 3),
        ({"num_passes": 3, "stop_kl": 0.2}, 0.2, 3),
        ({"num_passes": 3, "stop_kl": 0.19}, 0.2, 1),
        ({"num_passes": "auto"}, 0.1, 16),
        ({"num_passes": "auto"}, 0.11, 1),
        ({"num_passes": "auto", "stop_kl": 0.3}, 0.2, 16),
    ):
        run = Run([batch_of(1)], **section)
        run.step.stats = {"policy/kl": kl}
        assert run().step.batches == [1] * num_uses
        (settled,) = run.settlements
        assert settled.trained == 4
    # In lockstep it is the end of the one update that all passes are.
    run = Run([batch_of(1), batch_of(2)], lockstep=True, num_passes=3, stop_kl=0.1)
    run.step.stats = {"policy/kl": 0.2}
    assert run().step.batches == [1, 2]
    assert run.thread.progress.update == 2
    assert run.listener.updates == [0, 1, 2]


# -------------------- lag


def test_what_goes_stale_between_passes_leaves_with_its_partial_passes():
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
    # Each column that is alive is counted at every pass.
    assert run.lag_histogram == [1, 2, 3]
    assert run.report["lag/max"] == 2


@pytest.mark.parametrize(("update", "num_valid", "dropped"), [(4, 3, {"stale": 4}), (10, 0, {})])
def test_a_batch_of_which_nothing_is_left_is_no_update(update, num_valid, dropped):
    first = batch_of(1, updates=(update,) * 4, valid_rows=(num_valid,) * 4)
    second = batch_of(2, updates=(10,) * 4, valid_rows=(0, 0, 0, 1))
    run = Run([first, second], progress=Progress(1, update=10), max_lag=5)()
    assert run.step.batches == [2]
    assert run.thread.progress == Progress(1, update=11, env_steps_trained=1)
    assert run.settlements[0].dropped == dropped
    settled = run.settlements[0]
    assert settled.trained + sum(settled.dropped.values()) == 4
    assert run.report["learner/skipped_updates"] == 1
    assert run.loader.released == [1, 2]


# -------------------- updates that fail


def test_an_update_that_is_not_finite_is_skipped_and_its_batch_dropped(caplog):
    run = Run([batch_of(1), batch_of(2)], step=FakeStep(nonfinite=[1]), num_passes=2)()
    # The second pass of the first batch was not taken: it counts nowhere.
    assert run.step.batches == [1, 1, 2, 2]
    assert run.thread.progress.update == 3
    reasons = {"nonfinite_update": 4}
    assert run.settlements == [
        Settlement(1, dropped=reasons, passes_done=4, passes_partial=reasons),
        Settlement(2, trained=4, passes_done=8),
    ]
    assert run.report["learner/skipped_updates"] == 1
    assert run.loader.released == [1, 2]
    assert caplog.text.count("update skipped") == 1


def test_columns_whose_part_is_not_finite_are_dropped_and_the_others_trained(caplog):
    step = FakeStep(nonfinite=[0], failing=[1, 3], num_updates=2)
    first = batch_of(1, valid_rows=(3, 4, 5, 6))
    first.actors_B[:] = range(4)
    run = Run([first, batch_of(2)], step=step, num_passes=2)()
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
    assert "without 2 columns of actors 1, 3 that made one fail: loss/value" in caplog.text
    assert run.lag_histogram[:7] == [2, 0, 2, 0, 4, 0, 4]


def test_a_run_whose_losses_are_all_nan_says_so_now_and_then_and_reaches_its_time_limit(
    clock, caplog
):
    script = []
    for number in range(40):
        script += [clock.pass_s(1.0), batch_of(number)]
    run = Run(script, step=FakeStep(nonfinite=range(99)), stop={"wall_s": 25.0})()
    assert run.listener.stops == ["wall_s"]
    assert run.thread.progress.update == 0
    ends = [line.rpartition("(")[2] for line in caplog.messages]
    assert ends == ["1 skipped so far)", "11 skipped so far)", "21 skipped so far)"]


def test_a_run_of_updates_that_all_fail_is_ended_and_its_last_batch_kept(monkeypatch, caplog):
    batches = [batch_of(number) for number in range(20)]
    # One that is taken in between, and they are counted anew.
    step = FakeStep(nonfinite={*range(4), *range(5, 99)})
    monkeypatch.setattr(learner_thread, "MOST_SKIPPED_IN_A_ROW", 5)
    run = Run(batches, step=step)()
    assert run.step.batches == list(range(10))
    assert run.listener.stops == ["not_finite"]
    assert not any(loaded.batch.kept for loaded in batches[:9])
    ((path, about, others),) = batches[9].batch.kept
    assert path.name == "not-finite-1-1.safetensors"
    assert about == {"not_finite": "loss/value, loss/total", "stats": "{'loss/total': 0.5}"}
    assert others["is_failed_B"].tolist() == ALL
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert line == (
        "5 updates in a row were skipped since update 1, as these are not finite: loss/value, "
        "loss/total; it is kept"
    )
    # The weights that it has learned are saved.
    assert [captured.progress.update for captured in run.listener.captures] == [1]
    assert len(run.listener.updates) == 2


def test_weights_that_are_not_finite_are_not_published(caplog):
    step = FakeStep()
    run = Run([batch_of(1), batch_of(2), batch_of(3)], step=step)

    def overflow(version):
        # As float32, a byte of 255 four times is no number.
        step.tensors[0].fill_(254)

    run.listener.channels.weights.post = overflow
    run()
    assert run.listener.stops == ["not_finite"]
    assert run.step.batches == [1]
    assert "the weights of update 1 are not finite" in caplog.text


# -------------------- what it tells, and when it stops


def test_a_version_is_published_every_so_many_updates():
    for every, first, num_updates, versions in (
        (1, 0, 1, [0, 1, 2, 3, 4, 5]),
        (2, 0, 1, [0, 2, 4]),
        (3, 4, 1, [4, 6, 9]),
        # Several updates of a batch count each, and publish once.
        (1, 0, 4, [0, 4, 8, 12, 16, 20]),
        (6, 0, 4, [0, 8, 12, 20]),
    ):
        run = Run(
            [batch_of(n, (first,) * 4) for n in range(1, 6)],
            step=FakeStep(num_updates=num_updates),
            progress=Progress(3, update=first),
            publish_every_updates=every,
        )()
        assert run.thread.progress.update == first + 5 * num_updates
        assert [weights.version for weights in run.listener.weights] == [(3, n) for n in versions]
        # Each holds the weights of its own update.
        wanted = [(update - first) / num_updates for update in versions]
        assert [weights.buffer[0] for weights in run.listener.weights] == wanted


def test_it_shows_that_it_moves_and_may_take_longer_for_its_first_update():
    seen = []
    step = FakeStep()
    run = Run([None, batch_of(1), batch_of(2), None, batch_of(3)], step=step)
    watchdog, learn = run.listener.channels.watchdog, step.run

    def noted(*args, **how):
        seen.append((watchdog.num_beats, watchdog.patience))
        return learn(*args, **how)

    step.run = noted
    run()
    # While it waits, too; and at its end nobody waits for it.
    assert seen == [(2, BUILD_PATIENCE), (3, 1), (5, 1)]
    assert watchdog.num_beats == 0


def test_reports_and_captures_are_given_when_asked_for_between_updates():
    listener = Listener()

    def ask():
        listener.channels.is_report_due.set()
        listener.channels.is_capture_due.set()

    Run([batch_of(1), ask, batch_of(2), batch_of(3)], listener=listener)()
    assert [report.progress.update for report in listener.reports] == [2, 3]
    assert [capture.progress.update for capture in listener.captures] == [2, 3]


def test_it_stops_when_enough_is_trained():
    for stop, num_passes, start, updates in (
        ({"env_steps": 12}, 1, Progress(1), 1),
        ({"env_steps": 13}, 1, Progress(1), 2),
        ({"env_steps": 24}, 1, Progress(1), 2),
        ({"env_steps": 1000}, 1, Progress(1), 4),
        ({"updates": 3}, 1, Progress(1), 3),
        ({"updates": 3}, 2, Progress(1), 3),
        # A resumed run may have reached it already.
        ({"env_steps": 50}, 1, Progress(2, 9, 50), 9),
        ({"updates": 9}, 1, Progress(2, 9, 50), 9),
    ):
        batches = [batch_of(n) for n in range(1, 5)]
        run = Run(batches, stop=stop, num_passes=num_passes, progress=start)()
        assert run.thread.progress.update == updates, stop
        assert len(run.step.uses) == updates - start.update, stop
        assert run.listener.stops == ([] if stop == {"env_steps": 1000} else list(stop))


def test_wall_time_runs_from_the_first_update(clock):
    wait = clock.pass_s(4.0)
    run = Run([wait, batch_of(1), wait, batch_of(2), wait, batch_of(3)], stop={"wall_s": 5.0})()
    # Updates at 4, 8 and 12 s: the first that ends 5 s after the first is the third.
    assert run.step.batches == [1, 2, 3]
    assert run.listener.stops == ["wall_s"]
    # The columns of the first update were gathered before it.
    assert run.listener.reports[-1].first_update == (1004.0, 12)


# -------------------- with nothing to do


def famine(clock, script, wait_s=5.0, **stop):
    """A letter is a batch; at a dot a report is asked for, and none comes for a while."""
    listener, steps = Listener(), []
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
    assert run.report["timing_breakdown/learner_dequeue_time_ms"] == 4500.0


def test_the_time_limit_holds_while_it_waits(clock):
    run = famine(clock, "A......B", wait_s=1.0, wall_s=3.0)
    assert run.listener.stops == ["wall_s"]
    assert clock.now == 1003.0


# -------------------- in lockstep: a batch with all its passes is one update


def run_of(script, **settings):
    return Run(script, lockstep=True, **settings)()


def in_order(num_batches):
    """Each acted with the version before its own."""
    return [batch_of(n, updates=(n - 1,) * 4) for n in range(1, num_batches + 1)]


@pytest.mark.parametrize("num_updates", [1, 4])
def test_all_passes_and_minibatches_of_a_batch_are_one_version(num_updates):
    run = run_of(in_order(3), step=FakeStep(num_updates=num_updates), num_passes=3)
    assert run.step.batches == [1] * 3 + [2] * 3 + [3] * 3
    assert run.listener.updates == [0, 1, 2, 3]
    # Weights of the last pass.
    assert [weights.buffer[0] for weights in run.listener.weights] == [0, 3, 6, 9]
    assert run.thread.progress == Progress(1, update=3, env_steps_trained=36)
    assert run.lag_histogram[:2] == [36, 0]
    assert run.report["lag/max"] == 0
    # With a lag every pass has it.
    batches = [batch_of(n, updates=(max(0, n - 2),) * 4) for n in (1, 2, 3)]
    assert run_of(batches, num_passes=2, max_lag=1).lag_histogram == [8, 16]


@pytest.mark.parametrize("why", ["not finite", "no valid row", "nobody filled it"])
def test_an_update_that_is_skipped_has_a_version_all_the_same(why):
    first = batch_of(1, valid_rows=(0 if why == "no valid row" else 3,) * 4)
    first.alive_B[:] = why != "nobody filled it"
    step = FakeStep(nonfinite=[0] if why == "not finite" else [])
    run = run_of([first, batch_of(2, (1,) * 4)], step=step)
    assert run.listener.updates == [0, 1, 2]
    assert run.report["learner/skipped_updates"] == 1
    assert run.lag_histogram[0] == 4
    assert run.loader.released == [1, 2]
    assert run.settlements[1] == Settlement(2, trained=4, passes_done=4)


@pytest.mark.parametrize("stop", [{"env_steps": 13}, {"updates": 2}])
def test_a_limit_that_is_reached_waits_for_the_end_of_the_update_and_is_told_before_its_version(
    stop,
):
    """Others would go on by that version."""
    listener, told = Listener(), []
    post = listener.channels.stops.post

    def noted(reason):
        told.append((reason, listener.updates.copy()))
        post(reason)

    listener.channels.stops.post = noted
    run = run_of(in_order(3), listener=listener, num_passes=3, stop=stop)
    assert told == [(*stop, [0, 1])]
    assert listener.updates.copy() == [0, 1, 2]
    assert run.step.batches == [1] * 3 + [2] * 3
    assert run.listener.stops == [*stop]
    assert run.thread.progress == Progress(1, update=2, env_steps_trained=24)
    assert [settlement.trained for settlement in run.settlements] == [4, 4]


def test_nothing_is_saved_between_the_passes_of_an_update():
    listener, step = Listener(), FakeStep()
    learn = step.run

    def ask_in_the_middle(*arguments, **settings):
        listener.channels.is_capture_due.set()
        return learn(*arguments, **settings)

    step.run = ask_in_the_middle
    run_of(in_order(2), listener=listener, step=step, num_passes=3)
    # The last is the capture of the end.
    assert [capture.training for capture in listener.captures] == [3, 6, 6]
    assert [capture.progress.update for capture in listener.captures] == [1, 2, 2]


# -------------------- with another rank


class Beside(Ranks):
    """The first of two. The second has a batch where this has one, unless it `starves`."""

    def __init__(self, *, starves=False, before=lambda number: None):
        super().__init__(Place(0, 2))
        self._starves, self._before, self.said, self.checked = starves, before, [], []

    def meet(self, patience_s):
        pass

    def totals(self, *shares):
        if len(shares) == 1:
            return shares
        self.said.append(shares)
        assert len(self.said) < 50, "it does not end"
        self._before(len(self.said))
        is_ready, *others = shares
        return [is_ready + (is_ready and not self._starves), *others]

    def gather(self, own):
        return [own, b'{"updates": 1}']

    def check_equal(self, tensors, what):
        self.checked.append(len(tensors))

    def share(self, tensors):
        self.shared = tensors


class Step(FakeStep):
    restored = None

    def named_tensors(self):
        return dict.fromkeys(range(len(self.batches)))

    def capture(self):
        return SimpleNamespace(tensors={"model": {"w": 5}, "target": {"w": 7}})

    def restore(self, state):
        self.restored = state


def test_a_rank_that_holds_a_batch_while_another_starves_ends_when_it_is_told_to():
    listener = Listener()

    def end(number):
        if number == 3:
            listener.channels.end_reasons.append("interrupted")

    ranks = Beside(starves=True, before=end)
    run = Run([batch_of(1)], step=Step(), listener=listener, ranks=ranks)()
    assert (run.step.batches, listener.stops, len(ranks.said)) == ([], ["interrupted"], 4)
    (settled,) = run.settlements
    assert (settled.trained, settled.dropped) == (0, {"shutdown": 4})


def test_a_rank_whose_loop_has_died_does_not_end_the_others_in_good_order():
    def die():  # its queues close, and nobody has said why
        raise ClosedError("full")

    run = Run([batch_of(1), die], Step(), ranks=(ranks := Beside()))
    with pytest.raises(ClosedError):
        run()
    assert run.step.batches == [1]
    assert run.listener.stops == []
    assert not any(any(word[7 : 7 + len(REASONS)]) for word in ranks.said)


def test_each_pass_is_told_of_where_that_is_asked_for():
    assert Run([batch_of(1)], num_passes=2)().listener.reports[-1].updates == b""
    run = Run([batch_of(1), batch_of(2)], num_passes=2, log_updates=True)()
    lines = b"".join(report.updates for report in run.listener.reports).splitlines()
    told = [json.loads(line) for line in lines]
    assert [line["update"] for line in told] == [0, 1, 2, 3]
    assert {(line["epoch"], line["num_updates"]) for line in told} == {(1, 1)}


def test_ranks_compare_their_weights_every_so_many_updates_and_at_the_end(monkeypatch):
    monkeypatch.setattr(learner_thread, "CHECK_EVERY", 3)
    script = [batch_of(n) for n in range(1, 8)]
    run = Run(script, Step(), ranks=Beside(), stop={"updates": 7})()
    assert run.thread.ranks.checked == [3, 6, 7]
    # They begin with all that rank 0 has made, a target network included.
    assert run.thread.ranks.shared == {"model/w": 5, "target/w": 7}
    assert run.step.restored == run.step.capture()


def test_an_update_is_told_of_the_valid_rows_that_the_word_of_all_has():
    class More(Beside):
        def totals(self, *shares):
            found = super().totals(*shares)
            return found if len(found) == 1 else [found[0], found[1] + 5, *found[2:]]

    alone, both = Run([batch_of(1)])(), Run([batch_of(1)], Step(), ranks=More())()
    (own,), (whole,) = alone.step.num_rows, both.step.num_rows
    assert own + 5 == whole > 5


def test_in_lockstep_a_goal_is_that_of_what_is_trained_whatever_is_counted_by_then():
    def count(number):  # as the loop does, some time before or after the word
        listener.channels.returns[0] = [9.0] * 100

    listener = Listener()
    listener.channels.returns[0] = [1.0] * 60  # a resumed run has some
    script = [batch_of(n, returns=[2.0] * 30) for n in range(1, 6)]
    how = {"stop": {"mean_return": 1.6}, "lockstep": True, "num_passes": 2}
    run = Run(script, Step(), listener=listener, ranks=Beside(before=count), **how)()
    # 60 of 1 and 30 of 2 are too few, then 40 and 60 are the last hundred.
    assert run.step.batches == [1, 1, 2, 2]
    assert (listener.stops, listener.channels.goals) == (["mean_return"], [1.6])


def test_all_save_the_same_update_though_a_save_is_due_while_they_agree_on_another_capture():
    def ask(number):
        if number == 1:  # of a capture that rank 0 evaluates
            listener.channels.is_save_due.set()
            listener.channels.is_capture_due.set()

    listener = Listener()
    listener.channels.is_capture_due.set()
    script = [batch_of(1), batch_of(2)]
    run = Run(script, Step(), listener=listener, ranks=Beside(before=ask))()
    captured = [(each.progress.update, each.is_save_due) for each in run.listener.captures]
    assert captured == [(0, False), (1, True), (2, True)]


def test_rank_0_reports_with_the_newest_of_the_others_and_hears_of_their_actors():
    listener = Listener()
    channels = listener.channels = dataclasses.replace(
        listener.channels, count_actors=lambda **_: (2, 3)
    )
    channels.is_report_due.set()

    def ask(number):
        if number == 2:
            channels.is_report_due.set()

    run = Run(
        [batch_of(n) for n in range(1, 4)], Step(), listener=listener, ranks=Beside(before=ask)
    )()
    first, second, last = run.listener.reports
    assert first.others == second.others == [b'{"updates": 1}']
    # The loop asks for what belongs to the last one.
    assert last.others == ()
    wait_ms = second.metrics["timing_breakdown/learner_rank_wait_time_ms"]
    assert 0 <= wait_ms < 1000
    # It is told once, as nothing changes: the fake adds nobody's actors to our two.
    assert listener.counts == [((2, 0), (3, 0))]


def test_the_loop_is_told_once_of_each_checkpoint_that_all_ranks_have():
    listener = Listener()
    # The update of the newest at each word; the second rank is late, and does not save the third.
    own, theirs = (0, 1, 1, 1, 2, 3, 4, 4, 4), (0, 0, 1, 1, 1, 2, 2, 4, 4)

    class Saves(Beside):
        def totals(self, *shares):
            *found, epoch, _, update, _ = super().totals(*shares)
            newest = Version(1, theirs[min(len(self.said), len(theirs)) - 1])
            return [*found, epoch, newest.epoch, update, newest.update]

    def save(number):
        listener.channels.saved[0] = Version(1, own[min(number, len(own) - 1)])

    script = [batch_of(n) for n in range(1, 10)]
    Run(script, Step(), listener=listener, ranks=Saves(before=save))()
    assert listener.common == [Version(1, 1), Version(1, 4)]


class Ahead(Beside):
    """The first of so many, of which `num_ready` have a batch while this one has none; else all."""

    def __init__(self, num_ready, count):
        super().__init__()
        self.place, self._num_ready = Place(0, count), num_ready

    def totals(self, *shares):
        self.said.append(shares)
        assert len(self.said) < 99, "it does not end"
        is_ready, *others = shares
        return [self.place.count if is_ready else self._num_ready, *others]


@pytest.mark.parametrize(
    ("num_ready", "count", "share", "is_cut"),
    [
        *((1, 2, 0.5, True), (1, 2, 0.51, False), (0, 2, 0.01, False), (1, 3, 0.5, False)),
        # As floats, 0.55 * 20 is more than 11, and 0.07 * 100 more than 7.
        *((2, 3, 0.5, True), (11, 20, 0.55, True), (7, 100, 0.07, True), (1, 2, None, False)),
    ],
)
def test_actors_of_a_rank_that_enough_others_wait_for_are_told_to_cut(
    num_ready, count, share, is_cut
):
    ranks = Ahead(num_ready, count)
    script = [batch_of(1), None, None, batch_of(2), batch_of(3)]
    run = Run(script, Step(), ranks=ranks, lockstep=True, cut_share=share)()
    # While it has a batch, and once it has none for ever, it is late for nothing.
    assert run.listener.cuts == [1, 1] * is_cut
    assert run.step.batches == [1, 2, 3]


def test_a_rank_speaks_sooner_where_trajectories_are_cut_and_seldom_where_nobody_is_ready(clock):
    def waits(num_ready, **how):
        script = [step for wait in (0.01, 0.01, 0.3, 4.0) for step in (clock.pass_s(wait), None)]
        run = Run(script, Step(), ranks=Ahead(num_ready, 2), lockstep=True, **how)()
        return run.loader.timeouts

    # A word is said before anything is drawn, and after each of these waits.
    assert waits(1) == [0.25] * 5
    assert waits(1, cut_share=0.5) == [0.01] * 5
    assert waits(0, cut_share=0.5) == pytest.approx([0.01, 0.01, 0.01, 0.032, 0.25])
    run = Run([None, None], Step(), cut_share=0.5, lockstep=True)()
    assert run.loader.timeouts == [0.25] * 3
