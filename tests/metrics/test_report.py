"""Merging refuses what is our own bug, cleans what is not, and the verdict rests on numbers."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impala_async.metrics.names import REGISTRY
from impala_async.metrics.report import (
    ADVICE,
    BATCH_WAIT_MS,
    COPY_WAIT_MS,
    RANK_WAIT_MS,
    UPDATE_MS,
    Counters,
    RunTimes,
    advice_on,
    assemble,
    clean,
    format_mean_return,
    format_return,
    judge,
    merge,
)


def test_counts_by_reason_with_zeros_shown():
    rejected = Counters(["stale", "duplicate", "invalid"])
    before = dict(rejected)
    rejected.add("stale")
    rejected.add("duplicate", 3)
    rejected.add("duplicate", 0)
    counts = {"stale": 1, "duplicate": 3, "invalid": 0}
    assert rejected == counts
    assert before == dict.fromkeys(counts, 0)
    for bug in ({"name": "other"}, {"name": "stale", "k": -1}):
        with pytest.raises((KeyError, AssertionError)):
            rejected.add(**bug)
    assert rejected == counts
    # Another program may have had other counters.
    rejected.restore({"stale": 4, "removed": 9})
    rejected.add("stale")
    assert rejected == before | {"stale": 5}


def test_merge_keeps_everything_in_order_and_refuses_two_owners_and_an_undeclared_name():
    snapshot = {"updates": 7, "loss/total": math.nan}
    report = merge(snapshot, {"lag/quantiles": [1.0, math.inf]}, {"bottleneck": "learner"})
    assert list(report) == ["updates", "loss/total", "lag/quantiles", "bottleneck"]
    assert list(report.values()) == [7, None, [1.0, None], "learner"]
    assert math.isnan(snapshot["loss/total"])
    with pytest.raises(AssertionError, match=r"two owners.*\['updates'\]"):
        merge({"updates": 7, "time_s": 0}, {"updates": 7})
    with pytest.raises(AssertionError, match="loss/totl"):
        merge({"updates": 7}, {"loss/totl": 1.0})


def test_clean_values_are_strict_json():
    for value, cleaned in (
        *((None, None), ("learner", "learner"), (3, 3), (2**70, 2**70), (np.int64(4), 4)),
        *((math.nan, None), (-math.inf, None), (np.float32(math.inf), None)),
        *((np.float32(0.5), 0.5), (np.float64(0.5), 0.5), ((), [])),
        ([1, None, math.nan, np.float32(2.0)], [1, None, None, 2.0]),
    ):
        result = clean(value)
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


def test_three_digits():
    for value, text in (
        *((None, "-"), (0.0, "0.00"), (-0.0, "0.00"), (0.9, "0.900"), (0.9996, "1.00")),
        *((9.996, "10.0"), (-21.04, "-21.0"), (475.25, "475"), (12345.6, "12346")),
        *((-0.0004, "-0.000400"), (1.5e-7, "1.50e-07"), (1e9, "1000000000"), (1e15, "1.00e+15")),
        *((float("-inf"), "-inf"), (float("nan"), "nan")),
    ):
        assert format_return(value) == text


@given(st.floats(-1e30, 1e30), st.floats(-1e30, 1e30))
def test_what_is_shown_has_reached_the_goal_only_if_the_mean_has(value, goal):
    assert value >= goal or float(format_return(value, goal)) < goal


def test_a_goal_and_few_episodes_are_told():
    for below, aim, text in (
        (0.8996, 0.9, "0.8996"),
        (-100.04, -100, "-100.04"),
        (0.9, 0.9, "0.900"),
    ):
        assert format_return(below, aim) == text
    assert format_mean_return(21.3, 12) == "21.3 (12 episodes)"
    assert format_mean_return(21.3, 1, 475.0) == "21.3 / 475 (1 episode)"
    assert format_mean_return(21.3, 100, 475.0) == "21.3 / 475"
    assert format_mean_return(None, 0, 475.0) == "- / 475"


ENV, ACT, SEND, WEIGHTS = (
    f"actor/{name}" for name in ("env_time_ms", "act_time_ms", "send_wait_ms", "weights_wait_ms")
)
STARVED = "learner/starved_since_s"
HALF = {UPDATE_MS: 50.0, BATCH_WAIT_MS: 50.0}
FED = {UPDATE_MS: 90.0, BATCH_WAIT_MS: 10.0}
WAITS = "the learner waits 50 % of its time for batches"
SPENDS = f"{WAITS}, an actor spends {{}} % of its time"
UNTOLD = "no actor says what takes its time"
NOBODY = "the learner has nobody to learn from"
NO_BATCH = "the learner has had no batch for 37 s"
OLD = FED | {"time_s": 40.0, STARVED: 3.0}
REFUSED = {"trajectories/received": 10, "trajectories/rejected": 9}
LOCKSTEP = OLD | {"num_actors": 2, "lockstep/num_done": 0, "lockstep/waits_for": "actor 0"}
AT_WORK = {ENV: 9.0, ACT: 1.0}
HANG = "environment 3 of actor 2 has been in step for 12 s"

# A report, and the verdict, of which some words may be left out.
CASES = [
    # Before measurements, or when no time has passed.
    ({}, "unknown: no update has been measured yet"),
    ({BATCH_WAIT_MS: 5}, "unknown: no update…"),
    ({UPDATE_MS: 0.0, BATCH_WAIT_MS: 0.0}, "unknown: …"),
    # A fifth of waiting is still the learner.
    ({UPDATE_MS: 80.0, BATCH_WAIT_MS: 20.0}, "learner: updates take 80 % of its time"),
    ({UPDATE_MS: 79.0, BATCH_WAIT_MS: 21.0}, "waiting: …"),
    ({UPDATE_MS: 40.0, BATCH_WAIT_MS: 10.0, COPY_WAIT_MS: 50.0}, f"copy: {WAITS} to be copied"),
    (
        {UPDATE_MS: 40.0, BATCH_WAIT_MS: 10.0, RANK_WAIT_MS: 50.0},
        "ranks: the learner waits 50 % of its time for other ranks",
    ),
    # The longest stage of the actors is named, if they have told.
    (HALF | {ENV: 70.0, ACT: 20.0, SEND: 10.0}, f"environment: {SPENDS.format(70)} in envir…"),
    (HALF | {ENV: 20.0, ACT: 70.0, SEND: 10.0}, f"inference: {SPENDS.format(70)} in the policy"),
    (HALF | {ENV: 10.0, ACT: 20.0, SEND: 70.0}, f"network: {SPENDS.format(70)} waiting to send"),
    (HALF | {ENV: 30.0, ACT: None, SEND: None}, f"environment: {SPENDS.format(100)} in env…"),
    *(
        (HALF | told, f"waiting: {WAITS}, {UNTOLD}")
        for told in ({}, {ENV: None, ACT: None}, {ENV: 0.0, ACT: 0.0}, {"num_actors": 1})
    ),
    # Waiting for weights is the network's, but for what an update takes meanwhile.
    (HALF | {WEIGHTS: 90.0, ENV: 10.0}, f"network: {SPENDS.format(90)} waiting for weights"),
    (HALF | {WEIGHTS: 60.0, ENV: 40.0}, f"environment: {SPENDS.format(40)} in environment…"),
    # While ranks are waited for there are no weights either.
    (
        {UPDATE_MS: 20.0, BATCH_WAIT_MS: 41.0, RANK_WAIT_MS: 39.0, WEIGHTS: 59.0, ENV: 41.0},
        "environment: …",
    ),
    (OLD | {WEIGHTS: 98.0, ENV: 2.0}, f"network: {NO_BATCH}, an actor spends 98 % of its time …"),
    # Waiting to send is the network's, unless the loop is late.
    (HALF | {SEND: 9.0, "loop/lag_ms_mean": 0.3}, "network: …"),
    (
        HALF | {SEND: 9.0, "loop/lag_ms_mean": 12.4},
        f"ingest: {SPENDS.format(100)} waiting to send, and the event loop is 12 ms late",
    ),
    # Without actors nothing else limits.
    (FED | {"num_actors": 1}, "learner: …"),
    (FED | {"num_actors": 0}, f"actors: {NOBODY}, none is connected"),
    (FED | {"num_actors": 0, "actor/last_death": "it broke"}, f"actors: {NOBODY}, none…; it broke"),
    ({"num_actors": 0, "sessions/opened": 1}, "actors: …environments: its log says so"),
    ({"num_actors": 0, "actor/last_death": "it broke", "learner/building": 1}, "waiting: the …"),
    ({"num_actors": 0, "learner/building": 0}, "actors: …"),
    # Starvation outweighs old timers.
    (OLD | {STARVED: None}, "learner: …"),
    (OLD, f"waiting: {NO_BATCH}, {UNTOLD}"),
    (OLD | {"num_actors": 0}, f"actors: {NO_BATCH}, none is connected"),
    ({STARVED: 0.0, "time_s": 0}, f"waiting: the learner has had no batch for 0 s, {UNTOLD}"),
    ({STARVED: 0.0, "num_actors": 0}, "actors: the learner has had no batch for 0 s, none…"),
    (OLD | AT_WORK | {"num_actors": 1, "actor/hang": HANG}, f"hanging: {NO_BATCH}, {HANG}"),
    # In lockstep a straggler is named; where all are at work, what takes their time says more.
    (LOCKSTEP, f"straggler: {NO_BATCH}, it waits for actor 0"),
    (
        LOCKSTEP | AT_WORK,
        f"environment: {NO_BATCH}, it waits for actor 0, an actor spends 90 % of its time in env…",
    ),
    (LOCKSTEP | AT_WORK | {"lockstep/num_done": 1}, f"straggler: {NO_BATCH}, it waits for actor 0"),
    (LOCKSTEP | AT_WORK | HALF | {STARVED: None}, f"environment: {WAITS}, an…"),
    # Data that is refused comes before all else, but for a learner that has enough.
    (
        HALF | REFUSED | {"rejected/stale": 2, "rejected/nonfinite": 7},
        "rejections: 90 % of what arrived was refused, most as nonfinite",
    ),
    (HALF | REFUSED | {"trajectories/rejected": 5}, "waiting: …"),
    (FED | REFUSED, "learner: …"),
    (OLD | REFUSED, "rejections: …"),
    (REFUSED, "rejections: …"),
]


def test_the_verdict_is_what_the_numbers_say():
    for report, verdict in CASES:
        found, (begin, _, end) = judge(report), verdict.partition("…")
        assert found == verdict or ("…" in verdict and found.startswith(begin)), report
        assert found.endswith(end)


@pytest.mark.parametrize("reason", ["unknown_session", "duplicate"])
def test_what_anybody_may_send_is_no_verdict(reason):
    report = HALF | {"trajectories/received": 40970, "trajectories/rejected": 40963}
    some = {f"rejected/{reason}": 40960, "rejected/stale": 3}
    assert judge(report | some).startswith("waiting: ")
    worse = {f"rejected/{reason}": 40950, "rejected/stale": 13}
    told = "rejections: 65 % of what arrived was refused, most as stale"
    assert judge(report | worse) == told


def test_what_was_refused_before_is_no_verdict_and_what_is_refused_now_is_one():
    good = {"trajectories/received": 1000, "trajectories/rejected": 0}
    bad = {"trajectories/received": 2000, "trajectories/rejected": 1000, "rejected/stale": 1000}
    assert judge(OLD | bad).startswith("waiting: ")
    told = "rejections: 100 % of what arrived was refused, most as stale"
    assert judge(OLD | bad, OLD | good) == told
    assert judge(HALF | REFUSED | {"trajectories/received": 15}, REFUSED).startswith("waiting: ")
    assert judge(HALF | REFUSED, REFUSED).startswith("waiting: ")


def test_every_verdict_on_something_measured_comes_with_advice():
    stages = {verdict.partition(":")[0] for _, verdict in CASES}
    assert stages == ADVICE.keys() | {"unknown", "waiting"}
    for report, word in ((FED, "num_passes"), (OLD | {"actor/hang": HANG}, "step_timeout_s")):
        assert word in str(advice_on(judge(report)))
    assert advice_on(judge({})) is None


def times_of(*reports, num_updates=0):
    times = RunTimes(num_updates)
    for updates, update_ms, wait_ms, others in reports:
        times.add({"updates": updates, UPDATE_MS: update_ms, BATCH_WAIT_MS: wait_ms, **others})
    return times


def test_a_whole_start_is_judged_by_all_its_reports_and_not_by_the_last():
    rows = (200, 90.0, 10.0, {}), (300, 90.0, 10.0, {}), (301, 1.0, 99.0, {})
    times = times_of(*rows, num_updates=100)
    last = {"updates": 301, UPDATE_MS: 1.0, BATCH_WAIT_MS: 99.0, STARVED: 3.0, "actor/hang": HANG}
    assert judge(last).startswith("hanging: ")
    whole = times.over(last)
    assert judge(whole) == "learner: updates take 90 % of its time"
    bound = times_of((9, 10.0, 90.0, AT_WORK)).over(last)
    assert judge(bound).startswith("environment: ")
    assert whole[UPDATE_MS] == pytest.approx((200 * 90 + 1) / 201)


def test_a_start_that_mostly_waited_at_its_end_is_judged_by_that():
    end = {"updates": 9, "time_s": 150.0, "learner/wall_s": 44.0, "num_actors": 0}
    for since, verdict in (
        (110.0, "actors: the learner has had no batch for 40 s, none is connected"),
        (130.0, "learner: updates take 90 % of its time"),
    ):
        times = times_of((9, 90.0, 10.0, {"num_actors": 2}))
        assert judge(times.over(end | {STARVED: since})) == verdict


def test_what_was_measured_late_is_a_mean_of_its_own_updates():
    rows = (10, 5.0, 5.0, {ENV: None}), (10, 500.0, 5.0, {}), (20, 5.0, 5.0, {ENV: 7.0})
    whole = times_of(*rows).over({"updates": 20})
    assert (whole[UPDATE_MS], whole[ENV]) == (5.0, 7.0)
    assert judge(RunTimes().over({"updates": 0})).startswith("unknown: ")


def test_a_whole_start_had_the_actors_that_left_before_its_end():
    last = FED | {"updates": 1, "num_actors": 0}
    for num_actors, stage in ((2, "learner"), (0, "actors")):
        times = times_of((1, 90.0, 10.0, {"num_actors": num_actors}))
        assert judge(times.over(last)).startswith(stage)
