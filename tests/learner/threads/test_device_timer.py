"""Durations on a CPU; the events of a GPU are tested where there is one."""

import pytest
import torch

from impala_async.learner.threads import device_timer
from impala_async.learner.threads.device_timer import DeviceTimer
from impala_async.metrics.timer import TimerStat


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(device_timer, "time", made)
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
