import random
import time

import pytest

from impala_async.actor.sending import ActorSpec, Finished, MessageBuffer
from impala_async.weights import NO_VERSION
from impala_async.wire.messages import Bye, Data, Get, Grant, Heartbeat, Hello, Spec
from tests.actor.fakes import schema_of
from tests.actor.scripted import (
    LAYOUT,
    V1,
    WITHIN_S,
    Session,
    body_of,
    seq_of,
    settings_of,
)

# Inline; as frames of their own that are copied; and that are not.
SIZES = {"inline": 3, "small frames": 500, "big frames": 8000}
MANY = 1000


def actor_spec_of(rows=3, streams=1):
    return ActorSpec(schema_of(rows), LAYOUT, 2, streams)


def fill(buffer, seq):
    buffer.obs.fill(seq % 251)
    buffer.small.fill(seq % 251)


def unroll(actor, seq):
    """Write a trajectory that shows its seq, and hand it over; on the sampler's thread."""
    buffer = actor.client.take()
    fill(buffer, seq)
    actor.client.send(Finished(buffer, V1, []))
    return buffer


def is_intact(heard):
    return set(body_of(heard)) == {seq_of(heard) % 251}


def test_an_address_is_enough_and_spec_says_what_runs(scene):
    actor = scene.actor()
    connected = actor.begin(actor.client.connect)
    hello = scene.learner.data.hear(Hello)
    assert hello.message.run_id == bytes(16)
    assert hello.message.epoch == hello.message.lowest_unsettled == 0
    welcome = scene.learner.welcome(hello, settings_of("my:Env"))
    assert connected.result(WITHIN_S).env.id == "my:Env"
    assert actor.client.welcome.rank == 3
    joined = actor.begin(actor.client.join, actor_spec_of())
    spec = scene.learner.data.hear(Spec)
    joined.result(WITHIN_S)
    assert spec.message.session == welcome.session
    assert (spec.message.columns, spec.message.streams) == (2, 1)
    assert spec.route == hello.route
    assert scene.learner.weights.find(Heartbeat).message.session == welcome.session


def test_both_connections_move_to_ipc_when_the_nonce_can_be_read(scene):
    learner, actor = scene.learner, scene.actor()
    connected = actor.begin(actor.client.connect)
    hello = learner.data.hear(Hello)
    nonce_path = str(learner.folder / "nonce")
    learner.welcome(hello, settings_of(), nonce_path=nonce_path, weights_port=1)
    connected.result(WITHIN_S)
    joined = actor.begin(actor.client.join, actor_spec_of())
    spec = learner.data.hear(Spec)
    joined.result(WITHIN_S)
    # Another route: the connection over which it said hello is not the one that it uses now.
    assert spec.route != hello.route
    Session(spec, actor.client.welcome).grant(1, version=V1)
    actor.do(actor.pump_until, lambda: actor.client.link.pulls.is_asking)
    learner.weights.find(Get)


def test_no_data_without_a_grant_and_no_more_than_granted(scene):
    actor = scene.actor()
    session = scene.join(actor, actor_spec_of())
    actor.do(unroll, actor, 0)
    for _ in range(5):
        actor.do(actor.client.pump, 0)
    session.grant(2)
    assert seq_of(scene.data_of(actor)) == 0
    actor.do(unroll, actor, 1)
    assert seq_of(scene.learner.data.hear(Data)) == 1
    actor.do(unroll, actor, 2)
    for _ in range(5):
        actor.do(actor.client.pump, 0)
    # What it says next is this, so it has sent nothing else.
    actor.do(actor.client.leave)
    assert scene.learner.data.hear(Bye).message.session == session.id


def test_data_says_session_seq_version_and_holds_the_buffer(scene):
    for rows in SIZES.values():
        actor = scene.actor()
        session = scene.join(actor, actor_spec_of(rows))
        session.grant(5)
        for seq in range(2):
            actor.do(unroll, actor, seq)
            heard = scene.data_of(actor)
            data = heard.message._replace(body=None)
            assert data == Data(session.id, seq, *V1, rows, 2, 0, 0, None)
            assert is_intact(heard)
        actor.do(actor.client.leave)
        scene.learner.data.hear(Bye)


def test_take_waits_for_credit(scene):
    actor = scene.actor()
    session = scene.join(actor, actor_spec_of(), heartbeat_s=0.1)
    actor.do(unroll, actor, 0)
    taken = actor.begin(actor.client.take)
    assert scene.stays_blocked(taken)
    session.grant(1)
    assert isinstance(taken.result(WITHIN_S), MessageBuffer)
    assert seq_of(scene.learner.data.hear(Data)) == 0
    send_wait_s, _ = actor.do(actor.client.take_waits)
    assert send_wait_s > 0.1
    assert actor.do(actor.client.take_waits) == (0.0, 0.0)


def test_take_waits_until_a_buffer_is_settled(scene):
    actor = scene.actor()
    session = scene.join(actor, actor_spec_of(streams=2), heartbeat_s=0.1)
    session.grant(MANY)
    buffers = [actor.do(unroll, actor, seq) for seq in range(6)]
    assert len({id(buffer) for buffer in buffers}) == 6
    taken = actor.begin(actor.client.take)
    assert scene.stays_blocked(taken)
    session.grant(MANY, settled=1)
    assert taken.result(WITHIN_S) is buffers[0]


@pytest.mark.parametrize("rows", SIZES.values(), ids=SIZES.keys())
def test_a_buffer_is_written_to_only_when_it_is_settled(scene, rows):
    """The learner reads late and settles as it likes; what it reads is what was sent."""
    rng = random.Random(rows)
    actor = scene.actor()
    session = scene.join(actor, actor_spec_of(rows, streams=2))
    num_messages, settled, num_read = 60, 0, 0
    session.grant(MANY)
    in_use = {}

    def unroll_all():
        for seq in range(num_messages):
            buffer = actor.client.take()
            # Only what the learner has settled may come back.
            assert all(owner < settled for owner, b in in_use.items() if b == id(buffer)), in_use
            in_use[seq] = id(buffer)
            fill(buffer, seq)
            actor.client.send(Finished(buffer, V1, []))

    done = actor.begin(unroll_all)
    while num_read < num_messages:
        for heard in scene.learner.data.drain():
            assert seq_of(heard) == num_read
            assert is_intact(heard), heard.message
            num_read += 1
        if num_read > settled:
            settled = rng.randint(settled, num_read)
            session.grant(MANY, settled)
    done.result(WITHIN_S)


def test_credit_comes_over_the_weights_port_too(scene):
    actor = scene.actor()
    session = scene.join(actor, actor_spec_of())
    beat = scene.learner.weights.find(Heartbeat)
    actor.do(unroll, actor, 0)
    with actor.pumping():
        beat.answer(Grant(session.id, 1, 0, *NO_VERSION, []))
        assert seq_of(scene.learner.data.hear(Data)) == 0


def test_what_is_not_settled_for_a_lease_is_sent_again(scene, caplog):
    caplog.set_level("INFO")
    actor = scene.actor()
    session = scene.join(actor, actor_spec_of(), lease_s=1.0, heartbeat_s=0.1)
    session.grant(1)
    actor.do(unroll, actor, 0)
    first = scene.data_of(actor)
    sent_at = time.monotonic()
    with actor.pumping():
        while not (heard := scene.learner.data.drain()):
            beat = scene.learner.weights.find(Heartbeat)
            beat.answer(Grant(session.id, 1, 0, *NO_VERSION, []))
    assert time.monotonic() - sent_at > 0.9
    assert seq_of(heard[0]) == 0
    assert body_of(heard[0]) == body_of(first)
    assert "has neither taken nor refused for 1 s is sent again" in caplog.text
