"""An actor in lockstep: the weights of each trajectory, and what a lost session costs."""

import pytest

from impala_async.actor.sending import Finished
from impala_async.config.run import PaceSection, TrainSection
from impala_async.weights import NO_VERSION, Version
from impala_async.wire.messages import Data, Get, Hello, Spec
from tests.actor.scripted import (
    ACTOR_SPEC,
    WITHIN_S,
    Session,
    reply_of,
    seq_of,
    settings_of,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("quick_hellos")

LAGS = pytest.mark.parametrize("lag", [0, 1])


def lockstep(lag):
    return settings_of(pace=PaceSection(mode="lockstep", lag=lag), train=TrainSection(num_actors=1))


def version_of(update):
    return Version(1, update)


def boundary(actor):
    """A trajectory boundary; the version that it brings."""
    weights = actor.client.newest()
    return weights and weights.version


def serve(scene, update, have=None):
    """The next pull, which must have the version before."""
    get = scene.learner.weights.find(Get)
    assert (get.message.epoch, get.message.update) == (have or version_of(update - 1))
    get.answer(*reply_of(weights_of(update, version_of(update))))


def join(scene, lag):
    actor = scene.actor()
    return actor, scene.join(actor, ACTOR_SPEC, lockstep(lag), heartbeat_s=0.1)


def begin(scene, actor, update):
    """Its first weights."""
    first = actor.begin(boundary, actor)
    assert scene.stays_blocked(first)
    serve(scene, update, NO_VERSION)
    assert first.result(WITHIN_S) == version_of(update)


@LAGS
def test_the_first_weights_serve_one_trajectory_and_one_more_for_each_update_of_lag(scene, lag):
    actor, session = join(scene, lag)
    begin(scene, actor, 5)
    for _ in range(lag):
        assert actor.do(boundary, actor) is None
    for update in (6, 7, 8):
        waiting = actor.begin(boundary, actor)
        assert scene.stays_blocked(waiting)
        session.grant(9, version=version_of(update))
        serve(scene, update)
        assert waiting.result(WITHIN_S) == version_of(update)


def test_with_a_lag_no_version_is_passed_over(scene):
    actor, session = join(scene, lag=1)
    begin(scene, actor, 0)
    # Two more are out before its second trajectory is done.
    for update in (1, 2):
        session.grant(9, version=version_of(update))
        actor.do(actor.client.pump, 0)
        with actor.pumping():
            serve(scene, update)
    actor.do(actor.pump_until, lambda: len(actor.client.link._newest) == 2)
    assert actor.do(boundary, actor) is None
    assert [actor.do(boundary, actor) for _ in range(2)] == [version_of(1), version_of(2)]


def unroll(actor, version):
    buffer = actor.client.take()
    buffer.obs.fill(1)
    actor.client.send(Finished(buffer, version, []))


@LAGS
@pytest.mark.parametrize("num_boundaries", [1, 2])
def test_after_a_lost_session_it_begins_anew(scene, lag, num_boundaries):
    actor, session = join(scene, lag)
    session.grant(2)
    begin(scene, actor, 5)
    for _ in range(min(num_boundaries - 1, lag)):
        assert actor.do(boundary, actor) is None
    # One is under way, one is being unrolled.
    actor.do(unroll, actor, version_of(5))
    assert seq_of(scene.data_of(actor)) == 0
    buffer = actor.do(actor.client.take)
    session.reject("hello_again")
    with actor.pumping():
        hello = scene.learner.data.find(Hello)
        assert hello.message.lowest_unsettled == 1
        scene.learner.welcome(hello, lockstep(lag), heartbeat_s=0.1)
        again = Session(scene.learner.data.find(Spec), actor.client.welcome)
    # What was begun in the session that is over goes nowhere.
    actor.do(actor.client.send, Finished(buffer, version_of(5), []))
    again.grant(9, 1)
    actor.do(actor.client.pump, 0)
    begin(scene, actor, 9)
    for _ in range(lag):
        assert actor.do(boundary, actor) is None
    assert not any(isinstance(heard.message, Data) for heard in scene.learner.data.drain())
    actor.do(unroll, actor, version_of(9))
    sent = scene.data_of(actor)
    assert (seq_of(sent), sent.message.update) == (1, 9)
    # Every buffer came back.
    assert len(actor.client._free) == 2
