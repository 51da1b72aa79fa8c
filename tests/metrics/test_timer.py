"""TimerStat on a clock that the test turns."""

import json
import queue

import numpy as np
import pytest

from impala_async.metrics.timer import TimerStat


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def run_for(timer: TimerStat, clock: Clock, seconds: float) -> None:
    with timer:
        clock.now_s += seconds


def test_nothing_timed_yet(clock: Clock) -> None:
    timer = TimerStat(clock=clock)
    assert (timer.mean, timer.mean_ms) == (None, None)
    assert (timer.count, timer.total_s, timer.mean_throughput) == (0, 0.0, None)


def test_mean_is_of_the_window_and_totals_of_all(clock: Clock) -> None:
    timer = TimerStat(n=2, clock=clock)
    for seconds in (10.0, 1.0, 3.0):
        run_for(timer, clock, seconds)
    assert timer.mean == 2.0
    assert timer.mean_ms == 2000.0
    assert timer.count == 3
    assert timer.total_s == 14.0


def test_default_window_is_ten(clock: Clock) -> None:
    timer = TimerStat(clock=clock)
    for seconds in [100.0] + [1.0] * 10:
        run_for(timer, clock, seconds)
    assert timer.mean == 1.0


def test_mean_of_a_window_not_yet_full(clock: Clock) -> None:
    timer = TimerStat(n=10, clock=clock)
    run_for(timer, clock, 1.0)
    run_for(timer, clock, 2.0)
    assert timer.mean == 1.5


def test_throughput_of_units_pushed_after(clock: Clock) -> None:
    timer = TimerStat(n=2, clock=clock)
    for seconds, units in ((1.0, 1000), (2.0, 10), (3.0, 20)):
        run_for(timer, clock, seconds)
        timer.push_units_processed(units)
    assert timer.mean_throughput == 6.0


def test_throughput_of_units_pushed_inside(clock: Clock) -> None:
    timer = TimerStat(n=1, clock=clock)
    for units in (1000, 30):
        with timer:
            clock.now_s += 2.0
            timer.push_units_processed(units)
    assert timer.mean_throughput == 15.0


def test_units_before_the_first_timing_wait_for_it(clock: Clock) -> None:
    timer = TimerStat(clock=clock)
    timer.push_units_processed(8)
    assert timer.mean_throughput is None
    run_for(timer, clock, 2.0)
    assert timer.mean_throughput == 4.0


def test_several_units_for_one_timing_add_up(clock: Clock) -> None:
    timer = TimerStat(clock=clock)
    run_for(timer, clock, 2.0)
    timer.push_units_processed(3)
    timer.push_units_processed(5)
    assert timer.mean_throughput == 4.0


def test_time_without_work_lowers_the_throughput(clock: Clock) -> None:
    timer = TimerStat(clock=clock)
    run_for(timer, clock, 1.0)
    timer.push_units_processed(8)
    run_for(timer, clock, 3.0)
    assert timer.mean_throughput == 2.0


def test_no_measurable_time_has_no_throughput(clock: Clock) -> None:
    timer = TimerStat(clock=clock)
    run_for(timer, clock, 0.0)
    timer.push_units_processed(5)
    assert timer.mean == 0.0
    assert timer.mean_throughput is None


def test_time_measured_elsewhere() -> None:
    timer = TimerStat(n=2)
    timer.push(0.5)
    timer.push(1.5)
    assert (timer.mean, timer.count) == (1.0, 2)


def test_block_that_raises_was_timed_and_the_timer_lives(clock: Clock) -> None:
    timer = TimerStat(clock=clock)

    def wait_in_vain() -> None:
        with timer:
            clock.now_s += 4.0
            raise queue.Empty

    with pytest.raises(queue.Empty):
        wait_in_vain()
    run_for(timer, clock, 2.0)
    assert (timer.mean, timer.count) == (3.0, 2)


def test_one_block_at_a_time(clock: Clock) -> None:
    timer = TimerStat(clock=clock)
    with timer, pytest.raises(AssertionError), timer:
        pass


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_impossible_time_is_a_bug(seconds: float) -> None:
    timer = TimerStat()
    with pytest.raises(AssertionError):
        timer.push(seconds)
    assert timer.count == 0


def test_readings_are_plain_json() -> None:
    timer = TimerStat()
    timer.push(np.float32(0.25))  # type: ignore[arg-type]
    timer.push_units_processed(np.int64(5))  # type: ignore[arg-type]
    readings = [timer.mean, timer.mean_ms, timer.total_s, timer.mean_throughput]
    assert json.loads(json.dumps(readings, allow_nan=False)) == [0.25, 250.0, 0.25, 20.0]
