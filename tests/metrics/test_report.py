"""Merging refuses what is our own bug, cleans what is not, and the verdict rests on numbers."""

import json
import math

import numpy as np
import pytest

from impala_async.metrics.names import REGISTRY, Value
from impala_async.metrics.report import assemble, clean, merge
from impala_async.metrics.verdict import ADVICE
from impala_async.metrics.window import WindowStat

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
