"""WindowStat against numpy on whatever was pushed, and against strict JSON."""

import json
import math
import warnings
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.metrics.window import WindowStat

any_double = st.floats(allow_nan=True, allow_infinity=True)


def test_empty_window_says_so() -> None:
    assert WindowStat("lag").stats() == {
        "lag_count": 0,
        "lag_mean": None,
        "lag_std": None,
        "lag_quantiles": [],
    }
    assert WindowStat("lag").max is None


def test_known_numbers() -> None:
    window = WindowStat("q")
    for x in (1, 2, 3, 4):
        window.push(x)
    assert window.stats() == {
        "q_count": 4,
        "q_mean": 2.5,
        "q_std": pytest.approx(math.sqrt(1.25)),
        "q_quantiles": pytest.approx([1.0, 1.3, 2.5, 3.7, 4.0]),
    }


def test_default_window_is_fifty_and_count_is_lifetime() -> None:
    window = WindowStat("q")
    for x in range(120):
        window.push(x)
    stats = window.stats()
    assert stats["q_count"] == 120
    assert stats["q_mean"] == pytest.approx(np.arange(70, 120).mean())
    assert window.quantiles[0] == 70.0
    assert window.max == 119.0


def test_nan_takes_a_place_but_no_part() -> None:
    window = WindowStat("q", n=3)
    for x in (5.0, 1.0, math.nan, 3.0):
        window.push(x)
    assert window.stats() == {
        "q_count": 4,
        "q_mean": 2.0,
        "q_std": 1.0,
        "q_quantiles": pytest.approx([1.0, 1.2, 2.0, 2.8, 3.0]),
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_window_of_nothing_finite_has_only_a_count(bad: float) -> None:
    window = WindowStat("q", n=2)
    for x in (1.0, bad, bad):
        window.push(x)
    assert window.stats() == {"q_count": 3, "q_mean": None, "q_std": None, "q_quantiles": []}
    assert window.max is None


def test_infinity_hides_no_other_value() -> None:
    window = WindowStat("q")
    window.push_many([1.0, math.inf, 3.0, -math.inf])
    assert (window.mean, window.max, window.count) == (2.0, 3.0, 4)


@settings(deadline=None)
@given(st.lists(any_double, max_size=40), st.integers(1, 12))
def test_agrees_with_numpy_and_stays_json(values: list[float], n: int) -> None:
    window = WindowStat("q", n=n)
    for x in values:
        window.push(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stats = window.stats()
    assert json.loads(json.dumps(stats, allow_nan=False)) == stats
    assert stats["q_count"] == len(values)
    held = np.array([x for x in values[-n:] if math.isfinite(x)])
    if not held.size or np.abs(held).max() > 1e150:
        return
    assert stats["q_mean"] == held.mean()
    assert stats["q_std"] == held.std()
    assert stats["q_quantiles"] == np.percentile(held, [0, 10, 50, 90, 100]).tolist()
    assert window.max == held.max()


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=9), max_size=9), st.integers(1, 7))
def test_push_many_is_many_pushes(batches: list[list[float]], n: int) -> None:
    at_once, one_by_one = WindowStat("q", n=n), WindowStat("q", n=n)
    kept: deque[float] = deque(maxlen=n)
    for batch in batches:
        at_once.push_many(np.array(batch))
        kept.extend(batch)
        for x in batch:
            one_by_one.push(x)
    assert at_once.stats() == one_by_one.stats()
    assert at_once.quantiles[:1] == ([min(kept)] if kept else [])


def test_push_many_flattens_and_takes_integers() -> None:
    window = WindowStat("lag", n=50)
    window.push_many(np.array([[1, 2], [3, 4]], dtype=np.int64))
    window.push_many(np.array(7))
    window.push_many([])
    assert (window.count, window.mean) == (5, 3.4)


def test_numpy_scalars_become_plain_floats() -> None:
    window = WindowStat("q")
    window.push(np.float32(0.5))  # type: ignore[arg-type]
    window.push(np.int64(2))  # type: ignore[arg-type]
    assert {type(x) for x in (window.mean, window.max, *window.quantiles)} == {float}


@pytest.mark.parametrize("bad", [None, [1.0]])
def test_what_is_no_number_is_refused_and_not_counted(bad: object) -> None:
    window = WindowStat("q")
    with pytest.raises(TypeError):
        window.push(bad)  # type: ignore[arg-type]
    assert window.count == 0


def test_window_without_places_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        WindowStat("q", n=0)
