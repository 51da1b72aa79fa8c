"""What the learner thread measures, under names that the registry knows."""

from typing import Any

import numpy as np
import torch

from impala_async.learner.threads.measurements import Measurements
from impala_async.metrics.names import REGISTRY
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
