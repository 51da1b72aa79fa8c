"""What answers at the address is no learner, or a broken one: the actor waits, and says little."""

import socket
import time

import pytest

from impala_async.actor.sending import Finished
from impala_async.weights import NO_VERSION
from impala_async.wire import actor_side
from impala_async.wire.messages import (
    Get,
    Grant,
    Hello,
    NotModified,
    Spec,
    WeightsReply,
)
from impala_async.wire.session import reject
from tests.actor.scripted import (
    ACTOR_SPEC,
    V1,
    Session,
    reply_of,
    settings_of,
    weights_of,
)
from tests.proxy import HOST, proxy
from tests.wire.ends import until

pytestmark = pytest.mark.usefixtures("quick_hellos")

MANY = 50


@pytest.fixture(autouse=True)
def all_lines(caplog):
    caplog.set_level("INFO")


def unroll(actor):
    actor.client.send(Finished(actor.client.take(), V1, []))


def of_session(scene, session, kind):
    """What it says at the weights port: those of former sessions may wait there too."""
    while (heard := scene.learner.weights.find(kind)).message.session != session.id:
        pass
    return heard


def test_one_that_welcomes_and_sends_away_again_is_asked_ever_less_often(scene, caplog):
    actor = scene.actor()
    session = scene.join(actor, ACTOR_SPEC)
    with actor.pumping():
        began_at = time.monotonic()
        for _ in range(5):
            session.reject("hello_again", "who are you?")
            session = scene.welcome_back()
        # 0, 0.1, 0.2, 0.4 and 0.8 s.
        assert time.monotonic() - began_at > 1.4
        assert "back at work" not in caplog.messages
        (line,) = [each for each in caplog.messages if each.startswith("looking for the learner")]
        assert line.endswith("again: it says 'who are you?'")
        session.grant(1)
        get = of_session(scene, session, Get)
        get.answer(Grant(session.id, 1, 0, *V1, []))
        assert "back at work" not in caplog.messages
        get.answer(*reply_of(weights_of(1, V1)))
    actor.do(actor.pump_until, lambda: "back at work" in caplog.messages)


def test_one_that_never_grants_anything_is_told_of(scene, monkeypatch, caplog):
    monkeypatch.setattr("impala_async.actor.client.AFTER_S", 0.1)
    actor = scene.actor()
    scene.join(actor, ACTOR_SPEC, lease_s=0.4)
    with actor.pumping():
        for _ in range(2):
            scene.welcome_back(lease_s=0.4)
    (line,) = [each for each in caplog.messages if "grants nothing yet" in each]
    assert line.startswith(f"the learner at {scene.learner.url}")
    assert "back at work" not in caplog.messages


def test_words_without_pause_are_a_line_of_each_kind(scene, caplog):
    actor = scene.actor()
    session = scene.join(actor, ACTOR_SPEC)
    session.grant(0)
    with actor.pumping():
        for _ in range(MANY):
            session.say_raw(b"\xc1")
            session.reject("bad_message", "what?")
        session.grant(1)
    actor.do(unroll, actor)
    scene.data_of(actor)
    assert caplog.text.count("is not understood") == 1
    assert caplog.text.count("the learner refused a message: what?") == 1


def test_so_it_is_before_a_welcome(scene, caplog):
    actor = scene.actor()
    connected = actor.begin(actor.client.connect)
    hello = scene.learner.data.hear(Hello)
    for _ in range(MANY):
        hello.answer_raw(b"\xc1")
        hello.answer(reject("full", "come later", 0.0))
    scene.learner.welcome(hello, settings_of())
    connected.result(10)
    assert caplog.text.count("is not understood") == 1
    assert caplog.text.count("the learner refuses us for now: come later") == 1


def test_noise_is_no_sign_of_life(scene):
    actor = scene.actor()
    session = scene.join(actor, ACTOR_SPEC, lease_s=0.5)
    session.grant(0)
    spoken = [session._spec]
    with actor.pumping():
        give_up_at = time.monotonic() + 10
        heard = []
        while not heard and time.monotonic() < give_up_at:
            # Not `answer`: the connections may be closed by now.
            for told in (*spoken, *scene.learner.weights.drain()):
                told.router.send(told.route, [b"\xc1"])
            heard = [each.message for each in scene.learner.data.drain()]
            time.sleep(0.01)
        assert isinstance(heard[0], Hello)
        scene.welcome_back()


def test_one_that_hangs_up_hears_hello_ever_less_often(scene, monkeypatch):
    monkeypatch.setattr(actor_side, "HELLO_EVERY_S", 100.0)
    with proxy(scene.learner.url) as network:
        actor = scene.actor(host=HOST)
        connected = actor.begin(actor.client.connect)
        began_at = time.monotonic()
        for _ in range(4):
            scene.learner.data.hear(Hello)
            network.reset()
        hello = scene.learner.data.hear(Hello)
        # 0, 0.1, 0.2 and 0.4 s.
        assert time.monotonic() - began_at > 0.6
        scene.learner.welcome(hello, settings_of())
        connected.result(10)


def test_so_does_one_that_hangs_up_in_a_session(scene):
    with proxy(scene.learner.url, scene.learner.weights.router.url) as network:
        actor = scene.actor(host=HOST)
        session = scene.join(actor, ACTOR_SPEC, lease_s=60.0)
        session.grant(1)
        began_at = time.monotonic()
        with actor.pumping():
            for _ in range(5):
                network.reset()
                spec = scene.learner.data.hear(Spec)
            assert time.monotonic() - began_at > 0.6
            Session(spec, session.welcome).grant(1)
        actor.do(unroll, actor)
        assert scene.data_of(actor).message.session == session.id


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("impala_async.actor.client.AFTER_S", 0.1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "it has not answered"),
        (NotModified(*NO_VERSION), "it says that it has none yet"),
        (NotModified(2**31, 2**62), f"it says that it has {2**31}.{2**62}, but none for us yet"),
        (reject("bad_message", "no\x1b[31m!"), "it refuses: no\\x1b[31m!"),
        (
            WeightsReply(0, 0, *reply_of(weights_of(1, V1))[0][2:]),
            "it sends 0.0, which is not newer",
        ),
    ],
)
def test_who_waits_for_weights_says_so(scene, answer, says, caplog):
    actor = scene.actor()
    session = scene.join(actor, ACTOR_SPEC)
    get = of_session(scene, session, Get)
    get.answer(Grant(session.id, 1, 0, *NO_VERSION, []))
    if answer is not None:
        get.answer(answer, *[reply_of(weights_of(1, V1))[1]] * isinstance(answer, WeightsReply))
    until(lambda: actor.client.link.pulls.has_heard and actor.client.link.pulls.answer == says)
    newest = actor.begin(actor.client.newest)
    wanted = f"still waiting for weights from {actor.client.link.url}"
    until(lambda: wanted in caplog.text)
    (line,) = [each for each in caplog.messages if each.startswith(wanted)]
    assert line.endswith(f"s): {says}")
    get.answer(*reply_of(weights_of(1, V1)))
    newest.result(10)


@pytest.mark.usefixtures("impatient")
def test_a_weights_port_that_cannot_be_reached_is_named(scene, caplog):
    actor = scene.actor()
    with socket.socket() as taken:
        # Nobody else gets this port, and nobody listens there.
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        session = scene.join(actor, ACTOR_SPEC, weights_port=port, lease_s=1.0)
        session.grant(1)
        with actor.pumping():
            scene.welcome_back(weights_port=port).grant(1)
        actor.do(actor.client.pump, 0.1)
    at = f"tcp://127.0.0.1:{port}"
    assert f"weights port has not answered at {at} yet" in caplog.text
    assert f"again: its weights port, {at}, has not answered for 1 s" in caplog.text
    assert "back at work" not in caplog.messages
