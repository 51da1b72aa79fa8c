"""Connections break beneath a session: what they swallowed comes at once, and nothing waits out
a lease. All times of these learners are longer than any test."""

from contextlib import suppress

import pytest

from impala_async.actor.sending import Finished
from impala_async.config.run import PaceSection
from impala_async.weights import Version
from impala_async.wire.messages import Data, Get, Grant, Heartbeat, Hello, Spec
from impala_async.wire.sockets import AddressError, Router
from tests.actor.scripted import (
    ACTOR_SPEC,
    V1,
    WITHIN_S,
    body_of,
    reply_of,
    seq_of,
    settings_of,
    weights_of,
)
from tests.proxy import HOST, proxy
from tests.wire.ends import until

pytestmark = pytest.mark.usefixtures("quick_hellos")

PATIENT = {"lease_s": 60.0, "heartbeat_s": 60.0}


@pytest.fixture
def network(scene):
    with proxy(scene.learner.url, scene.learner.weights.router.url) as opened:
        yield opened


def bound(scene, url, ipc_path):
    """Where another one has just been closed, which takes a moment."""
    routers = []

    def bind():
        with suppress(AddressError):
            routers.append(Router(scene.context, url, ipc_path, 1 << 26))
        return bool(routers)

    until(bind)
    return routers[0]


def unroll(actor, value):
    buffer = actor.client.take()
    buffer.obs.fill(value)
    actor.client.send(Finished(buffer, V1, []))


def test_what_is_not_settled_goes_again_in_the_same_session(scene, network):
    actor = scene.actor(host=HOST)
    session = scene.join(actor, ACTOR_SPEC, **PATIENT)
    session.grant(3)
    first = []
    for value in range(3):
        actor.do(unroll, actor, value)
        first.append(body_of(scene.data_of(actor)))
    session.grant(3, settled=1)
    with actor.pumping():
        for _ in range(3):
            network.reset()
            spec = scene.learner.data.hear(Spec)
            assert spec.message.session == session.id
            again = [scene.learner.data.hear(Data) for _ in range(2)]
            # The grant that settled the first may have been lost as well.
            if seq_of(again[0]) == 0:
                again = [again[1], scene.learner.data.hear(Data)]
            assert [seq_of(data) for data in again] == [1, 2]
            assert [body_of(data) for data in again] == first[1:]


def test_in_lockstep_nothing_is_given_up_for_a_broken_connection(scene, network):
    actor = scene.actor(host=HOST)
    lockstep = settings_of(pace=PaceSection(mode="lockstep"))
    session = scene.join(actor, ACTOR_SPEC, lockstep, **PATIENT)
    newest = actor.begin(actor.client.newest)
    scene.learner.weights.find(Get).answer(*reply_of(weights_of(1, V1)))
    newest.result(WITHIN_S)
    session.grant(1)
    actor.do(unroll, actor, 7)
    sent = body_of(scene.data_of(actor))
    newest = actor.begin(actor.client.newest)
    network.reset()
    assert scene.learner.data.find(Spec).message.session == session.id
    assert body_of(scene.learner.data.hear(Data)) == sent
    beat = scene.learner.weights.find(Heartbeat)
    beat.answer(Grant(session.id, 1, 0, 1, 2, []))
    scene.learner.weights.find(Get).answer(*reply_of(weights_of(2, Version(1, 2))))
    weights = newest.result(WITHIN_S)
    assert weights.version == (1, 2)


def test_a_path_of_this_host_that_is_dead_is_left_for_the_address_that_was_dialled(
    scene,
):
    actor, learner = scene.actor(), scene.learner
    session = scene.join(actor, ACTOR_SPEC, nonce_path=str(learner.folder / "nonce"), **PATIENT)
    session.grant(1)
    actor.do(unroll, actor, 7)
    sent = body_of(scene.data_of(actor))
    with actor.pumping():
        url = learner.url
        learner.data.router.close()
        # As of a learner that was killed: its nonce stays, and its successor's path is another.
        learner.data.router = bound(scene, url, str(learner.folder / "d2"))
        hello = learner.data.hear(Hello)
        assert (hello.message.actor, hello.message.epoch) == (actor.client.side.actor, 1)
        welcome = learner.welcome(hello, settings_of(), epoch=2, **PATIENT)
        spec = learner.data.find(Spec)
        assert spec.message.session == welcome.session
        type(session)(spec, welcome).grant(1)
        assert body_of(learner.data.hear(Data)) == sent
