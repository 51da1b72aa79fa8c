"""A learner is lost, restarts, refuses, ends, is another one, or is none: what an actor does."""

import json
import math
import socket
import time
from contextlib import suppress

import pytest

from impala_async.actor import joining
from impala_async.actor.client import NewRun, RunFinished
from impala_async.config.learner import KEY_VARIABLE
from impala_async.errors import ConfigError, MismatchError, NotAllowedError, UnreachableError
from impala_async.runs.folder import RunFolder
from impala_async.wire.actor_side import FIRST_S
from impala_async.wire.keys import new_key
from impala_async.wire.messages import (
    BYE_REASONS,
    VERDICTS,
    Bye,
    ByeOk,
    Data,
    Get,
    Grant,
    Heartbeat,
    Hello,
    Spec,
)
from impala_async.wire.session import reject
from impala_async.wire.sockets import Router
from tests.actor.scripted import (
    ACTOR_SPEC,
    V1,
    WITHIN_S,
    ScriptedLearner,
    Session,
    body_of,
    reply_of,
    seq_of,
    settings_of,
    weights_of,
)
from tests.proxy import HOST, proxy
from tests.wire.ends import until

# Longer than any test.
PATIENT = {"lease_s": 60.0, "heartbeat_s": 60.0}

pytestmark = pytest.mark.usefixtures("quick_hellos")


@pytest.fixture
def lines(caplog):
    """The lines that begin or go on with a text."""
    caplog.set_level("INFO")
    return lambda text: [line for line in caplog.messages if text in line]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("impala_async.actor.client.AFTER_S", 0.1)


def pump(actor):
    """Pump on its own thread, until it raises."""
    return actor.begin(actor.pump_until, lambda: False)


# -------------------- it is lost


@pytest.mark.parametrize("how", ["hello_again", "at the weights port", "restarting", "silence"])
def test_what_is_not_settled_goes_again_under_the_new_session(scene, how):
    actor, session = scene.at_work(3, lease_s=1.5 if how == "silence" else 10.0)
    session.grant(3, settled=1)
    with actor.pumping():
        if how == "hello_again":
            session.reject(how)
        elif how == "at the weights port":
            scene.learner.weights.find(Heartbeat).answer(reject("hello_again", "over", 0.0))
        elif how == "restarting":
            session.bye(how)
            assert scene.learner.data.hear(ByeOk).message.session == session.id
        # In a silence it first tries to send again.
        hello = scene.learner.data.find(Hello)
        known = hello.message
        assert (known.run_id, known.epoch, known.lowest_unsettled) == (scene.learner.run_id, 1, 1)
        assert known.actor == actor.client.side.actor
        welcome = scene.learner.welcome(hello, settings_of(), epoch=2)
        again = Session(scene.learner.data.find(Spec), welcome)
        assert again.spec.session == welcome.session != session.id
        # Under the old session it had credit for all three, under the new one for none.
        scene.learner.weights.find(Heartbeat)
        assert scene.learner.data.drain() == []
        for seq in (1, 2):
            again.grant(3, session=session.id)
            again.grant(seq + 1, settled=seq)
            data = scene.learner.data.hear(Data)
            assert (seq_of(data), data.message.session) == (seq, welcome.session)


def test_it_gives_up_after_reconnect_s(scene):
    actor, session = scene.at_work(settings=settings_of(reconnect_s=0.4))
    lost = pump(actor)
    session.bye("restarting")
    started = time.monotonic()
    with pytest.raises(UnreachableError, match=r"within 0.4 s") as caught:
        lost.result(WITHIN_S)
    assert caught.value.exit_code == 75
    assert 0.3 < time.monotonic() - started < 5.0


def test_one_that_was_to_wait_without_end_does_so_for_a_lost_learner_too(scene):
    actor = scene.actor(connect_s=math.inf)
    session = scene.join(actor, ACTOR_SPEC, settings_of(reconnect_s=0.01))
    lost = pump(actor)
    session.bye("restarting")
    for _ in range(2):
        scene.learner.data.find(Hello)
    assert not lost.done()
    actor.stop.set()
    with pytest.raises(RunFinished):
        lost.result(WITHIN_S)


@pytest.mark.parametrize("connect_s", [math.inf, 20.0])
def test_where_an_earlier_state_of_the_folder_was_put_back_a_new_process_looks_at_it(
    scene, connect_s
):
    actor = scene.actor(connect_s=connect_s)
    session = scene.join(actor, ACTOR_SPEC, settings_of(reconnect_s=0.3), epoch=3)
    lost = pump(actor)
    session.bye("restarting")
    for _ in range(2):
        assert not lost.done()
        scene.learner.welcome(scene.learner.data.find(Hello), settings_of(), epoch=2)
    with pytest.raises(NewRun):
        lost.result(WITHIN_S)


@pytest.mark.parametrize("reason", ["finished", "restarting"])
def test_a_session_that_ended_while_environments_were_made_is_over(scene, reason):
    actor = scene.actor()
    connected = actor.begin(actor.client.connect)
    hello = scene.learner.data.hear(Hello)
    welcome = scene.learner.welcome(hello, settings_of(), **PATIENT)
    connected.result(WITHIN_S)
    hello.answer(Bye(welcome.session, BYE_REASONS.index(reason)))
    time.sleep(0.2)  # it lies in the actor's socket
    began, joined = time.monotonic(), actor.begin(actor.client.join, *ACTOR_SPEC)
    assert scene.learner.data.find(ByeOk).message.session == welcome.session
    if reason == "finished":
        with pytest.raises(RunFinished):
            joined.result(WITHIN_S)
        assert actor.client.is_finished
        assert not actor.client.side.has_session  # it says no goodbye of its own
    else:
        scene.learner.data.find(Hello)
        assert time.monotonic() - began < 2.0
        actor.stop.set()
        with pytest.raises(RunFinished):
            joined.result(WITHIN_S)
        assert not actor.client.is_finished


@pytest.mark.parametrize("lease_s", [0.2, 60.0])
def test_a_learner_lost_right_after_its_welcome_is_looked_for(scene, monkeypatch, lines, lease_s):
    """Nobody answers at its ipc paths: it is going between two words."""
    monkeypatch.setattr("impala_async.actor.client.EVERY_S", 0.2)
    nonce, mute = (str(scene.learner.folder / name) for name in ("nonce", "mute"))
    gone = {"nonce_path": nonce, "ipc_data": mute, "lease_s": lease_s}
    actor = scene.actor()
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(mute)
        end.listen()
        connected = actor.begin(actor.client.connect)
        scene.learner.welcome(scene.learner.data.hear(Hello), settings_of(), **gone)
        connected.result(WITHIN_S)
        joined = actor.begin(actor.client.join, *ACTOR_SPEC)
        for _ in range(2):
            scene.learner.welcome(scene.learner.data.hear(Hello), settings_of(), **gone)
        session = scene.welcome_back()
        joined.result(WITHIN_S)
    assert lines(f"ipc://{mute} takes connections, but no messages")
    session.grant(1)
    actor.do(actor.unroll)
    assert scene.data_of(actor).message.session == session.id


# -------------------- it ends, or refuses


@pytest.mark.parametrize("how", ["finished", "mismatch", "restarting", "hello_again"])
def test_nothing_more_is_said_in_a_session_that_is_over(scene, monkeypatch, how):
    monkeypatch.setattr(joining, "BYE_OK_S", WITHIN_S)
    actor, session = scene.at_work()
    pumped = pump(actor)
    (session.bye if how in ("finished", "restarting") else session.reject)(how)
    if how in ("restarting", "hello_again"):
        # It looks for the next learner, and finds one that does not answer, when it is stopped.
        scene.learner.data.find(Hello)
        actor.stop.set()
    with pytest.raises(MismatchError if how == "mismatch" else RunFinished):
        pumped.result(WITHIN_S)
    started = time.monotonic()
    actor.do(actor.client.leave)
    assert time.monotonic() - started < WITHIN_S / 2


# -------------------- its run folder says where it is


@pytest.fixture
def folder(scene, tmp_path):
    """The run folder of the scene's learner, which listens where that says."""
    made = RunFolder(tmp_path / "run")
    made.path.mkdir()
    made.write_json("config.json", {"run_id": scene.learner.run_id.hex(), "config": {}})
    made.announce(scene.learner.url, "", 1)
    return made


@pytest.fixture
def successor(scene, tmp_path):
    """Another learner of the same run, at other ports."""
    (tmp_path / "elsewhere").mkdir()
    learner = ScriptedLearner(scene.context, tmp_path / "elsewhere")
    yield learner
    learner.close()


@pytest.mark.parametrize("how", ["killed", "restarting"])
def test_a_learner_that_was_started_again_elsewhere_is_found_there(scene, folder, successor, how):
    """Nobody answers where it was, or it said that it would come back: a lease is longer."""
    actor = scene.actor(where=folder.path)
    session = scene.join(actor, ACTOR_SPEC, **PATIENT)
    session.grant(1)
    actor.do(actor.unroll)
    scene.data_of(actor)
    with actor.pumping():
        if how == "restarting":
            session.bye(how)
        else:
            scene.learner.data.router.close()
        folder.announce(successor.url, "", 2)
        hello = successor.data.hear(Hello)
        assert (hello.message.run_id, hello.message.epoch) == (scene.learner.run_id, 1)
        welcome = successor.welcome(hello, settings_of(), epoch=2)
        again = Session(successor.data.find(Spec), welcome)
        again.grant(1)
        assert seq_of(successor.data.hear(Data)) == 0
        assert successor.weights.find(Heartbeat).message.session == welcome.session


def test_one_that_is_looked_for_at_its_first_address_is_found_at_the_next(scene, folder, successor):
    """A learner that was killed has left the address where nobody is."""
    scene.learner.data.router.close()
    connected = scene.actor(where=folder.path).begin_connect()
    folder.announce(successor.url, "", 1)
    successor.welcome(successor.data.hear(Hello), settings_of())
    assert connected.result(WITHIN_S) == settings_of()


def test_another_run_at_the_address_of_its_folder_is_not_worked_for(scene, folder, successor):
    """Somebody else may have taken the port since."""
    for patient_s in (0.5, WITHIN_S):
        actor = scene.actor(patient_s, where=folder.path)
        connected = actor.begin_connect()
        hello = scene.learner.data.hear(Hello)
        assert hello.message.run_id == scene.learner.run_id
        scene.learner.welcome(hello, settings_of(), run_id=b"o" * 16)
        if patient_s < WITHIN_S:
            with pytest.raises(UnreachableError, match="another run is at the address in this run"):
                connected.result(WITHIN_S)
    folder.announce(successor.url, "", 2)
    successor.welcome(successor.data.hear(Hello), settings_of(), epoch=2)
    assert connected.result(WITHIN_S) == settings_of()


def test_its_own_learner_may_come_back_to_an_address_where_another_run_was(scene, folder):
    connected = scene.actor(where=folder.path).begin_connect()
    scene.learner.welcome(scene.learner.data.hear(Hello), settings_of(), run_id=b"o" * 16)
    folder.announce(scene.learner.url, "", 2)
    scene.learner.welcome(scene.learner.data.find(Hello), settings_of(), epoch=2)
    assert connected.result(WITHIN_S) == settings_of()


def test_a_folder_that_has_another_run_by_now_is_of_that_one(scene, folder):
    actor = scene.actor(where=folder.path)
    session = scene.join(actor, ACTOR_SPEC)
    pumped = pump(actor)
    folder.write_json("config.json", {"run_id": "aa" * 16, "config": {}})
    session.bye("restarting")
    scene.learner.welcome(scene.learner.data.find(Hello), settings_of(), run_id=b"\xaa" * 16)
    with pytest.raises(NewRun):
        pumped.result(WITHIN_S)


# -------------------- its address is that of several ranks


def test_it_works_for_the_rank_to_which_it_is_sent_until_that_lets_it_go(scene, successor, lines):
    actor = scene.actor()
    connected = actor.begin_connect()
    scene.learner.data.hear(Hello).answer(reject("elsewhere", successor.url, 0.0))
    # Both are of one run and one start.
    welcome = successor.welcome(successor.data.hear(Hello), settings_of())
    assert connected.result(WITHIN_S) == settings_of()
    joined = actor.begin(actor.client.join, *ACTOR_SPEC)
    session = Session(successor.data.hear(Spec), welcome)
    joined.result(WITHIN_S)
    assert lines("sends us to") == [
        f"the learner at {scene.learner.url} sends us to {successor.url}"
    ]
    assert not lines("refuses us")
    session.grant(1)
    actor.do(actor.unroll, 0)
    with actor.pumping():
        assert seq_of(successor.data.find(Data)) == 0
        session.bye("moving")
        hello = scene.learner.data.find(Hello).message
        # It was not settled there, and goes to another one.
        assert (hello.actor, hello.lowest_unsettled) == (actor.client.side.actor, 0)
        # Each rank has seeds of its own, for which nothing is built anew.
        session = scene.welcome_back(settings_of(seed=99))
        session.grant(1)
        assert seq_of(scene.learner.data.find(Data)) == 0


def test_a_rank_that_is_silent_is_left_for_the_address_that_was_given(
    scene, successor, monkeypatch
):
    monkeypatch.setattr("impala_async.actor.client.SENT_S", 0.2)
    connected = scene.actor().begin_connect()
    scene.learner.data.hear(Hello).answer(reject("elsewhere", successor.url, 0.0))
    successor.data.hear(Hello)
    scene.learner.welcome(scene.learner.data.find(Hello), settings_of())
    assert connected.result(WITHIN_S) == settings_of()


def test_one_that_is_sent_in_circles_takes_longer_each_time(scene, successor):
    connected = scene.actor().begin_connect()
    began = time.monotonic()
    for _ in range(4):
        scene.learner.data.hear(Hello).answer(reject("elsewhere", successor.url, 0.0))
        successor.data.hear(Hello).answer(reject("elsewhere", scene.learner.url, 0.0))
    scene.learner.welcome(scene.learner.data.find(Hello), settings_of())
    assert connected.result(WITHIN_S) == settings_of()
    # None before the first time, then twice as long each time.
    assert time.monotonic() - began > 7 * FIRST_S


def test_a_place_that_nobody_can_dial_is_told(scene):
    connected = scene.actor().begin_connect()
    scene.learner.data.hear(Hello).answer(reject("elsewhere", "ipc:///tmp/x", 0.0))
    says = "sends us to another rank: wants tcp://HOST:PORT, got 'ipc:///tmp/x'"
    with pytest.raises(MismatchError, match=says):
        connected.result(WITHIN_S)


# -------------------- connections break beneath a session: nothing waits out a lease


def test_what_is_not_settled_goes_again_in_the_same_session(scene):
    with proxy(scene.learner.url, scene.learner.weights.router.url) as network:
        actor, session = scene.at_work(3, host=HOST, **PATIENT)
        session.grant(3, settled=1)
        began_at = time.monotonic()
        with actor.pumping():
            for _ in range(5):
                network.reset()
                spec = scene.learner.data.hear(Spec)
                assert spec.message.session == session.id
                again = [scene.learner.data.hear(Data) for _ in range(2)]
                # The grant that settled the first may have been lost as well.
                if seq_of(again[0]) == 0:
                    again = [again[1], scene.learner.data.hear(Data)]
                assert [(seq_of(data), set(body_of(data))) for data in again] == [
                    (1, {1}),
                    (2, {2}),
                ]
        # One that only hangs up is not hammered at: 0, 0.1, 0.2, 0.4 s.
        assert time.monotonic() - began_at > 0.6


def test_a_path_of_this_host_that_is_dead_is_left_for_the_address_that_was_dialled(scene):
    learner = scene.learner
    actor, _ = scene.at_work(1, nonce_path=str(learner.folder / "nonce"), **PATIENT)
    routers = []

    def bind():
        # Where another one has just been closed, which takes a moment.
        with suppress(ConfigError):
            routers.append(Router(scene.context, url, str(learner.folder / "d2"), 1 << 26))
        return routers

    with actor.pumping():
        url = learner.url
        learner.data.router.close()
        # As of a learner that was killed: its nonce stays, and its successor's path is another.
        until(bind)
        learner.data.router = routers[0]
        scene.welcome_back(epoch=2, **PATIENT).grant(1)
        assert set(body_of(learner.data.hear(Data))) == {0}


# -------------------- it is no learner, or a broken one: the actor waits, and says little


def test_one_that_welcomes_and_sends_away_again_is_asked_ever_less_often(scene, lines):
    actor = scene.actor()
    session = scene.join(actor, ACTOR_SPEC)
    with actor.pumping():
        began_at = time.monotonic()
        for _ in range(5):
            session.reject("hello_again", "who are you?")
            session = scene.welcome_back()
        # 0, 0.1, 0.2, 0.4 and 0.8 s.
        assert time.monotonic() - began_at > 1.4
        (line,) = lines("looking for the learner")
        assert line.endswith("again: it says 'who are you?'")
        session.grant(1)
        while (get := scene.learner.weights.find(Get)).message.session != session.id:
            pass
        get.answer(Grant(session.id, 1, 0, *V1, []))
        assert not lines("back at work")
        get.answer(*reply_of(weights_of(1, V1)))
    actor.do(actor.pump_until, lambda: lines("back at work"))


@pytest.mark.usefixtures("impatient")
def test_one_that_never_grants_anything_is_told_of(scene, lines):
    actor = scene.actor()
    scene.join(actor, ACTOR_SPEC, lease_s=0.4)
    with actor.pumping():
        for _ in range(2):
            scene.welcome_back(lease_s=0.4)
    (line,) = lines("grants nothing yet")
    assert line.startswith(f"the learner at {scene.learner.url}")
    assert not lines("back at work")


def test_words_without_meaning_change_nothing_and_are_a_line_of_each_kind(scene, lines):
    actor = scene.actor()
    connected = actor.begin(actor.client.connect)
    hello = scene.learner.data.hear(Hello)
    for _ in range(50):
        hello.answer_raw(b"\xc1")
        hello.answer(reject("full", "come later", 0.0))
    scene.learner.welcome(hello, settings_of("noisy:Env"))
    connected.result(WITHIN_S)
    joined = actor.begin(actor.client.join, *ACTOR_SPEC)
    session = Session(scene.learner.data.find(Spec), actor.client.side.welcome)
    joined.result(WITHIN_S)
    refused = [[seq, VERDICTS.index("nonfinite")] for seq in range(3)]
    session.grant(0)
    with actor.pumping():
        for _ in range(50):
            session.say_raw(b"\xc1")
            session.reject("bad_message", "what?")
            session.say(Hello(1, bytes(16), "", bytes(16), 0, 0))
            session.grant(0, verdicts=refused)
        session.grant(1)
    actor.do(actor.unroll)
    assert seq_of(scene.data_of(actor)) == 0
    for said in ("is not understood", "the learner refuses us for now: come later"):
        assert len(lines(said)) == 1
    assert len(lines("the learner refused a message: what?")) == 1
    (line,) = lines("the learner refuses trajectories of")
    assert "of noisy:Env: an observation, a reward, an action or its log-probability in" in line


@pytest.mark.usefixtures("impatient")
def test_a_weights_port_that_cannot_be_reached_is_named(scene, lines):
    actor = scene.actor()
    with socket.socket() as taken:
        # Nobody else gets this port, and nobody listens there.
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        session = scene.join(actor, ACTOR_SPEC, weights_port=port, lease_s=1.0)
        session.grant(1)
        newest = actor.begin(actor.client.newest)
        scene.welcome_back(weights_port=port)
        actor.stop.set()
        with pytest.raises(RunFinished):
            newest.result(WITHIN_S)
    at = f"tcp://127.0.0.1:{port}"
    assert lines(f"still waiting for weights from {at}")[0].endswith("s): it has not answered")
    assert lines(f"again: its weights port, {at}, has not answered for 1 s")
    assert not lines("back at work")


def test_a_data_port_that_is_lost_though_heartbeats_are_answered_is_left(scene, lines):
    actor, session = scene.at_work(lease_s=0.4, heartbeat_s=0.05)
    session.grant(1)
    actor.do(actor.unroll)
    over_at = time.monotonic() + WITHIN_S
    with actor.pumping():
        # The trajectory goes, and goes again, into nothing.
        while not lines("again: its data port") and time.monotonic() < over_at:
            for heard in scene.learner.weights.drain():
                # The actor may have left this connection meanwhile.
                heard.try_to_answer(Grant(session.id, 1, 0, *V1, []))
            time.sleep(0.02)
        session = scene.welcome_back()
        session.grant(1)
        assert seq_of(scene.learner.data.find(Data)) == 0
    (line,) = lines("again: its data port")
    assert f"{scene.learner.url}, has not answered for 0.8" in line


def test_a_weights_port_that_is_lost_while_trajectories_are_taken_is_left(scene, lines):
    actor, session = scene.at_work(lease_s=0.4, heartbeat_s=0.05)
    scene.learner.weights.find(Heartbeat).answer(Grant(session.id, 1, 0, *V1, []))
    over_at = time.monotonic() + WITHIN_S
    with actor.pumping():
        while not lines("again: its weights port") and time.monotonic() < over_at:
            session.grant(1)
            time.sleep(0.02)
        scene.welcome_back()
    (line,) = lines("again: its weights port")
    assert f"{scene.learner.weights.router.url}, has not answered for" in line


# -------------------- it wants a key


def test_with_the_key_all_is_as_without_one(locked_scene, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, locked_scene.key.text)
    actor, session = locked_scene.at_work(2)
    locked_scene.give(V1)
    session.grant(2, settled=2, version=V1)
    actor.pump_until(lambda: actor.client.newest() is not None)


def test_without_the_key_that_is_wanted_there_is_no_wait(locked_scene, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    actor = locked_scene.actor()
    with pytest.raises(NotAllowedError, match="wants the key of its run: set IMPALA_ASYNC_KEY"):
        actor.do(actor.client.connect)


def test_who_has_no_key_is_not_believed_by_one_that_has(scene, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
    actor = scene.actor(connect_s=3.0)
    with pytest.raises(UnreachableError, match="it has no key, and we have one: it is not the"):
        actor.do(actor.client.connect)


def test_something_else_at_the_port_of_a_learner_that_is_gone_is_a_wait(
    scene, monkeypatch, lines, impatient
):
    """A learner with a key has the port for a while, as any service may that speaks by ZeroMQ."""
    monkeypatch.setattr("impala_async.output.AFTER_S", 0.1)
    actor, session = scene.at_work()
    url = scene.learner.url
    session.bye("restarting")
    pumped = pump(actor)
    scene.learner.data.hear(ByeOk)
    scene.learner.close()
    bound = []

    def bind():
        with suppress(ConfigError):  # the port is given back a little later
            bound.append(Router(scene.context, url, None, 1 << 20, new_key()))
        return bound

    until(bind)
    try:
        until(lambda: lines(f"no learner answers at {url} yet"))
        until(lambda: lines("it wants a key"))
        assert not pumped.done()
    finally:
        bound[0].close()
    actor.stop.set()
    with pytest.raises(RunFinished):
        pumped.result(WITHIN_S)


def test_another_key_is_told_as_what_it_may_be(locked_scene, monkeypatch, impatient):
    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
    actor = locked_scene.actor(connect_s=2.0)
    with pytest.raises(UnreachableError, match="the key that we have is not that of its run"):
        actor.do(actor.client.connect)


def test_a_folder_that_tells_of_its_key_later_is_waited_for(locked_scene, tmp_path):
    """A run that goes on with a key: the word of it comes after the learner has begun to listen."""
    settings = {"run_id": locked_scene.learner.run_id.hex(), "config": {}}
    settings = {"run_id": locked_scene.learner.run_id.hex(), "config": {}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    folder = RunFolder(tmp_path)
    folder.announce(locked_scene.learner.url, "tcp://h:8", 1)
    actor = locked_scene.actor(where=tmp_path)
    connected = actor.begin_connect()
    until(lambda: actor.client._dealer is not None and actor.client._dealer.is_key_one_sided)
    folder.keep_key(locked_scene.key.text)
    folder.announce(locked_scene.learner.url, "tcp://h:8", 1, is_encrypted=True)
    locked_scene.learner.welcome(locked_scene.learner.data.hear(Hello), settings_of())
    connected.result(WITHIN_S)
