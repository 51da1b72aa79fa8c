"""A learner is lost, restarts, refuses, ends, or is another one: what becomes of the actor."""

import math
import time

import pytest

from impala_async.actor import joining
from impala_async.actor.client import NewRun, RunFinished
from impala_async.actor.sending import ActorSpec, Finished
from impala_async.config.run import TrajectorySection
from impala_async.errors import MismatchError, NotAllowedError, UnreachableError
from impala_async.schema import ArraySpec
from impala_async.weights import NO_VERSION, Version, WeightsLayout
from impala_async.wire.messages import Bye, ByeOk, Data, Get, Grant, Heartbeat, Hello, Spec, pack
from impala_async.wire.session import reject
from tests.actor.fakes import schema_of
from tests.actor.scripted import (
    ACTOR_SPEC,
    LAYOUT,
    V1,
    WITHIN_S,
    Session,
    reply_of,
    seq_of,
    settings_of,
    weights_of,
)

RUN_B = b"another run here"

pytestmark = pytest.mark.usefixtures("quick_hellos")


def unroll(actor):
    buffer = actor.client.take()
    buffer.obs.fill(1)
    actor.client.send(Finished(buffer, V1, []))


def at_work(scene, num_sent=0, **welcome):
    """An actor that has sent some trajectories, none of them settled."""
    actor = scene.actor()
    session = scene.join(actor, ACTOR_SPEC, **welcome)
    session.grant(num_sent)
    for seq in range(num_sent):
        actor.do(unroll, actor)
        assert seq_of(scene.data_of(actor)) == seq
    return actor, session


def lose(scene, session, how):
    if how == "hello_again for data":
        session.reject("hello_again")
    elif how == "hello_again for a heartbeat":
        scene.learner.weights.find(Heartbeat).answer(reject("hello_again", "over", 0.0))
    elif how == "restarting":
        session.bye("restarting")
        assert scene.learner.data.hear(ByeOk).message.session == session.id
    else:
        assert how == "silence"  # for longer than its lease


WAYS = ("hello_again for data", "hello_again for a heartbeat", "restarting", "silence")


@pytest.mark.parametrize("how", WAYS)
def test_what_is_not_settled_goes_again_under_the_new_session(scene, how):
    lease_s = 1.5 if how == "silence" else 10.0
    actor, session = at_work(scene, num_sent=3, lease_s=lease_s)
    session.grant(3, settled=1)
    with actor.pumping():
        lose(scene, session, how)
        # In a silence it first tries to send again.
        hello = scene.learner.data.find(Hello)
        assert hello.message.run_id == scene.learner.run_id
        assert hello.message.epoch == 1
        assert hello.message.lowest_unsettled == 1
        assert hello.message.actor == actor.client.side.actor
        welcome = scene.learner.welcome(hello, settings_of(), epoch=2)
        spec = scene.learner.data.hear(Spec)
        assert spec.message.session == welcome.session != session.id
        again = Session(spec, welcome)
        # Under the old session it had credit for all three, under the new one for none.
        scene.learner.weights.find(Heartbeat)
        assert scene.learner.data.drain() == []
        again.grant(2)
        data = scene.learner.data.hear(Data)
        assert (seq_of(data), data.message.session) == (1, welcome.session)
        again.grant(3, session=session.id)
        again.grant(3, settled=2)
        data = scene.learner.data.hear(Data)
        assert (seq_of(data), data.message.session) == (2, welcome.session)


def test_weights_that_come_slowly_are_waited_for(scene):
    """A thin line is busy with them, and nothing else comes through."""
    layout = WeightsLayout((ArraySpec("w", (50_000,), "float32"),))
    assert ActorSpec(schema_of(3), layout, 2, 1).weights_s == 1.0
    actor = scene.actor()
    scene.join(actor, ActorSpec(schema_of(3), layout, 2, 1), lease_s=0.2, heartbeat_s=0.1)
    started = time.monotonic()
    with actor.pumping():
        scene.welcome_back()
    assert time.monotonic() - started > 1.1


def test_it_gives_up_after_reconnect_s(scene):
    actor = scene.actor()
    session = scene.join(actor, ACTOR_SPEC, settings_of(reconnect_s=0.4))
    lost = actor.begin(actor.pump_until, lambda: False)
    session.bye("restarting")
    started = time.monotonic()
    with pytest.raises(UnreachableError, match=r"within 0.4 s") as caught:
        lost.result(WITHIN_S)
    assert caught.value.exit_code == 75
    assert 0.3 < time.monotonic() - started < 5.0


def test_one_that_was_to_wait_without_end_does_so_for_a_lost_learner_too(scene):
    actor = scene.actor(connect_s=math.inf)
    session = scene.join(actor, ACTOR_SPEC, settings_of(reconnect_s=0.01))
    lost = actor.begin(actor.pump_until, lambda: False)
    session.bye("restarting")
    for _ in range(2):
        scene.learner.data.find(Hello)
    assert not lost.done()
    actor.stop.set()
    with pytest.raises(RunFinished):
        lost.result(WITHIN_S)


def test_a_learner_lost_right_after_its_welcome_is_looked_for(scene):
    """Its ipc paths lead nowhere: it has gone between two words."""
    actor = scene.actor()
    nonce = {
        "nonce_path": str(scene.learner.folder / "nonce"),
        "ipc_data": scene.learner.dead_socket,
    }
    connected = actor.begin(actor.client.connect)
    hello = scene.learner.data.hear(Hello)
    scene.learner.welcome(hello, settings_of(), **nonce, lease_s=0.2)
    connected.result(WITHIN_S)
    joined = actor.begin(actor.client.join, ACTOR_SPEC)
    for _ in range(2):
        hello = scene.learner.data.hear(Hello)
        scene.learner.welcome(hello, settings_of(), **nonce, lease_s=0.2)
    session = scene.welcome_back()
    joined.result(WITHIN_S)
    session.grant(1)
    actor.do(unroll, actor)
    assert scene.data_of(actor).message.session == session.id


def test_weights_of_the_new_epoch_are_pulled_and_the_old_ones_not_again(scene):
    actor, session = at_work(scene)
    newest = actor.begin(actor.client.newest)
    scene.learner.weights.find(Get).answer(*reply_of(weights_of(9, Version(1, 9))))
    newest.result(WITHIN_S)
    with actor.pumping():
        session.reject("hello_again")
        again = scene.welcome_back(epoch=2)
        scene.learner.weights.drain()
        again.grant(0, version=Version(2, 4))
        get = scene.learner.weights.find(Get)
        assert get.message == Get(again.id, 1, 9)
        get.answer(*reply_of(weights_of(4, Version(2, 4))))
    actor.do(actor.client.link.wait_for_weights, WITHIN_S)
    weights = actor.do(actor.client.newest)
    assert weights.version == (2, 4)


def new_run(scene, actor, pumped, **settings):
    scene.learner.run_id = RUN_B
    hello = scene.learner.data.hear(Hello)
    scene.learner.welcome(hello, settings_of("b:Env", **settings), epoch=1)
    with pytest.raises(NewRun):
        pumped.result(WITHIN_S)


def test_a_new_run_begins_at_seq_0_with_its_own_settings(scene):
    actor, session = at_work(scene, num_sent=2, epoch=3)
    newest = actor.begin(actor.client.newest)
    scene.learner.weights.find(Get).answer(*reply_of(weights_of(9, Version(3, 9))))
    newest.result(WITHIN_S)
    pumped = actor.begin(actor.pump_until, lambda: False)
    session.reject("hello_again")
    new_run(scene, actor, pumped, trajectory=TrajectorySection(rows=7))
    settings = actor.do(actor.client.begin_new_run)
    assert settings.env.id == "b:Env"
    assert settings.trajectory.rows == 7
    joined = actor.begin(actor.client.join, ActorSpec(schema_of(7), LAYOUT, 4, 1))
    spec = scene.learner.data.hear(Spec)
    joined.result(WITHIN_S)
    assert spec.message.columns == 4
    again = Session(spec, actor.client.welcome)
    assert again.schema.rows == 7
    # What it had for the old run is worth nothing here: no weights, no trajectories.
    while (asked := scene.learner.weights.find(Get).message).session != again.id:
        pass  # it was asked in the old session
    assert asked == Get(again.id, *NO_VERSION)
    again.grant(5)
    buffer = actor.do(actor.client.take)
    actor.do(actor.client.send, Finished(buffer, V1, []))
    data = scene.data_of(actor).message
    assert (data.session, data.seq, data.rows, data.columns) == (again.id, 0, 7, 4)


def test_when_the_run_is_finished_so_is_the_actor(scene):
    actor, session = at_work(scene)
    pumped = actor.begin(actor.pump_until, lambda: False)
    session.bye("finished")
    assert scene.learner.data.hear(ByeOk).message.session == session.id
    with pytest.raises(RunFinished):
        pumped.result(WITHIN_S)


@pytest.mark.parametrize("how", ["finished", "mismatch", "restarting", "hello_again"])
def test_nothing_more_is_said_in_a_session_that_is_over(scene, monkeypatch, how):
    monkeypatch.setattr(joining, "BYE_OK_S", WITHIN_S)
    actor, session = at_work(scene)
    pumped = actor.begin(actor.pump_until, lambda: False)
    (session.bye if how in ("finished", "restarting") else session.reject)(how)
    if how in ("restarting", "hello_again"):
        # It looks for the next learner, and finds one that does not answer, when it is stopped.
        scene.learner.data.find(Hello)
        actor.stop.set()
    with pytest.raises((RunFinished, MismatchError)):
        pumped.result(WITHIN_S)
    started = time.monotonic()
    actor.do(actor.client.leave)
    assert time.monotonic() - started < WITHIN_S / 2


def test_a_goodbye_is_answered_even_behind_a_trajectory_under_way(scene):
    actor = scene.actor()
    session = scene.join(actor, ActorSpec(schema_of(1000, num_obs=2000), LAYOUT, 2, 1))
    session.grant(1)

    def work():
        try:
            actor.pump_until(lambda: False)
        except RunFinished:
            actor.client.leave()

    actor.do(unroll, actor)
    session.bye("finished")
    left = actor.begin(work)
    assert scene.learner.data.find(ByeOk).message.session == session.id
    left.result(WITHIN_S)


@pytest.mark.parametrize(
    ("code", "error", "exit_code"),
    [
        ("mismatch", MismatchError, 78),
        ("protocol", MismatchError, 78),
        ("not_allowed", NotAllowedError, 77),
    ],
)
def test_refusals_for_good(scene, code, error, exit_code):
    actor, session = at_work(scene)
    pumped = actor.begin(actor.pump_until, lambda: False)
    session.reject(code, "rows: 50 here, 20 there")
    with pytest.raises(error, match="rows: 50 here, 20 there") as caught:
        pumped.result(WITHIN_S)
    assert caught.value.exit_code == exit_code


def test_words_without_meaning_change_nothing(scene, caplog):
    actor, session = at_work(scene)
    with actor.pumping():
        session.reject("bad_message", "malformed_header: what?")
        session.say_raw(b"\xc1")
        session.say(Hello(1, bytes(16), "", bytes(16), 0, 0))
        session.grant(1)
        actor_is_alive = scene.learner.weights.find(Heartbeat).message.session == session.id
    assert actor_is_alive
    actor.do(unroll, actor)
    assert seq_of(scene.data_of(actor)) == 0
    assert "the learner refused a message: malformed_header: what?" in caplog.text
    assert "not understood" in caplog.text


def test_another_model_ends_the_actor(scene):
    actor, _ = at_work(scene)
    newest = actor.begin(actor.client.newest)
    other = WeightsLayout((ArraySpec("w", (2, 2), "float32"),))
    scene.learner.weights.find(Get).answer(*reply_of(weights_of(1, V1), other))
    with pytest.raises(MismatchError, match="model differs"):
        newest.result(WITHIN_S)


@pytest.mark.parametrize("stage", ["connect", "take", "newest"])
def test_a_stop_is_heard_wherever_it_waits(scene, stage):
    actor = scene.actor()
    if stage == "connect":
        waiting = actor.begin(actor.client.connect)
        scene.learner.data.hear(Hello)
    else:
        scene.join(actor, ACTOR_SPEC)
        actor.do(unroll, actor)
        waiting = actor.begin(getattr(actor.client, stage))
    stopped_at = time.monotonic()
    actor.stop.set()
    with pytest.raises(RunFinished):
        waiting.result(WITHIN_S)
    assert time.monotonic() - stopped_at < 2.0


def test_leave_says_bye_and_twice_does_no_harm(scene):
    actor, session = at_work(scene)
    for _ in range(2):
        actor.do(actor.client.leave)
    assert scene.learner.data.hear(Bye).message == Bye(session.id, 2)
    stranger = scene.actor()
    stranger.do(stranger.client.leave)


def test_a_spec_that_was_lost_is_made_good(scene):
    """Heartbeats go well, but the learner does not know what this actor runs."""
    actor = scene.actor()
    session = scene.join(actor, ACTOR_SPEC, lease_s=0.5, heartbeat_s=0.1)
    give_up_at = time.monotonic() + WITHIN_S
    heard = []
    with actor.pumping():
        while not heard and time.monotonic() < give_up_at:
            for beat in scene.learner.weights.drain():
                # Not `answer`: the link may be closed by now.
                beat.router.send(beat.route, [pack(Grant(session.id, 0, 0, *NO_VERSION, []))])
            heard = scene.learner.data.drain()
        assert isinstance(heard[0].message, Hello)
        scene.welcome_back()
