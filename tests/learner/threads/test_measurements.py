"""What the learner thread measures, under names that the registry knows."""

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from impala_async.learner.threads import measurements as module
from impala_async.learner.threads.measurements import Measurements
from impala_async.metrics.names import REGISTRY
from tests.learner.fakes import FakeLoader
from tests.learner.threads.conftest import Clock


def test_all_that_is_measured_is_declared_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    loader: Any = FakeLoader([])
    made = Measurements(torch.device("cpu"), max_lag=3, max_waiting=5, loader=loader)
    metrics: dict[str, Any] = made.metrics(0.0)
    assert metrics["learner/skipped_updates"] == 0
    assert metrics["lag/mean"] is None
    assert metrics["timing_breakdown/learner_grad_time_ms"] is None
    assert metrics["learner_queue/capacity"] == 5

    made.note_trained(np.array([0, 0, 2]), 30)
    made.note_trained(np.array([3]), 10)
    made.stats = {"loss/total": 0.5}
    made.dequeue.push(0.002)
    made.queue_size.push(3)
    loader.load_timer.push(0.004)
    loader.load_wait_timer.push(0.008)
    # Each block is one timing, and one that raises was timed too.
    with made.grad:
        clock.pass_s(0.25)()
    clock.pass_s(1000.0)()
    with suppress(ValueError), made.grad:
        clock.pass_s(0.75)()
        raise ValueError
    metrics = made.metrics(1.5)
    assert metrics.keys() <= REGISTRY.keys()
    assert made.lag_histogram.tolist() == [2, 0, 1, 1]
    assert (metrics["lag/mean"], metrics["lag/max"]) == (1.25, 3)
    assert metrics["batch/valid_rows_mean"] == 20
    assert metrics["learner/starved_total_s"] == 1.5
    assert metrics["loss/total"] == 0.5
    assert metrics["learner_queue/size_count"] == 1
    timings = {"grad": 500, "load": 4, "load_wait": 8, "dequeue": 2}
    for name, mean_ms in timings.items():
        assert metrics[f"timing_breakdown/learner_{name}_time_ms"] == mean_ms
