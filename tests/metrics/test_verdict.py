"""The verdict on what limits a run follows from the measured waits."""

import pytest

from impala_async.metrics.names import Value
from impala_async.metrics.verdict import (
    ADVICE,
    BATCH_WAIT_MS,
    COPY_WAIT_MS,
    UPDATE_MS,
    RunTimes,
    judge,
)

Report = dict[str, Value]
ENV, ACT, SEND, WEIGHTS = (
    f"actor/{name}" for name in ("env_time_ms", "act_time_ms", "send_wait_ms", "weights_wait_ms")
)
STARVED = "learner/starved_since_s"
HALF: Report = {UPDATE_MS: 50.0, BATCH_WAIT_MS: 50.0}
FED: Report = {UPDATE_MS: 90.0, BATCH_WAIT_MS: 10.0}
WAITS = "the learner waits 50 % of its time for batches"
SPENDS = f"{WAITS}, an actor spends {{}} % of its time"
UNTOLD = "no actor has said yet what takes its time"
NO_BATCH = "the learner has had no batch for 37 s"
OLD: Report = FED | {"time_s": 40.0, STARVED: 3.0}
REFUSED: Report = {"trajectories/received": 10, "trajectories/rejected": 9}
LOCKSTEP: Report = OLD | {"num_actors": 2, "lockstep/num_done": 0, "lockstep/waits_for": "actor 0"}
AT_WORK: Report = {ENV: 9.0, ACT: 1.0}
HANG = "environment 3 of actor 2 has been in step for 12 s"

# A report, and the whole verdict, or how it begins.
CASES: list[tuple[Report, str]] = [
    # Before measurements, or when no time has passed.
    *(
        (timers, "unknown: no update has been measured yet")
        for timers in (
            {},
            {UPDATE_MS: None, BATCH_WAIT_MS: None},
            {UPDATE_MS: 5},
            {BATCH_WAIT_MS: 5},
        )
    ),
    ({UPDATE_MS: 0.0, BATCH_WAIT_MS: 0.0}, "unknown: …"),
    # A fifth of waiting is still the learner.
    ({UPDATE_MS: 80.0, BATCH_WAIT_MS: 20.0}, "learner: updates take 80 % of its time"),
    ({UPDATE_MS: 79.0, BATCH_WAIT_MS: 21.0}, "waiting: …"),
    ({UPDATE_MS: 40.0, BATCH_WAIT_MS: 10.0, COPY_WAIT_MS: 50.0}, f"copy: {WAITS} to be copied"),
    # The longest stage of the actors is named, if they have told.
    (
        HALF | {ENV: 70.0, ACT: 20.0, SEND: 10.0},
        f"environment: {SPENDS.format(70)} in environment…",
    ),
    (HALF | {ENV: 20.0, ACT: 70.0, SEND: 10.0}, f"inference: {SPENDS.format(70)} in the policy"),
    (HALF | {ENV: 10.0, ACT: 20.0, SEND: 70.0}, f"network: {SPENDS.format(70)} waiting to send"),
    (HALF | {ENV: 30.0, ACT: None, SEND: None}, f"environment: {SPENDS.format(100)} in env…"),
    *(
        (HALF | told, f"waiting: {WAITS}, {UNTOLD}")
        for told in ({}, {ENV: None, ACT: None}, {ENV: 0.0, ACT: 0.0}, {"num_actors": 1})
    ),
    # Waiting for weights is part of the whole, but no verdict.
    (HALF | {WEIGHTS: 90.0}, "waiting: …"),
    (HALF | {WEIGHTS: 90.0, ENV: 10.0}, f"environment: {SPENDS.format(10)} in environment…"),
    # Waiting to send is the network's, unless the loop is late.
    (HALF | {SEND: 9.0, "loop/lag_ms_mean": 0.3}, "network: …"),
    (
        HALF | {SEND: 9.0, "loop/lag_ms_mean": 12.4},
        f"ingest: {SPENDS.format(100)} waiting to send, and the event loop is 12 ms late",
    ),
    # Without actors nothing else limits.
    (FED | {"num_actors": 1}, "learner: …"),
    (
        FED | {"num_actors": 0},
        "actors: the learner has nobody to learn from, none is connected",
    ),
    (
        FED | {"num_actors": 0, "actor/last_death": "actor 2 died of EnvError: it broke"},
        "actors: the learner has nobody to learn from, none is connected; actor 2 died of…",
    ),
    (
        {"num_actors": 0, "actor/last_death": "of old", "learner/building": 1},
        "waiting: the learner builds what it trains, for an actor that has come",
    ),
    ({"num_actors": 0, "learner/building": 0}, "actors: …"),
    # Starvation outweighs old timers.
    (OLD | {STARVED: None}, "learner: …"),
    (OLD, f"waiting: {NO_BATCH}, {UNTOLD}"),
    (OLD | {"num_actors": 0}, f"actors: {NO_BATCH}, none is connected"),
    ({STARVED: 0.0}, f"waiting: the learner has had no batch, {UNTOLD}"),
    ({STARVED: 0.0, "num_actors": 0}, "actors: the learner has had no batch, none…"),
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
        found = str(judge(report))
        assert found.startswith(verdict[:-1]) if verdict.endswith("…") else found == verdict, report


@pytest.mark.parametrize("reason", ["unknown_session", "duplicate"])
def test_what_anybody_may_send_is_no_verdict(reason):
    report = HALF | {"trajectories/received": 40970, "trajectories/rejected": 40963}
    some: Report = {f"rejected/{reason}": 40960, "rejected/stale": 3}
    assert judge(report | some).stage == "waiting"
    worse: Report = {f"rejected/{reason}": 40950, "rejected/stale": 13}
    told = "rejections: 65 % of what arrived was refused, most as stale"
    assert str(judge(report | worse)) == told


def test_every_verdict_on_something_measured_comes_with_advice():
    for stage, advice in ADVICE.items():
        assert (advice is None) == (stage in ("unknown", "waiting"))
    for report, word in ((FED, "num_passes"), (OLD | {"actor/hang": HANG}, "step_timeout_s")):
        assert word in str(judge(report).advice)


def times_of(*reports, num_updates=0):
    times = RunTimes(num_updates)
    for updates, update_ms, wait_ms, others in reports:
        times.add({"updates": updates, UPDATE_MS: update_ms, BATCH_WAIT_MS: wait_ms, **others})
    return times


def test_a_whole_start_is_judged_by_all_its_reports_and_not_by_the_last():
    rows = (200, 90.0, 10.0, {}), (300, 90.0, 10.0, {}), (301, 1.0, 99.0, {})
    times = times_of(*rows, num_updates=100)
    last: Report = {"updates": 301, UPDATE_MS: 1.0, BATCH_WAIT_MS: 99.0, STARVED: 3.0}
    assert judge(last).stage == "waiting"
    whole = times.over(last)
    assert str(judge(whole)) == "learner: updates take 90 % of its time"
    assert whole[UPDATE_MS] == pytest.approx((200 * 90 + 1) / 201)


def test_what_was_measured_late_is_a_mean_of_its_own_updates():
    rows = (10, 5.0, 5.0, {ENV: None}), (10, 500.0, 5.0, {}), (20, 5.0, 5.0, {ENV: 7.0})
    whole = times_of(*rows).over({"updates": 20})
    assert (whole[UPDATE_MS], whole[ENV]) == (5.0, 7.0)
    assert judge(RunTimes().over({"updates": 0})).stage == "unknown"


def test_a_whole_start_had_the_actors_that_left_before_its_end():
    last: Report = FED | {"updates": 1, "num_actors": 0}
    for num_actors, stage in ((2, "learner"), (0, "actors")):
        times = times_of((1, 90.0, 10.0, {"num_actors": num_actors}))
        assert judge(times.over(last)).stage == stage
