"""TimerStat on a clock that the test turns."""

import json
import queue

import numpy as np
import pytest

from impala_async.metrics.timer import TimerStat


class Timer(TimerStat):
    now_s = 100.0

    def __init__(self, n=10):
        super().__init__(n, clock=lambda: self.now_s)

    def run_for(self, *durations, units=0):
        for seconds in durations:
            with self:
                self.now_s += seconds
            self.push_units_processed(units)


def test_mean_is_of_the_window_and_totals_of_all():
    timer = Timer(n=2)
    assert (timer.mean, timer.mean_ms, timer.mean_throughput) == (None, None, None)
    assert (timer.count, timer.total_s) == (0, 0.0)
    timer.run_for(10.0, 1.0, 3.0)
    assert (timer.mean, timer.mean_ms, timer.count, timer.total_s) == (2.0, 2000.0, 3, 14.0)
    ten = Timer()
    ten.run_for(100.0, *[1.0] * 10)
    assert ten.mean == 1.0
    # Those that were measured elsewhere are plain numbers too.
    ten.push(np.float32(0.25))
    readings = [ten.mean, ten.mean_ms, ten.total_s]
    assert json.loads(json.dumps(readings)) == [0.925, 925.0, 110.25]


def test_throughput_divides_the_work_of_timings_by_their_own_time():
    timer = Timer(n=2)
    timer.push_units_processed(8)  # it waits for the first timing
    assert timer.mean_throughput is None
    timer.run_for(2.0)
    assert timer.mean_throughput == 4.0
    for seconds, units in ((1.0, 1000), (2.0, 10), (3.0, 15)):
        timer.run_for(seconds, units=units)
    timer.push_units_processed(5)
    assert timer.mean_throughput == 6.0
    for units in (1000, 30):
        with timer:
            timer.now_s += 2.0
            timer.push_units_processed(units)
    timer.run_for(4.0)
    assert timer.mean_throughput == 5.0, "time without work counts"
    still = Timer()
    still.run_for(0.0, units=5)
    assert (still.mean, still.mean_throughput) == (0.0, None)


def test_block_that_raises_was_timed_and_the_timer_lives():
    timer = Timer()

    def wait_in_vain():
        with timer:
            timer.now_s += 4.0
            raise queue.Empty

    with pytest.raises(queue.Empty):
        wait_in_vain()
    timer.run_for(2.0)
    assert (timer.mean, timer.count) == (3.0, 2)
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(AssertionError):
            timer.push(seconds)
    with timer, pytest.raises(AssertionError), timer:
        pass
    assert timer.count == 3
