"""What a round of a stage takes, and whether its steps wait."""

import time
from typing import Any

import pytest

from impala_async.actor.samplers import measure as measure_module
from impala_async.actor.samplers.measure import Play, Scrap, measure
from impala_async.actor.samplers.stage import Stage, set_stage
from impala_async.config.actor import ActorSection
from impala_async.spec import Schema
from tests.actor.fakes import FakePolicy
from tests.actor.worlds import section

SLOW = section("bench.probes:Slow", kwargs={"step_s": 0.01})


def play_of(stage: Stage, look_up: Any = lambda: None) -> Play:
    choices = stage.action_spec.parts[0].choices[0]
    schema = Schema(stage.obs_spec, stage.action_spec, 4)
    return Play(schema, lambda _: (FakePolicy(choices), None), look_up)


def test_steps_that_wait_are_told_from_those_that_compute() -> None:
    for env, is_waiting in ((SLOW, True), (section("Busy"), False)):
        stage = set_stage("serial", ActorSection(), env, 2)
        found = measure(stage, play_of(stage))
        stage.close()
        assert found.is_waiting == is_waiting
        assert 0 < found.env_s <= found.round_s
        assert 0 <= found.act_s < found.round_s
        if env is SLOW:
            assert found.env_s >= 0.02


def test_it_ends_after_its_time_or_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = set_stage("serial", ActorSection(), section("CartPole-v1"), 1)
    looks: list[float] = []
    play = play_of(stage, lambda: looks.append(time.monotonic()))
    monkeypatch.setattr(measure_module, "BUDGET_S", 60.0)
    monkeypatch.setattr(measure_module, "MAX_ROUNDS", 10)
    measure(stage, play)
    assert len(looks) == 11
    monkeypatch.setattr(measure_module, "BUDGET_S", 0.0)
    looks.clear()
    measure(stage, play)
    assert len(looks) == 1
    stage.close()


def test_buffers_that_come_back_are_used_again() -> None:
    stage = set_stage("serial", ActorSection(), section("CartPole-v1"), 1)
    scrap = Scrap(play_of(stage).schema)
    first = scrap.take(1)
    assert scrap.take(1) is not first
    scrap.give_back(first)
    assert scrap.take(1) is first
    stage.close()
