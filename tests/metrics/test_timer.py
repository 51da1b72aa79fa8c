"""TimerStat on a clock that the test turns."""

import json
import queue

import numpy as np
import pytest

from impala_async.metrics.timer import TimerStat


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def run_for(timer, clock, seconds, units=0):
    with timer:
        clock.now_s += seconds
    timer.push_units_processed(units)


def test_mean_is_of_the_window_and_totals_of_all(clock):
    timer = TimerStat(n=2, clock=clock)
    assert (timer.mean, timer.mean_ms, timer.mean_throughput) == (None, None, None)
    assert (timer.count, timer.total_s) == (0, 0.0)
    run_for(timer, clock, 10.0)
    assert timer.mean == 10.0
    for seconds in (1.0, 3.0):
        run_for(timer, clock, seconds)
    assert (timer.mean, timer.mean_ms, timer.count, timer.total_s) == (2.0, 2000.0, 3, 14.0)
    ten = TimerStat(clock=clock)
    for seconds in [100.0] + [1.0] * 10:
        run_for(ten, clock, seconds)
    assert ten.mean == 1.0


def test_throughput_divides_the_work_of_timings_by_their_own_time(clock):
    timer = TimerStat(n=2, clock=clock)
    timer.push_units_processed(8)  # it waits for the first timing
    assert timer.mean_throughput is None
    run_for(timer, clock, 2.0)
    assert timer.mean_throughput == 4.0
    for seconds, units in ((1.0, 1000), (2.0, 10), (3.0, 15)):
        run_for(timer, clock, seconds, units)
    timer.push_units_processed(5)
    assert timer.mean_throughput == 6.0
    for units in (1000, 30):
        with timer:
            clock.now_s += 2.0
            timer.push_units_processed(units)
    run_for(timer, clock, 4.0)
    assert timer.mean_throughput == 5.0, "time without work counts"
    still = TimerStat(clock=clock)
    run_for(still, clock, 0.0, units=5)
    assert (still.mean, still.mean_throughput) == (0.0, None)


def test_block_that_raises_was_timed_and_the_timer_lives(clock):
    timer = TimerStat(clock=clock)

    def wait_in_vain():
        with timer:
            clock.now_s += 4.0
            raise queue.Empty

    with pytest.raises(queue.Empty):
        wait_in_vain()
    run_for(timer, clock, 2.0)
    assert (timer.mean, timer.count) == (3.0, 2)


def test_impossible_uses_are_bugs(clock):
    timer = TimerStat(clock=clock)
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(AssertionError):
            timer.push(seconds)
    assert timer.count == 0
    with timer, pytest.raises(AssertionError), timer:
        pass
    with pytest.raises(AssertionError):
        TimerStat(n=0)


def test_readings_of_times_measured_elsewhere_are_plain_json():
    timer = TimerStat()
    timer.push(np.float32(0.25))
    timer.push_units_processed(np.int64(5))
    readings = [timer.mean, timer.mean_ms, timer.total_s, timer.mean_throughput]
    assert json.loads(json.dumps(readings, allow_nan=False)) == [0.25, 250.0, 0.25, 20.0]
