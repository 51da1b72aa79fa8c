"""Merging refuses what is our own bug, cleans what is not, and the verdict rests on numbers."""

import json
import math

import numpy as np
import pytest

from impala_async.metrics.names import REGISTRY, Value
from impala_async.metrics.report import assemble, bottleneck, clean, merge
from impala_async.metrics.window import WindowStat

GRAD = "timing_breakdown/learner_grad_time_ms"
DEQUEUE = "timing_breakdown/learner_dequeue_time_ms"
LOAD_WAIT = "timing_breakdown/learner_load_wait_time_ms"


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
    assert report["updates"] == 3


def test_a_report_holds_every_declared_name() -> None:
    report = assemble({"updates": 3})
    assert report.keys() == REGISTRY.keys()
    assert report["lag/mean"] is None


@pytest.mark.parametrize("timers", [{}, {GRAD: None, DEQUEUE: None}, {GRAD: 5.0}, {DEQUEUE: 5.0}])
def test_no_verdict_before_measurements(timers: dict[str, Value]) -> None:
    assert bottleneck(timers) == "unknown: no update has been measured yet"


def test_no_verdict_from_no_time() -> None:
    assert bottleneck({GRAD: 0.0, DEQUEUE: 0.0}).startswith("unknown:")


def test_a_fifth_of_waiting_is_still_the_learner() -> None:
    assert bottleneck({GRAD: 80.0, DEQUEUE: 20.0}) == "learner: updates take 80 % of its time"
    assert not bottleneck({GRAD: 79.0, DEQUEUE: 21.0}).startswith("learner")


def test_actors_without_timers_are_blamed_together() -> None:
    verdict = "actors: the learner waits 62 % of its time for batches"
    assert bottleneck({GRAD: 38.0, DEQUEUE: 62.0}) == verdict
    nothing_told: dict[str, Value] = {"actor/env_time_ms": None, "actor/act_time_ms": None}
    assert bottleneck({GRAD: 38.0, DEQUEUE: 62.0, **nothing_told}) == verdict
    all_zero: dict[str, Value] = {"actor/env_time_ms": 0.0, "actor/act_time_ms": 0.0}
    assert bottleneck({GRAD: 38.0, DEQUEUE: 62.0, **all_zero}) == verdict


@pytest.mark.parametrize(
    ("env_ms", "act_ms", "send_ms", "verdict"),
    [
        (
            70.0,
            20.0,
            10.0,
            "environment: {}, an actor spends 70 % of its time in environment steps",
        ),
        (20.0, 70.0, 10.0, "inference: {}, an actor spends 70 % of its time in the policy"),
        (10.0, 20.0, 70.0, "network/ingest: {}, an actor spends 70 % of its time waiting to send"),
        (
            30.0,
            None,
            None,
            "environment: {}, an actor spends 100 % of its time in environment steps",
        ),
    ],
)
def test_longest_stage_of_the_actors_is_named(
    env_ms: float, act_ms: float | None, send_ms: float | None, verdict: str
) -> None:
    report: dict[str, Value] = {GRAD: 50.0, DEQUEUE: 50.0, "actor/env_time_ms": env_ms}
    report |= {"actor/act_time_ms": act_ms, "actor/send_wait_ms": send_ms}
    assert bottleneck(report) == verdict.format("the learner waits 50 % of its time for batches")


def test_data_that_is_refused_comes_before_every_other_verdict() -> None:
    report: dict[str, Value] = {GRAD: 50.0, DEQUEUE: 50.0, "trajectories/received": 10}
    report |= {"rejected/stale": 2, "rejected/nonfinite": 7}
    verdict = "rejections: 90 % of what arrived was refused, most as nonfinite"
    assert bottleneck({**report, "trajectories/rejected": 9}) == verdict
    assert "rejections" not in bottleneck({**report, "trajectories/rejected": 5})


def test_waiting_for_weights_is_part_of_the_whole_but_no_verdict() -> None:
    report: dict[str, Value] = {GRAD: 50.0, DEQUEUE: 50.0, "actor/weights_wait_ms": 90.0}
    assert "actors: " in bottleneck(report)
    report["actor/env_time_ms"] = 10.0
    assert bottleneck(report).startswith("environment:")
    assert "10 % of its time in environment steps" in bottleneck(report)


def test_waiting_for_copies() -> None:
    report: dict[str, Value] = {GRAD: 40.0, DEQUEUE: 10.0, LOAD_WAIT: 50.0}
    verdict = "network/ingest: the learner waits 50 % of its time for copies to its device"
    assert bottleneck(report) == verdict


def test_starvation_outweighs_old_timers() -> None:
    timers: dict[str, Value] = {GRAD: 97.0, DEQUEUE: 3.0, "time_s": 40.0}
    assert bottleneck(timers | {"learner/starved_since_s": None}).startswith("learner")
    starved = timers | {"learner/starved_since_s": 3.0}
    assert bottleneck(starved) == "actors: the learner has had no batch for 37 s"
    empty = "actors: the learner has had no batch for 37 s, none is connected"
    assert bottleneck(starved | {"num_actors": 0}) == empty


def test_starvation_before_the_first_update() -> None:
    assert bottleneck({"learner/starved_since_s": 0.0}).startswith("actors: the learner has had no")
