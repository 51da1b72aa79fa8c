"""Merging refuses what is our own bug, cleans what is not, and the verdict rests on numbers."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impala_async.metrics.names import REGISTRY, Value
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


def test_counts_by_reason_with_zeros_shown() -> None:
    rejected = Counters(["stale", "duplicate", "invalid"], prefix="rejected/")
    rejected.add("stale")
    rejected.add("duplicate", 3)
    rejected.add("duplicate", 0)
    assert rejected.snapshot() == {
        "rejected/stale": 1,
        "rejected/duplicate": 3,
        "rejected/invalid": 0,
    }
    assert rejected["duplicate"] == 3
    assert rejected.total == 4


def test_snapshot_is_frozen() -> None:
    counters = Counters(["a"])
    before = counters.snapshot()
    counters.add("a")
    assert before == {"a": 0}
    before["a"] = 7
    assert counters["a"] == 1


def test_restore_goes_on_with_the_same_numbers() -> None:
    old = Counters(["a", "b"], prefix="x/")
    old.add("a", 5)
    new = Counters(["a", "b"], prefix="x/")
    new.add("b", 2)
    new.restore(old.snapshot())
    new.add("a")
    assert new.snapshot() == {"x/a": 6, "x/b": 0}


def test_restore_from_another_version() -> None:
    counters = Counters(["kept", "added"])
    counters.restore({"kept": 4, "removed": 9})
    assert counters.snapshot() == {"kept": 4, "added": 0}


def test_unknown_name_is_a_bug() -> None:
    counters = Counters(["a"])
    with pytest.raises(KeyError):
        counters.add("b")
    with pytest.raises(KeyError):
        counters["b"]
    assert counters.snapshot() == {"a": 0}


def test_falling_is_a_bug() -> None:
    counters = Counters(["a"])
    with pytest.raises(AssertionError):
        counters.add("a", -1)
    assert counters["a"] == 0


GRAD = "timing_breakdown/learner_grad_time_ms"
DEQUEUE = "timing_breakdown/learner_dequeue_time_ms"


def test_merge_keeps_everything_in_order() -> None:
    queue_window = WindowStat("learner_queue/size")
    queue_window.push(1)
    report = merge({"updates": 7, "time_s": 1.5}, queue_window.stats(), {"bottleneck": "learner"})
    assert list(report)[:3] == ["updates", "time_s", "learner_queue/size_count"]
    assert report["learner_queue/size_quantiles"] == [1.0] * 5
    assert len(report) == 7


def test_two_owners_of_one_name_are_a_bug() -> None:
    with pytest.raises(AssertionError, match=r"two owners.*\['updates'\]"):
        merge({"updates": 7, "time_s": 0}, {"updates": 7})


def test_undeclared_name_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="loss/totl"):
        merge({"updates": 7}, {"loss/totl": 1.0})


def test_snapshots_are_left_alone() -> None:
    snapshot: dict[str, object] = {"loss/total": math.nan}
    merge(snapshot)
    assert math.isnan(snapshot["loss/total"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "cleaned"),
    [
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
        ([1, math.nan, np.float32(2.0)], [1, None, 2.0]),
        ((), []),
    ],
)
def test_clean_values_are_strict_json(value: object, cleaned: Value) -> None:
    result = clean(value)
    assert result == cleaned
    assert type(result) is type(cleaned)
    assert json.loads(json.dumps(result, allow_nan=False)) == cleaned


@pytest.mark.parametrize("value", [{"a": 1}, object(), b"x", 1j, [[1.0]], ["x"], {1}])
def test_what_a_report_cannot_hold_is_a_bug(value: object) -> None:
    with pytest.raises(AssertionError, match="cannot hold"):
        clean(value)


def test_assemble_adds_the_verdict() -> None:
    report = assemble({"updates": 3}, {GRAD: 97.0, DEQUEUE: 3.0})
    assert report["bottleneck"] == "learner: updates take 97 % of its time"
    assert report["advice"] == ADVICE["learner"]
    assert report["updates"] == 3


def test_a_report_holds_every_declared_name() -> None:
    report = assemble({"updates": 3})
    assert report.keys() == REGISTRY.keys()
    assert report["lag/mean"] is None


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
