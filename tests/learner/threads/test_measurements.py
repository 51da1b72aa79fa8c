"""What the learner thread measures, under names that the registry knows."""

from typing import Any

import numpy as np
import pytest
import torch

from impala_async.learner.threads import measurements as module
from impala_async.learner.threads.measurements import DeviceTimer, Measurements
from impala_async.metrics.names import REGISTRY
from impala_async.metrics.timer import TimerStat
from tests.learner.fakes import FakeLoader


def measurements() -> Measurements:
    return Measurements(torch.device("cpu"), max_lag=3, max_waiting=5, loader=FakeLoader([]))


def test_before_anything_happened_means_are_missing_and_counts_are_zero() -> None:
    metrics = measurements().metrics(0.0)
    assert metrics["learner/skipped_updates"] == 0
    assert metrics["lag/mean"] is None
    assert metrics["timing_breakdown/learner_grad_time_ms"] is None
    assert metrics["learner_queue/capacity"] == 5


def test_an_update_adds_its_columns_to_lags_and_histogram() -> None:
    made = measurements()
    made.note_trained(np.array([0, 0, 2]), 30)
    made.note_trained(np.array([3]), 10)
    metrics = made.metrics(0.0)
    assert made.lag_histogram.tolist() == [2, 0, 1, 1]
    assert (metrics["lag/mean"], metrics["lag/max"]) == (1.25, 3)
    assert metrics["batch/valid_rows_mean"] == 20


def test_every_name_is_declared() -> None:
    made = measurements()
    made.stats = {"loss/total": 0.5}
    with made.grad:
        pass
    made.dequeue.push(0.002)
    made.queue_size.push(3)
    metrics: dict[str, Any] = made.metrics(1.5)
    assert metrics.keys() <= REGISTRY.keys()
    assert metrics["learner/starved_total_s"] == 1.5
    assert metrics["loss/total"] == 0.5
    assert metrics["timing_breakdown/learner_dequeue_time_ms"] == 2.0
    assert metrics["learner_queue/size_count"] == 1


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def test_each_block_is_one_timing(clock: Clock) -> None:
    timer = DeviceTimer(torch.device("cpu"), TimerStat())
    for seconds in (0.25, 0.75):
        with timer:
            clock.now += seconds
        clock.now += 1000
    assert timer.stat.count == 2
    assert timer.stat.mean == 0.5


def test_a_block_that_raises_was_timed_too(clock: Clock) -> None:
    timer = DeviceTimer(torch.device("cpu"), TimerStat())

    def fail() -> None:
        with timer:
            clock.now += 0.5
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert timer.stat.mean == 0.5
