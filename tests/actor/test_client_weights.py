"""Which weights an actor asks for, and when it waits for them."""

import time

import pytest

from impala_async.weights import Version
from impala_async.wire.messages import Get, Heartbeat
from tests.actor.scripted import (
    ACTOR_SPEC,
    V1,
    WITHIN_S,
    reply_of,
    settings_of,
    weights_of,
)


def test_it_waits_for_its_first_weights(scene):
    actor = scene.actor()
    scene.join(actor, ACTOR_SPEC, heartbeat_s=0.1)
    newest = actor.begin(actor.client.newest)
    assert scene.stays_blocked(newest)
    scene.learner.weights.find(Get).answer(*reply_of(weights_of(1, V1)))
    weights = newest.result(WITHIN_S)
    assert weights.version == V1
    _, weights_wait_s = actor.do(actor.client.take_waits)
    assert weights_wait_s > 0.1


@pytest.fixture
def joined(scene):
    """An actor that has weights of V1, and its session."""

    def make(max_lag=100):
        actor = scene.actor()
        settings = settings_of(max_lag=max_lag)
        session = scene.join(actor, ACTOR_SPEC, settings, heartbeat_s=0.1)
        newest = actor.begin(actor.client.newest)
        scene.learner.weights.find(Get).answer(*reply_of(weights_of(1, V1)))
        newest.result(WITHIN_S)
        return actor, session

    return make


def test_later_weights_are_not_waited_for(scene, joined):
    actor, session = joined(max_lag=3)
    assert actor.do(actor.client.newest) is None
    session.grant(1, version=Version(1, 3))
    actor.do(actor.pump_until, lambda: actor.client.link.pulls.is_asking)
    assert actor.do(actor.client.newest) is None
    scene.learner.weights.find(Get).answer(*reply_of(weights_of(3, Version(1, 3))))
    actor.do(actor.client.link.wait_for_weights, WITHIN_S)
    weights = actor.do(actor.client.newest)
    assert weights.version == Version(1, 3)


def test_at_max_lag_it_waits_for_newer_weights(scene, joined):
    actor, session = joined(max_lag=3)
    session.grant(1, version=Version(1, 4))
    actor.do(actor.pump_until, lambda: actor.client.link.pulls.is_asking)
    get = scene.learner.weights.find(Get)
    assert get.message == Get(session.id, *V1)
    newest = actor.begin(actor.client.newest)
    assert scene.stays_blocked(newest)
    get.answer(*reply_of(weights_of(4, Version(1, 4))))
    weights = newest.result(WITHIN_S)
    assert weights.version == Version(1, 4)


def test_timers_go_up_with_the_heartbeat(scene, joined):
    actor, _ = joined()
    actor.do(setattr, actor.client.link, "timers", {"env_time_ms": 1.25})
    give_up_at = time.monotonic() + WITHIN_S
    while scene.learner.weights.find(Heartbeat).message.timers != {"env_time_ms": 1.25}:
        assert time.monotonic() < give_up_at
