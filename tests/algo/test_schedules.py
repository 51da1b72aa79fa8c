import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impala_async.algo.schedules import linear

VALUES = st.floats(-1e6, 1e6)


def test_goes_in_a_straight_line_and_stays():
    falling = linear(8.0, 4.0, 100)
    assert [falling(steps) for steps in (0, 25, 50, 100, 101, 10**12)] == [8, 7, 6, 4, 4, 4]
    assert [linear(0.0, 1.0, 4)(steps) for steps in range(6)] == [0, 0.25, 0.5, 0.75, 1, 1]
    for horizon in (None, 0, 10):
        assert [linear(3e-4, None, horizon)(steps) for steps in (0, 5, 10**9)] == [3e-4] * 3


@given(start=VALUES, end=VALUES, horizon=st.integers(1, 10**12), data=st.data())
def test_ends_are_exact_and_nothing_overshoots(start, end, horizon, data):
    schedule = linear(start, end, horizon)
    assert schedule(0) == start
    assert schedule(horizon) == schedule(horizon + 1) == end
    early, late = sorted(data.draw(st.tuples(*[st.integers(0, horizon)] * 2)))
    slack = 1e-9 * (abs(start) + abs(end))
    assert abs(end - schedule(late)) <= abs(end - schedule(early)) + slack
    assert min(start, end) - slack <= schedule(early) <= max(start, end) + slack


@pytest.mark.parametrize("horizon", [None, 0, -5, math.nan])
def test_a_horizon_is_needed(horizon):
    with pytest.raises(ValueError, match="horizon"):
        linear(1.0, 0.0, horizon)
