"""Merging refuses what is our own bug, cleans what is not, and the verdict rests on numbers."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impala_async.metrics.names import REGISTRY
from impala_async.metrics.report import (
    Counters,
    assemble,
    clean,
    format_mean_return,
    format_return,
    merge,
)
from impala_async.metrics.verdict import ADVICE
from impala_async.metrics.window import WindowStat


def test_counts_by_reason_with_zeros_shown():
    rejected = Counters(["stale", "duplicate", "invalid"], prefix="rejected/")
    before = rejected.snapshot()
    rejected.add("stale")
    rejected.add("duplicate", 3)
    rejected.add("duplicate", 0)
    counts = {"rejected/stale": 1, "rejected/duplicate": 3, "rejected/invalid": 0}
    assert rejected.snapshot() == counts
    assert (rejected["duplicate"], rejected.total) == (3, 4)
    assert before == dict.fromkeys(counts, 0), "a snapshot is frozen"
    for bug in ({"name": "other"}, {"name": "stale", "k": -1}):
        with pytest.raises((KeyError, AssertionError)):
            rejected.add(**bug)
    with pytest.raises(KeyError):
        rejected["other"]
    assert rejected.snapshot() == counts


def test_restore_goes_on_with_the_numbers_of_whatever_program():
    counters = Counters(["kept", "added"], prefix="x/")
    counters.add("added", 2)
    counters.restore({"x/kept": 4, "x/removed": 9})
    counters.add("kept")
    assert counters.snapshot() == {"x/kept": 5, "x/added": 0}


def test_merge_keeps_everything_in_order_and_leaves_snapshots_alone():
    queue_window = WindowStat("learner_queue/size")
    queue_window.push(1)
    snapshot: dict[str, object] = {"updates": 7, "loss/total": math.nan}
    report = merge(snapshot, queue_window.stats(), {"bottleneck": "learner"})
    assert list(report)[:3] == ["updates", "loss/total", "learner_queue/size_count"]
    assert report["learner_queue/size_quantiles"] == [1.0] * 5
    assert report["loss/total"] is None
    assert len(report) == 7
    assert math.isnan(snapshot["loss/total"])


def test_two_owners_of_a_name_and_an_undeclared_one_are_bugs():
    with pytest.raises(AssertionError, match=r"two owners.*\['updates'\]"):
        merge({"updates": 7, "time_s": 0}, {"updates": 7})
    with pytest.raises(AssertionError, match="loss/totl"):
        merge({"updates": 7}, {"loss/totl": 1.0})


CLEANED = [
    (None, None),
    ("learner", "learner"),
    (3, 3),
    (2**70, 2**70),
    (math.nan, None),
    (-math.inf, None),
    (np.float32(0.5), 0.5),
    (np.float64(0.5), 0.5),
    (np.float32(math.inf), None),
    (np.int64(4), 4),
    ([1, None, math.nan, np.float32(2.0)], [1, None, None, 2.0]),
    ((), []),
]


def test_clean_values_are_strict_json():
    for value, cleaned in CLEANED:
        result = clean(value)
        assert result == cleaned
        assert type(result) is type(cleaned)
        assert json.loads(json.dumps(result, allow_nan=False)) == cleaned
    for bug in ({"a": 1}, object(), b"x", 1j, [[1.0]], ["x"], {1}):
        with pytest.raises(AssertionError, match="cannot hold"):
            clean(bug)


def test_a_report_holds_every_declared_name_and_the_verdict():
    timers = {"grad": 97.0, "dequeue": 3.0}
    named = {f"timing_breakdown/learner_{name}_time_ms": ms for name, ms in timers.items()}
    report = assemble({"updates": 3}, named)
    assert report["bottleneck"] == "learner: updates take 97 % of its time"
    assert report["advice"] == ADVICE["learner"]
    assert (report["updates"], report["lag/mean"]) == (3, None)
    assert report.keys() == REGISTRY.keys()


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
        (1e9, "1000000000"),
        (1e15, "1.00e+15"),
        (float("-inf"), "-inf"),
        (float("nan"), "nan"),
    ],
)
def test_three_digits(value, text):
    assert format_return(value) == text


@given(st.floats(-1e30, 1e30), st.floats(-1e30, 1e30))
def test_what_is_shown_has_reached_the_goal_only_if_the_mean_has(value, goal):
    assert value >= goal or float(format_return(value, goal)) < goal
    for below, aim, text in ((0.8996, 0.9, "0.8996"), (-100.04, -100, "-100.04")):
        assert format_return(below, aim) == text
    assert format_return(0.9, 0.9) == "0.900"


def test_few_episodes_are_told():
    assert format_mean_return(21.3, 12) == "21.3 (12 episodes)"
    assert format_mean_return(21.3, 1, 475.0) == "21.3 / 475 (1 episode)"
    assert format_mean_return(21.3, 100, 475.0) == "21.3 / 475"
    assert format_mean_return(None, 0, 475.0) == "- / 475"
