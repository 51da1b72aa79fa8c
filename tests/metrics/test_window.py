"""WindowStat against numpy on whatever was pushed, and against strict JSON."""

import json
import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.metrics.window import WindowStat

any_double = st.floats(allow_nan=True, allow_infinity=True)
NOTHING = {"q_mean": None, "q_std": None, "q_quantiles": []}


def test_known_numbers():
    window = WindowStat("q")
    assert window.max is None
    assert window.stats() == {"q_count": 0, **NOTHING}
    for x in (1, np.float32(2), np.int64(3), 4):
        window.push(x)
    assert window.stats() == {
        "q_count": 4,
        "q_mean": 2.5,
        "q_std": pytest.approx(math.sqrt(1.25)),
        "q_quantiles": pytest.approx([1.0, 1.3, 2.5, 3.7, 4.0]),
    }
    assert {type(x) for x in (window.mean, window.max, *window.quantiles)} == {float}
    for bad in (None, [1.0]):
        with pytest.raises(TypeError):
            window.push(bad)
    assert window.count == 4


def test_default_window_is_fifty_and_count_is_lifetime():
    window = WindowStat("q")
    window.push_many(np.arange(120).reshape(2, 60))
    assert (window.count, window.quantiles[0], window.max) == (120, 70.0, 119.0)
    assert window.mean == pytest.approx(np.arange(70, 120).mean())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_takes_a_place_but_no_part(bad):
    window = WindowStat("q", n=3)
    window.push_many([5.0, 1.0, bad, 3.0])
    quantiles = pytest.approx([1.0, 1.2, 2.0, 2.8, 3.0])
    assert window.stats() == {"q_count": 4, "q_mean": 2.0, "q_std": 1.0, "q_quantiles": quantiles}
    window.push_many([bad, bad, bad])
    assert window.stats() == {"q_count": 7, **NOTHING}


@settings(max_examples=50)
@given(st.lists(st.lists(any_double, max_size=9), max_size=9), st.integers(1, 12))
def test_agrees_with_numpy_and_stays_json(batches, n):
    window, at_once = WindowStat("q", n=n), WindowStat("q", n=n)
    values = [x for batch in batches for x in batch]
    for batch in batches:
        at_once.push_many(np.array(batch))
    for x in values:
        window.push(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stats = window.stats()
    assert json.loads(json.dumps(stats, allow_nan=False)) == stats == at_once.stats()
    assert stats["q_count"] == len(values)
    held = np.array([x for x in values[-n:] if math.isfinite(x)])
    if not held.size or np.abs(held).max() > 1e150:
        return
    assert (stats["q_mean"], stats["q_std"], window.max) == (held.mean(), held.std(), held.max())
    assert stats["q_quantiles"] == np.percentile(held, [0, 10, 50, 90, 100]).tolist()


NO_DESCRIPTOR = """
import os, resource
from impala_async.metrics.window import WindowStat
window = WindowStat("x")
window.push_many([1.0, 3.0])
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
assert window.quantiles[2] == 2.0
os._exit(0)
"""


def test_quantiles_need_no_descriptor():
    """Numpy imports what they need as they are first computed, when none may be left."""
    assert subprocess.run([sys.executable, "-c", NO_DESCRIPTOR]).returncode == 0
