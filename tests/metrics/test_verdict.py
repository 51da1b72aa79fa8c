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


def verdict_of(report: dict[str, Value]) -> str:
    return str(judge(report))


@pytest.mark.parametrize(
    "timers", [{}, {UPDATE_MS: None, BATCH_WAIT_MS: None}, {UPDATE_MS: 5.0}, {BATCH_WAIT_MS: 5.0}]
)
def test_no_verdict_before_measurements(timers: dict[str, Value]) -> None:
    assert verdict_of(timers) == "unknown: no update has been measured yet"


def test_no_verdict_from_no_time() -> None:
    assert verdict_of({UPDATE_MS: 0.0, BATCH_WAIT_MS: 0.0}).startswith("unknown:")


def test_a_fifth_of_waiting_is_still_the_learner() -> None:
    assert (
        verdict_of({UPDATE_MS: 80.0, BATCH_WAIT_MS: 20.0})
        == "learner: updates take 80 % of its time"
    )
    assert not verdict_of({UPDATE_MS: 79.0, BATCH_WAIT_MS: 21.0}).startswith("learner")


def test_actors_that_have_told_nothing_yet_are_no_reason_to_start_some() -> None:
    verdict = (
        "waiting: the learner waits 62 % of its time for batches, no actor has said yet what takes "
        "its time"
    )
    assert verdict_of({UPDATE_MS: 38.0, BATCH_WAIT_MS: 62.0}) == verdict
    nothing_told: dict[str, Value] = {"actor/env_time_ms": None, "actor/act_time_ms": None}
    assert verdict_of({UPDATE_MS: 38.0, BATCH_WAIT_MS: 62.0, **nothing_told}) == verdict
    all_zero: dict[str, Value] = {"actor/env_time_ms": 0.0, "actor/act_time_ms": 0.0}
    assert verdict_of({UPDATE_MS: 38.0, BATCH_WAIT_MS: 62.0, **all_zero}) == verdict
    report: dict[str, Value] = {UPDATE_MS: 38.0, BATCH_WAIT_MS: 62.0}
    assert verdict_of({**report, "num_actors": 1}) == verdict
    assert judge({**report, "num_actors": 1}).advice is None
    lonely = judge({**report, "num_actors": 0})
    assert str(lonely).startswith("actors: ")
    assert lonely.advice == ADVICE["actors"]


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
        (10.0, 20.0, 70.0, "network: {}, an actor spends 70 % of its time waiting to send"),
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
    report: dict[str, Value] = {UPDATE_MS: 50.0, BATCH_WAIT_MS: 50.0, "actor/env_time_ms": env_ms}
    report |= {"actor/act_time_ms": act_ms, "actor/send_wait_ms": send_ms}
    assert verdict_of(report) == verdict.format("the learner waits 50 % of its time for batches")


def test_data_that_is_refused_comes_before_every_other_verdict() -> None:
    report: dict[str, Value] = {UPDATE_MS: 50.0, BATCH_WAIT_MS: 50.0, "trajectories/received": 10}
    report |= {"rejected/stale": 2, "rejected/nonfinite": 7}
    verdict = "rejections: 90 % of what arrived was refused, most as nonfinite"
    assert verdict_of({**report, "trajectories/rejected": 9}) == verdict
    assert "rejections" not in verdict_of({**report, "trajectories/rejected": 5})


@pytest.mark.parametrize("reason", ["unknown_session", "duplicate"])
def test_what_anybody_may_send_is_no_verdict(reason: str) -> None:
    report: dict[str, Value] = {UPDATE_MS: 50.0, BATCH_WAIT_MS: 50.0, "rejected/stale": 3}
    report |= {"trajectories/received": 40970, "trajectories/rejected": 40963}
    assert verdict_of(report | {f"rejected/{reason}": 40960}).startswith("waiting:")
    worse = report | {f"rejected/{reason}": 40950, "rejected/stale": 13}
    assert verdict_of(worse).endswith("65 % of what arrived was refused, most as stale")


def test_what_is_refused_beside_enough_limits_nothing() -> None:
    report: dict[str, Value] = {"trajectories/received": 10, "trajectories/rejected": 9}
    fed: dict[str, Value] = {UPDATE_MS: 90.0, BATCH_WAIT_MS: 10.0}
    assert verdict_of(report | fed).startswith("learner:")
    assert verdict_of(report | fed | {"learner/starved_since_s": 1.0}).startswith("rejections:")
    assert verdict_of(report).startswith("rejections:")


def test_waiting_for_weights_is_part_of_the_whole_but_no_verdict() -> None:
    report: dict[str, Value] = {UPDATE_MS: 50.0, BATCH_WAIT_MS: 50.0, "actor/weights_wait_ms": 90.0}
    assert verdict_of(report).startswith("waiting:")
    report["actor/env_time_ms"] = 10.0
    assert verdict_of(report).startswith("environment:")
    assert "10 % of its time in environment steps" in verdict_of(report)


def test_waiting_for_copies() -> None:
    report: dict[str, Value] = {UPDATE_MS: 40.0, BATCH_WAIT_MS: 10.0, COPY_WAIT_MS: 50.0}
    verdict = "copy: the learner waits 50 % of its time for batches to be copied"
    assert verdict_of(report) == verdict


def test_starvation_outweighs_old_timers() -> None:
    timers: dict[str, Value] = {UPDATE_MS: 97.0, BATCH_WAIT_MS: 3.0, "time_s": 40.0}
    assert verdict_of(timers | {"learner/starved_since_s": None}).startswith("learner")
    starved = timers | {"learner/starved_since_s": 3.0}
    assert verdict_of(starved).startswith("waiting: the learner has had no batch for 37 s, no")
    empty = "actors: the learner has had no batch for 37 s, none is connected"
    assert verdict_of(starved | {"num_actors": 0}) == empty


def test_starvation_before_the_first_update() -> None:
    report: dict[str, Value] = {"learner/starved_since_s": 0.0}
    assert verdict_of(report).startswith("waiting: the learner has had no")
    report["num_actors"] = 0
    assert verdict_of(report).startswith("actors: the learner has had no")


def test_waiting_to_send_is_the_networks_unless_the_loop_is_late() -> None:
    report: dict[str, Value] = {UPDATE_MS: 50.0, BATCH_WAIT_MS: 50.0, "actor/send_wait_ms": 9.0}
    assert verdict_of({**report, "loop/lag_ms_mean": 0.3}).startswith("network:")
    late = verdict_of({**report, "loop/lag_ms_mean": 12.4})
    assert late.startswith("ingest:")
    assert late.endswith("waiting to send, and the event loop is 12 ms late")


def test_every_verdict_on_something_measured_comes_with_advice() -> None:
    for stage, advice in ADVICE.items():
        assert (advice is None) == (stage in ("unknown", "waiting"))
    assert judge({UPDATE_MS: 97.0, BATCH_WAIT_MS: 3.0}).advice == ADVICE["learner"]


def test_a_whole_start_is_judged_by_all_its_reports_and_not_by_the_last() -> None:
    times = RunTimes(num_updates=100)
    for num_updates, update_ms, wait_ms in ((200, 90.0, 10.0), (300, 90.0, 10.0), (301, 1.0, 99.0)):
        last: dict[str, Value] = {
            "updates": num_updates,
            UPDATE_MS: update_ms,
            BATCH_WAIT_MS: wait_ms,
        }
        times.add(last)
    last["learner/starved_since_s"] = 3.0
    assert verdict_of(last).startswith("waiting: the learner has had no batch")
    whole = times.over(last)
    assert str(judge(whole)) == "learner: updates take 90 % of its time"
    assert whole[UPDATE_MS] == pytest.approx((200 * 90 + 1) / 201)


def test_what_was_measured_late_is_a_mean_of_its_own_updates() -> None:
    times = RunTimes()
    times.add({"updates": 10, UPDATE_MS: 5.0, BATCH_WAIT_MS: 5.0, "actor/env_time_ms": None})
    times.add({"updates": 10, UPDATE_MS: 500.0, BATCH_WAIT_MS: 5.0})
    times.add({"updates": 20, UPDATE_MS: 5.0, BATCH_WAIT_MS: 5.0, "actor/env_time_ms": 7.0})
    whole = times.over({"updates": 20})
    assert (whole[UPDATE_MS], whole["actor/env_time_ms"]) == (5.0, 7.0)
    assert judge(RunTimes().over({"updates": 0})).stage == "unknown"


def test_without_actors_nothing_else_limits() -> None:
    timers: dict[str, Value] = {UPDATE_MS: 81.0, BATCH_WAIT_MS: 19.0}
    assert verdict_of({**timers, "num_actors": 1}).startswith("learner")
    alone = {**timers, "num_actors": 0}
    assert verdict_of(alone) == "actors: the learner has nobody to learn from, none is connected"
    died = verdict_of({**alone, "actor/last_death": "actor 2 died of EnvError: it broke"})
    assert died.endswith("none is connected; actor 2 died of EnvError: it broke")


def test_a_learner_that_builds_is_no_learner_without_actors() -> None:
    report: dict[str, Value] = {"num_actors": 0, "actor/last_death": "actor 0 died of old"}
    building = judge(report | {"learner/building": 1})
    assert str(building) == "waiting: the learner builds what it trains, for an actor that has come"
    assert judge(report | {"learner/building": 0}).stage == "actors"


def test_a_whole_start_had_the_actors_that_left_before_its_end() -> None:
    times: dict[str, Value] = {UPDATE_MS: 90.0, BATCH_WAIT_MS: 10.0}
    had, never = RunTimes(), RunTimes()
    for whole, num_actors in ((had, 2), (never, 0)):
        whole.add({**times, "updates": 1, "num_actors": num_actors})
    last: dict[str, Value] = {**times, "updates": 1, "num_actors": 0}
    assert judge(had.over(last)).stage == "learner"
    assert judge(never.over(last)).stage == "actors"


def test_in_lockstep_a_straggler_is_named_and_how_long() -> None:
    report: dict[str, Value] = {
        "learner/starved_since_s": 3.0,
        "time_s": 44.0,
        "num_actors": 2,
        "lockstep/num_done": 0,
        "lockstep/waits_for": "actor 0, actor 1",
    }
    told = "the learner has had no batch for 41 s, it waits for actor 0, actor 1"
    assert verdict_of(report) == f"straggler: {told}"
    assert "pace.on_loss" in str(judge(report).advice)
    # Where all are at work, what takes their time says more.
    timed = report | {"actor/env_time_ms": 9.0, "actor/act_time_ms": 1.0}
    at_work = f"environment: {told}, an actor spends 90 % of its time in environment steps"
    assert verdict_of(timed) == at_work
    assert verdict_of(timed | {"lockstep/num_done": 1}) == f"straggler: {told}"
    # Between two batches everybody is waited for.
    fed: dict[str, Value] = {UPDATE_MS: 50.0, BATCH_WAIT_MS: 50.0, "learner/starved_since_s": None}
    assert verdict_of(timed | fed).startswith("environment: the learner waits 50 % of its time")


def test_an_environment_that_hangs_is_named_before_old_timers() -> None:
    hang = "environment 3 of actor 2 has been in step for 12 s"
    report: dict[str, Value] = {
        "learner/starved_since_s": 3.0,
        "time_s": 40.0,
        "actor/env_time_ms": 9.0,
        "num_actors": 1,
        "actor/hang": hang,
    }
    verdict = judge(report)
    assert str(verdict) == f"hanging: the learner has had no batch for 37 s, {hang}"
    assert "env.step_timeout_s" in str(verdict.advice)
