"""The numbers of the learner thread, and how reports tell them."""

import json
import math

import numpy as np
import pytest
import torch

from impala_async.config.learner import LearnerSection
from impala_async.learner.stats import LearnerStats
from impala_async.metrics.timer import TimerStat
from impala_async.training.step import StepResult
from impala_async.weights import Version
from tests.learner.fakes import batch_of


class Loader:
    """One in which so many batches wait."""

    num_slots = 3

    def __init__(self, num_batches=0):
        self.num_batches = num_batches
        self.load_timer, self.load_wait_timer = TimerStat(), TimerStat()

    def num_waiting(self):
        return self.num_batches


def make_stats(loader=None, *, is_eager=False, **section):
    section = LearnerSection(lease_s=2.0, **section)
    return LearnerStats(section, loader or Loader(), torch.device("cpu"), is_eager=is_eager)


def result_of(num_updates=1, **stats):
    return StepResult(num_updates, torch.zeros(4, dtype=torch.bool), stats, 0, ())


def timing(stats, name):
    return stats.report(is_last=False)[f"timing_breakdown/learner_{name}_time_ms"]


def test_a_learner_that_waits_too_long_is_starved_until_a_batch_comes(clock, caplog):
    stats = make_stats()
    waits = [(0.75, False), (0.5, False), (0.5, False), (0.25, True)]
    found = []
    for waited_s, has_batch in waits:
        clock.pass_s(waited_s)()
        stats.add_wait(waited_s, has_batch=has_batch)
        found.append((stats.starved_at, stats.report(is_last=False)["learner/starved_total_s"]))
    # It counts from the begin of the wait.
    assert found == [(None, 0.0), (1000.0, 1.25), (1000.0, 1.75), (None, 2.0)]
    told = [record.message for record in caplog.records]
    assert [line.partition(":")[0] for line in told] == [
        "learner starved",
        "learner no longer starved, after 2.0 s",
    ]
    # Short waits that a batch ends are no starving.
    stats.end_wait(is_first=True)
    stats.add_wait(0.75, has_batch=True)
    assert (stats.waited_s, stats.starved_at) == (0.75, None)


def test_the_wait_for_a_copy_is_none_for_actors():
    stats = make_stats(loader := Loader())
    stats.end_wait(is_first=True)
    loader.load_wait_timer.push(0.5)
    stats.add_wait(2.0, has_batch=True)
    stats.end_wait(is_first=True)
    assert (timing(stats, "dequeue"), timing(stats, "load_wait")) == (1500.0 / 2, 500.0 / 2)
    assert stats.waited_s == 0.0


def test_the_time_before_the_first_batch_is_no_wait_of_the_training():
    stats = make_stats()
    for waited_s, mean_ms in ((60.0, 0.0), (0.5, 250.0), (0.25, 250.0)):
        stats.add_wait(waited_s, has_batch=True)
        stats.end_wait(is_first=True)
        assert timing(stats, "dequeue") == mean_ms


@pytest.mark.parametrize(("num_batches", "dequeue_ms"), [(0, 250.0), (1, 50.0)])
def test_passes_made_of_idle_time_are_a_wait_of_an_eager_learner(num_batches, dequeue_ms):
    stats = make_stats(Loader(num_batches), is_eager=True)
    stats.end_wait(is_first=True)
    stats.end_pass(0.4, is_first=True)
    stats.end_wait(is_first=False)
    stats.end_pass(0.4, is_first=False)
    stats.add_wait(0.1, has_batch=True)
    stats.end_wait(is_first=True)
    assert timing(stats, "dequeue") == pytest.approx(dequeue_ms)


@pytest.mark.parametrize(("is_eager", "is_timed"), [(True, [True, False]), (False, [True, True])])
def test_only_the_first_pass_of_an_eager_learner_is_timed(is_eager, is_timed):
    stats = make_stats(is_eager=is_eager)
    timers = [stats.timing(is_first=is_first) for is_first in (True, False)]
    assert [isinstance(timer, TimerStat) for timer in timers] == is_timed


def test_the_line_of_an_update_has_its_version_and_null_for_what_is_not_finite():
    stats = make_stats()
    stats.add_result(result_of(**{"loss/total": 0.5}), Version(2, 7), is_logged=True)
    stats.add_result(result_of(0, **{"loss/total": math.nan}), Version(2, 8), is_logged=True)
    stats.add_result(result_of(**{"loss/total": 1.0}), Version(2, 8), is_logged=False)
    assert [json.loads(line) for line in stats.take_updates().splitlines()] == [
        {"epoch": 2, "update": 7, "num_updates": 1, "loss/total": 0.5},
        {"epoch": 2, "update": 8, "num_updates": 0, "loss/total": None},
    ]
    assert stats.take_updates() == b""


def test_passes_of_which_there_is_no_line_are_told_of(monkeypatch, caplog):
    monkeypatch.setattr("impala_async.learner.stats.MOST_UPDATES_LOGGED", 3)
    stats = make_stats()
    for num, says in ((3, ""), (5, "more than 3 came between two reports: lower learner.report_e")):
        for update in range(num):
            stats.add_result(result_of(), Version(1, update), is_logged=True)
        assert len(stats.take_updates().splitlines()) == min(num, 3)
        assert says in caplog.text
        assert bool(says) == bool(caplog.records)


def test_a_report_has_means_and_the_last_one_the_newest():
    stats = make_stats()
    for loss in (0.5, 1.5):
        stats.add_result(result_of(**{"loss/total": loss}), Version(1, 0), is_logged=False)
    assert stats.newest == {"loss/total": 1.5}
    assert stats.report(is_last=False)["loss/total"] == 1.0
    assert stats.report(is_last=True)["loss/total"] == 1.5


def test_the_lag_of_what_was_learned_is_counted_column_by_column():
    stats = make_stats(max_lag=4)
    for lags in ((0, 1, 1, 3), (3, 3)):
        stats.add_batch(np.array(lags), batch_of(1).num_valid_rows)
    assert stats.lag_histogram == [1, 2, 0, 3, 0]
    report = stats.report(is_last=False)
    assert (report["lag/mean"], report["lag/max"]) == (11 / 6, 3)
    assert report["batch/valid_rows_mean"] == 12
