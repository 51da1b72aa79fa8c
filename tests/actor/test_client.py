"""An actor at work: credit, buffers, weights, and the lockstep of all three."""

import math
import random
import time

import numpy as np
import pytest

from impala_async.actor.client import RunFinished
from impala_async.actor.joining import is_compressed
from impala_async.actor.unroll import Finished
from impala_async.config.run import PaceSection, TrainSection
from impala_async.errors import MismatchError
from impala_async.weights import NO_VERSION, Version
from impala_async.wire import messages as wire
from impala_async.wire.peer import WINDOW
from tests.actor.fakes import schema_of
from tests.actor.scripted import (
    LAYOUT,
    V1,
    WITHIN_S,
    body_of,
    reply_of,
    seq_of,
    settings_of,
    weights_of,
)
from tests.wire.ends import until

MANY = 1000


def spec_of(rows=3, streams=1):
    return schema_of(rows), [LAYOUT], 2, streams


def version_of(update):
    return Version(1, update)


def test_no_more_goes_than_was_granted_and_a_buffer_waits_for_credit(scene, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr("impala_async.actor.client.EVERY_S", 0.05)
    actor, session = scene.at_work(spec=spec_of(streams=2), heartbeat_s=0.1)
    actor.do(actor.unroll, 0)
    for _ in range(5):
        actor.do(actor.client.pump, 0)
    assert scene.learner.data.drain() == []
    taken = actor.begin(actor.client.take_buffer)
    assert scene.stays_blocked(taken)
    assert f"the learner at {scene.learner.url} has granted nothing more for 0 s" in caplog.messages
    session.grant(1)
    buffer = taken.result(WITHIN_S)
    data = scene.learner.data.hear(wire.Data).message
    assert data._replace(body=None) == wire.Data(session.id, 0, *V1, 3, 2, 0, 0, None)
    send_wait_s, _ = actor.do(actor.client.take_waits)
    assert send_wait_s > 0.1
    assert actor.do(actor.client.take_waits) == (0.0, 0.0)
    actor.do(actor.client.send, Finished(buffer, V1, []))
    for _ in range(5):
        actor.do(actor.client.pump, 0)
    for _ in range(2):
        actor.do(actor.client.leave)
    # Its next message is this one, so it has sent nothing else.
    assert scene.learner.data.hear(wire.Bye).message == wire.Bye(session.id, 2)
    assert scene.learner.data.drain() == []


def test_a_long_wait_for_credit_is_told_while_it_lasts(scene, monkeypatch):
    actor, session = scene.at_work(heartbeat_s=0.1)
    actor.client.timers["send_wait_ms"] = 1.0
    actor.do(actor.unroll)
    taken = actor.begin(actor.client.take_buffer)
    beat = lambda: scene.learner.weights.find(wire.Heartbeat).message  # noqa: E731
    for _ in range(3):
        assert beat().timers.get("send_wait_ms", 1.0) == 1.0
    monkeypatch.setattr("impala_async.actor.client.LONG_WAIT_S", 0.1)
    while beat().timers.get("send_wait_ms", 0.0) < 100.0:
        pass
    session.grant(1)
    taken.result(WITHIN_S)
    # It is over, which is told at once: a heartbeat may stand for many updates.
    scene.learner.weights.find(wire.Heartbeat)
    while beat().timers["send_wait_ms"] != 1.0:
        pass


def test_where_a_learner_is_full_trajectories_are_begun_later_and_hardly_wait(scene):
    actor, session = scene.at_work()
    begun_at, num, every_s = [], 12, 0.2

    def unroll_all():
        for _ in range(num + 2):
            buffer = actor.client.take_buffer()
            begun_at.append(time.monotonic())
            actor.client.send(Finished(buffer, V1, []))

    done = actor.begin(unroll_all)
    ages = []
    for seq in range(num):
        time.sleep(every_s)
        session.grant(seq + 1, seq)
        scene.learner.data.hear(wire.Data)
        ages.append(time.monotonic() - begun_at[seq])
    # A while of full waits comes first.
    assert ages[1] > 0.9 * every_s
    assert max(ages[-4:]) < 0.6 * every_s
    session.grant(num + 2, num)
    resumed_at = time.monotonic()
    done.result(WITHIN_S)
    assert time.monotonic() - resumed_at < every_s


def test_a_long_wait_before_a_trajectory_is_begun_is_told_too(scene, caplog, monkeypatch):
    caplog.set_level("INFO")
    for name, value in ("HOLD_SHARE", math.inf), ("EVERY_S", 0.05), ("LONG_WAIT_S", 0.05):
        monkeypatch.setattr(f"impala_async.actor.client.{name}", value)
    actor, session = scene.at_work(3, heartbeat_s=0.1)
    actor.client.timers["send_wait_ms"] = 1.0
    session.grant(3, 3)
    actor.do(actor.pump_until, lambda: not actor.client.side.outbox)
    caplog.clear()
    taken = actor.begin(actor.client.take_buffer)
    told = f"the learner at {scene.learner.url} has granted nothing more for 0 s"
    until(lambda: told in caplog.messages)
    assert scene.stays_blocked(taken)
    assert scene.learner.weights.find(wire.Heartbeat).message.timers["send_wait_ms"] > 50.0
    session.grant(4, 3)
    taken.result(WITHIN_S)


def test_an_actor_whose_messages_do_not_fit_into_memory_says_what_to_lower(scene):
    actor = scene.actor()
    with pytest.raises(MismatchError, match=r"wants \d+\.0 GiB of .* lower trajectory\.rows"):
        actor.do(actor.client.join, *spec_of(streams=2**40))


# Inline; as frames of their own that are copied; and that are not.
@pytest.mark.parametrize("rows", [3, 500, 8000])
def test_a_buffer_is_written_to_only_when_it_is_settled(scene, rows):
    """The learner reads late and settles as it likes; what it reads is what was sent."""
    rng = random.Random(rows)
    actor, session = scene.at_work(spec=spec_of(rows, streams=2))
    num_messages, settled, num_read = 60, 0, 0
    session.grant(MANY)
    in_use = {}

    def unroll_all():
        for seq in range(num_messages):
            buffer = actor.unroll(seq)
            # Only what the learner has settled may come back.
            assert all(owner < settled for owner, b in in_use.items() if b == id(buffer)), in_use
            in_use[seq] = id(buffer)

    done = actor.begin(unroll_all)
    while num_read < num_messages:
        for heard in scene.learner.data.drain():
            assert seq_of(heard) == num_read
            assert set(body_of(heard)) == {num_read}
            num_read += 1
        if num_read > settled:
            settled = rng.randint(settled, num_read)
            session.grant(MANY, settled)
    done.result(WITHIN_S)


@pytest.mark.parametrize("takes_s", [0.0, 1.0])
def test_credit_comes_over_the_weights_port_and_what_is_overdue_goes_again(
    takes_s, scene, caplog, monkeypatch
):
    """A message may be under way for so long that the thinnest line has taken it."""
    caplog.set_level("INFO")
    if takes_s:
        num_bytes = 2 * (WINDOW + 1) * schema_of(3).layout.column_bytes
        monkeypatch.setattr(wire, "SLOWEST_BYTES_PER_S", num_bytes / takes_s)
    actor, session = scene.at_work(lease_s=1.0, heartbeat_s=0.1)
    actor.do(actor.unroll, 7)
    heard, sent_at = [], None
    with actor.pumping():
        while len(heard) < 2:
            beat = scene.learner.weights.find(wire.Heartbeat)
            beat.answer(wire.Grant(session.id, 1, 0, *NO_VERSION, []))
            heard += scene.learner.data.drain()
            if heard and sent_at is None:
                sent_at = time.monotonic()
        # Joined is who is answered at the data port.
        session.grant(1)
    assert time.monotonic() - sent_at > takes_s + 0.8
    assert [seq_of(each) for each in heard] == [0, 0]
    assert body_of(heard[0]) == body_of(heard[1])
    assert f"nor refused for {1 + takes_s:.0f}" in caplog.text


def test_it_waits_for_weights_at_first_and_at_max_lag(scene):
    actor, session = scene.at_work(settings=settings_of(max_lag=3), heartbeat_s=0.1)
    newest = actor.begin(actor.client.newest)
    assert scene.stays_blocked(newest)
    scene.give(V1, have=NO_VERSION)
    assert newest.result(WITHIN_S).version == V1
    _, weights_wait_s = actor.do(actor.client.take_waits)
    assert weights_wait_s > 0.1
    assert actor.do(actor.client.newest) is None
    session.grant(1, version=version_of(3))
    actor.do(actor.pump_until, lambda: actor.client.link.pulls.is_asking)
    assert actor.do(actor.client.newest) is None
    scene.give(version_of(3), have=V1)
    actor.do(actor.client.link.wait_for_weights, WITHIN_S)
    assert actor.do(actor.client.newest).version == version_of(3)
    session.grant(1, version=version_of(6))
    actor.do(actor.pump_until, lambda: actor.client.link.pulls.is_asking)
    get = scene.learner.weights.find(wire.Get)
    assert get.message == wire.Get(session.id, *version_of(3))
    newest = actor.begin(actor.client.newest)
    assert scene.stays_blocked(newest)
    get.answer(*reply_of(weights_of(6, version_of(6))))
    assert newest.result(WITHIN_S).version == version_of(6)


@pytest.mark.parametrize("stage", ["connect", "take_buffer", "newest"])
def test_a_stop_is_heard_wherever_it_waits(scene, stage):
    if stage == "connect":
        actor = scene.actor()
    else:
        actor, _ = scene.at_work()
        actor.do(actor.unroll)
    waiting = actor.begin(getattr(actor.client, stage))
    if stage == "connect":
        scene.learner.data.hear(wire.Hello)
    stopped_at = time.monotonic()
    actor.stop.set()
    with pytest.raises(RunFinished):
        waiting.result(WITHIN_S)
    assert time.monotonic() - stopped_at < 2.0


# -------------------- what a message is


def test_a_message_has_the_version_and_the_episodes_of_its_trajectory(scene):
    actor, session = scene.at_work()
    session.grant(MANY)
    finished = Finished(actor.do(actor.client.take_buffer), Version(2, 9), [(1.5, 3), (-2.0, 8)])
    finished.buffer.small.fill(7)
    actor.do(actor.pump_until, lambda: actor.client.side.outbox.has_credit)
    actor.do(actor.client.send, finished)
    data = scene.learner.data.hear(wire.Data).message
    assert data._replace(body=None) == wire.Data(session.id, 0, 2, 9, 3, 2, 0, 2, None)
    planes = finished.buffer.obs.tobytes() + finished.buffer.small.tobytes()
    assert data.body[: len(planes)] == planes
    episodes = np.frombuffer(data.body[len(planes) :], wire.EPISODE)
    assert episodes.tolist() == [(1.5, 3), (-2.0, 8)]


def test_auto_compresses_what_leaves_the_host():
    for choice, url, wanted in (
        *(("auto", "tcp://learner.example:5555", True), ("auto", "tcp://10.0.0.7:5555", True)),
        *(("auto", "tcp://127.0.0.1:5555", False), ("auto", "tcp://localhost:5555", False)),
        *(("auto", "ipc://@impala", False), ("on", "ipc://@impala", True)),
        ("off", "tcp://learner.example:5555", False),
    ):
        assert is_compressed(choice, url) == wanted, (choice, url)


# -------------------- lockstep


def lockstep(lag):
    return settings_of(pace=PaceSection(mode="lockstep", lag=lag), train=TrainSection(num_actors=1))


def boundary(actor):
    """A trajectory boundary; the version that it brings."""
    weights = actor.client.newest()
    return weights and weights.version


def begin(scene, actor, update):
    """Its first weights, which serve one trajectory and as many more as the lag says."""
    first = actor.begin(boundary, actor)
    assert scene.stays_blocked(first)
    scene.give(version_of(update), have=NO_VERSION)
    assert first.result(WITHIN_S) == version_of(update)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.usefixtures("quick_hellos")
def test_after_a_lost_session_it_begins_anew(scene, lag):
    actor, session = scene.at_work(settings=lockstep(lag), heartbeat_s=0.1)
    session.grant(2)
    begin(scene, actor, 5)
    # One is under way, one is being unrolled.
    actor.do(actor.unroll)
    assert seq_of(scene.data_of(actor)) == 0
    buffer = actor.do(actor.client.take_buffer)
    session.reject("hello_again")
    with actor.pumping():
        again = scene.welcome_back(lockstep(lag), heartbeat_s=0.1)
    # A trajectory that was begun in the former session goes nowhere.
    actor.do(actor.client.send, Finished(buffer, version_of(5), []))
    again.grant(9, 1)
    actor.do(actor.client.pump, 0)
    begin(scene, actor, 9)
    for _ in range(lag):
        assert actor.do(boundary, actor) is None
    assert not any(isinstance(heard.message, wire.Data) for heard in scene.learner.data.drain())
    actor.do(actor.unroll)
    assert seq_of(scene.data_of(actor)) == 1
    # Every buffer came back.
    assert actor.do(actor.client.take_buffer) is not actor.do(actor.client.take_buffer)


@pytest.mark.usefixtures("quick_hellos")
def test_a_wait_for_all_others_is_told(scene, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr("impala_async.actor.client.EVERY_S", 0.05)
    actor, session = scene.at_work(settings=lockstep(0), heartbeat_s=0.1)
    session.grant(2)
    begin(scene, actor, 5)
    actor.do(actor.unroll)
    waiting = actor.begin(boundary, actor)
    until(lambda: "in lockstep all actors do their part first" in caplog.text)
    session.grant(2, 1, version_of(6))
    scene.give(version_of(6), have=version_of(5))
    assert waiting.result(WITHIN_S) == version_of(6)


@pytest.mark.usefixtures("quick_hellos")
def test_a_trajectory_that_others_wait_for_is_to_be_cut_and_the_next_one_is_not(scene):
    actor, session = scene.at_work(settings=lockstep(0), heartbeat_s=0.1)
    session.grant(2)
    begin(scene, actor, 5)
    client = actor.client
    buffer = actor.do(client.take_buffer)
    assert not client.is_to_cut()
    beat = scene.learner.weights.find(wire.Heartbeat)
    beat.answer(wire.Grant(session.id, 2, 0, *version_of(5), [], cut=0))
    until(client.is_to_cut)
    actor.do(client.send, Finished(buffer, version_of(5), [], 2))
    heard = scene.data_of(actor).message
    assert (heard.seq, heard.num_cut) == (0, 2)
    # It was heard once more, too late.
    assert not client.is_to_cut()
