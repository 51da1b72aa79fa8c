"""Returns for people: three digits everywhere, a number of episodes, and no goal by rounding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impala_async.metrics.returns import format_mean_return, format_return


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0.00"),
        (-0.0, "0.00"),
        (0.9, "0.900"),
        (0.9996, "1.00"),
        (9.996, "10.0"),
        (-21.04, "-21.0"),
        (475.25, "475"),
        (12345.6, "12346"),
        (-0.0004, "-0.000400"),
        (1.5e-7, "1.50e-07"),
        (1e15, "1.00e+15"),
        (float("-inf"), "-inf"),
        (float("nan"), "nan"),
    ],
)
def test_three_digits(value: float | None, text: str) -> None:
    assert format_return(value) == text


@pytest.mark.parametrize(
    ("value", "goal", "text"),
    [
        (0.8996, 0.9, "0.8996"),
        (474.96, 475, "474.96"),
        (-100.04, -100, "-100.04"),
        (0.91, 0.9, "0.910"),
        (0.9, 0.9, "0.900"),
        (0.1, 475, "0.100"),
    ],
)
def test_a_mean_below_the_goal_does_not_look_like_it(value: float, goal: float, text: str) -> None:
    assert format_return(value, goal) == text


@given(st.floats(-1e30, 1e30), st.floats(-1e30, 1e30))
def test_what_is_shown_has_reached_the_goal_only_if_the_mean_has(value: float, goal: float) -> None:
    assert value >= goal or float(format_return(value, goal)) < goal


def test_few_episodes_are_told() -> None:
    assert format_mean_return(21.3, 12) == "21.3 (12 episodes)"
    assert format_mean_return(21.3, 1, 475.0) == "21.3 / 475 (1 episode)"
    assert format_mean_return(21.3, 100, 475.0) == "21.3 / 475"
    assert format_mean_return(None, 0, 475.0) == "- / 475"
