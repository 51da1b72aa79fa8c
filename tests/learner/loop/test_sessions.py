"""Everything that an actor says except its trajectories, over real sockets."""

from collections.abc import Callable, Sequence

import pytest

from impala_async import __version__
from impala_async.metrics.report import merge
from impala_async.wire.codec import Frame, decode_weights
from impala_async.wire.messages import (
    PROTOCOL,
    Bye,
    ByeOk,
    Get,
    Grant,
    Heartbeat,
    Hello,
    Message,
    NotModified,
    Spec,
    WeightsReply,
    unpack,
)
from impala_async.wire.sockets import Router
from tests.learner.hand_actor import LAYOUT, Actor, until
from tests.learner.server_harness import RUN_ID, ServerHarness

Make = Callable[..., ServerHarness]


async def test_a_welcome_says_what_an_actor_must_know(make_harness: Make) -> None:
    harness = make_harness(learner={"lease_s": 7, "batch_columns": 6})
    first, second = harness.actor(), harness.actor()
    await first.hello()
    await second.hello()
    welcome = first.welcome
    assert welcome is not None
    assert second.welcome is not None
    assert (welcome.run_id, welcome.epoch) == (RUN_ID, 1)
    assert (welcome.lease_s, welcome.heartbeat_s, welcome.max_columns) == (7, 1.4, 6)
    assert (welcome.rank, second.welcome.rank) == (0, 1)
    assert welcome.session != second.welcome.session
    assert harness.count("sessions/opened") == 2
    # It has not joined before its Spec came.
    assert harness.count("num_actors") == 0


async def test_a_hello_that_is_answered_again_opens_nothing(make_harness: Make) -> None:
    harness = make_harness()
    actor = harness.actor()
    for _ in range(3):
        await actor.hello()
    assert harness.count("sessions/opened") == 1 == len(harness.server.table)


async def test_another_protocol_is_refused_with_both_versions(make_harness: Make) -> None:
    harness = make_harness()
    actor = harness.actor()
    await actor.hello(protocol=PROTOCOL + 6)
    text = await actor.refused("protocol")
    assert str(PROTOCOL) in text
    assert str(PROTOCOL + 6) in text
    assert actor.rejects[0].retry_after_s < 0
    assert harness.count("sessions/refused") == 1
    assert len(harness.server.table) == 0


async def test_another_build_is_welcome_and_noted(
    make_harness: Make, caplog: pytest.LogCaptureFixture
) -> None:
    actor = make_harness().actor()
    await actor.hello(build="9.9\nall is well")
    assert "all is well" not in caplog.text  # a hello costs nothing, and is not worth a line
    await actor.spec()
    await actor.hear(lambda: bool(actor.grants))
    assert rf"9.9\nall is well, the learner {__version__}" in caplog.text


async def answer_on_weights(actor: Actor, message: Message) -> list[bytes]:
    actor.others.clear()
    await actor.beat(message)
    await actor.hear(lambda: bool(actor.others))
    return actor.others[0]


async def test_weights_are_pulled(make_harness: Make) -> None:
    harness = make_harness()
    weights = harness.publish(12)
    actor = await harness.join()
    frames = await answer_on_weights(actor, Get(actor.session, 1, 11))
    reply = unpack(frames[0])
    assert isinstance(reply, WeightsReply)
    assert reply.layout_digest == LAYOUT
    assert decode_weights(reply, frames).buffer.tolist() == weights.buffer.tolist()
    (frame,) = await answer_on_weights(actor, Get(actor.session, 1, 12))
    assert unpack(frame) == NotModified(1, 12)
    assert (harness.count("weights/served"), harness.count("weights/not_modified")) == (1, 1)


async def test_a_session_has_one_connection_for_weights(make_harness: Make) -> None:
    """Each of many that read nothing would keep weights of its own."""
    harness = make_harness()
    harness.publish(12)
    actor = await harness.join()
    await answer_on_weights(actor, Get(actor.session, 1, 11))
    assert harness.count("wire/cut") == 0
    other = harness.actor()
    await other.beat(Get(actor.session, 1, 11))
    await other.hear(lambda: bool(other.others))
    assert harness.count("wire/cut") == 1
    await answer_on_weights(other, Get(actor.session, 1, 11))
    assert harness.count("wire/cut") == 1


async def test_a_heartbeat_is_answered_with_what_the_actor_may_do(make_harness: Make) -> None:
    harness = make_harness()
    actor = await harness.join()
    await actor.credit()
    actor.grants.clear()
    harness.publish(5)
    await actor.beat(Heartbeat(actor.session, {}))
    await actor.hear(lambda: bool(actor.grants))
    assert actor.grants == [Grant(actor.session, 1, 0, 1, 5, [])]


async def test_timers_are_medians_over_the_actors_that_are_there(make_harness: Make) -> None:
    harness = make_harness()
    actors = [await harness.join() for _ in range(3)]
    for actor, ms in zip(actors, (1, 3.0, 1e11), strict=True):
        await actor.hear(lambda actor=actor: bool(actor.grants))
        actor.grants.clear()
        await actor.beat(
            Heartbeat(actor.session, {"env_time_ms": ms, "unheard_of": 1.0, "send_wait_ms": -1.0})
        )
        await actor.hear(lambda actor=actor: bool(actor.grants))
    report = merge(harness.server.report())
    # Nothing takes that long, or less than no time.
    assert report["actor/env_time_ms"] == 2.0
    assert report["actor/send_wait_ms"] is None
    assert report["actor/act_time_ms"] is None
    # One comes back under a new session, one leaves: what they once said is of no account.
    await actors[2].join()
    await actors[1].say(Bye(actors[1].session, 2))
    await until(lambda: harness.count("sessions/closed") == 1)
    assert harness.count("actor/env_time_ms") == 1.0


async def test_what_an_actor_died_of_is_told(
    make_harness: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    harness = make_harness()
    actor = await harness.join()
    await actor.say(Bye(actor.session, 2, "EnvError: it broke\nactor 7 joined"))
    await until(lambda: harness.count("num_actors") == 0)
    why = "EnvError: it broke\\nactor 7 joined"
    assert f"actor 0 is gone: it died of {why}" in caplog.text
    assert "goodbye" not in caplog.text
    assert merge(harness.server.report())["actor/last_death"] == f"actor 0 died of {why}"


async def test_an_environment_that_hangs_is_told_and_reported(
    make_harness: Make, caplog: pytest.LogCaptureFixture
) -> None:
    harness = make_harness()
    actor = await harness.join()
    (peer,) = harness.server.table
    peer.opened_at -= 11.5
    # No longer than its session.
    hang = {"hang_s": 1e11, "hang_in": 0, "hang_first": 3, "hang_last": 3}
    await actor.beat(Heartbeat(actor.session, hang))
    await until(lambda: merge(harness.server.report())["actor/hang"] is not None)
    assert "environment 3 of actor 0 has been in step for 12 s" in caplog.text


async def test_bye_is_answered_and_ends_the_session(make_harness: Make) -> None:
    harness = make_harness()
    actor = await harness.join()
    await actor.say(Bye(actor.session, 2))
    await actor.hear(lambda: bool(actor.others))
    assert unpack(actor.others[0][0]) == ByeOk(actor.session)
    assert harness.count("sessions/closed") == 1
    assert harness.count("num_actors") == 0
    assert harness.count("credit/granted_columns") == 0


async def test_a_goodbye_of_who_never_joined_is_no_line_and_no_death(
    make_harness: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    harness = make_harness()
    for text in ("", "EnvError: it was not made"):
        actor = harness.actor()
        await actor.hello()
        await actor.say(Bye(actor.session, 2, text))
        await actor.hear(lambda actor=actor: bool(actor.others))
    assert caplog.messages == []
    assert merge(harness.server.report())["actor/last_death"] is None


@pytest.mark.parametrize("message", [Spec, Get, Heartbeat])
async def test_an_unknown_session_is_counted_and_told_to_say_hello(
    make_harness: Make, message: type[Message]
) -> None:
    harness = make_harness()
    actor = harness.actor()
    nobody = b"?" * 16
    if message is Spec:
        await actor.say(Spec(nobody, nobody, nobody, 1, 1), b"{}")
    elif message is Get:
        await actor.beat(Get(nobody, 1, 1))
    else:
        await actor.beat(Heartbeat(nobody, {}))
    await actor.refused("hello_again")
    assert actor.rejects[0].retry_after_s == 0
    assert harness.count("bad/unknown_session") == 1


async def test_a_goodbye_to_a_session_that_is_over_changes_nothing(make_harness: Make) -> None:
    harness = make_harness()
    actor = await harness.join()
    await actor.say(Bye(b"?" * 16, 0))
    await actor.say(ByeOk(b"?" * 16))
    await actor.send()
    assert harness.count("wire/bad") == 0
    assert harness.count("num_actors") == 1


@pytest.mark.parametrize("port", ["data", "weights"])
@pytest.mark.parametrize("kind", ["Grant", "NotModified", "other port"])
async def test_messages_of_a_learner_or_of_the_other_port_are_not_allowed(
    make_harness: Make, port: str, kind: str
) -> None:
    harness = make_harness()
    actor = await harness.join()
    messages: dict[str, Message] = {
        "Grant": Grant(actor.session, 1, 0, 1, 0, []),
        "NotModified": NotModified(1, 1),
        "other port": Get(actor.session, 1, 1) if port == "data" else ByeOk(actor.session),
    }
    await actor.say(messages[kind], to=getattr(actor, port))
    assert (await actor.refused("bad_message")).startswith("not_allowed_now")
    assert harness.count("bad/not_allowed_now") == 1
    assert harness.count("num_actors") == 1


async def test_a_hello_at_the_weights_port_is_told_by_a_code_of_its_own(
    make_harness: Make,
) -> None:
    harness = make_harness()
    lost = harness.actor()
    await lost.beat(Hello(PROTOCOL, lost.uuid, "b", bytes(16), 0, 0))
    await lost.refused("wrong_port")
    assert harness.count("bad/not_allowed_now") == 1


async def test_weights_that_cannot_be_sent_now_are_to_be_asked_for_again(
    make_harness: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness()
    actor = await harness.join()
    send = Router.send

    def send_small(router: Router, route: bytes, frames: Sequence[Frame]) -> bool:
        return len(frames) == 1 and send(router, route, frames)

    monkeypatch.setattr(Router, "send", send_small)
    await actor.beat(Get(actor.session, 0, 0))
    await actor.hear(lambda: bool(actor.others))
    assert unpack(actor.others[0][0]) == NotModified(1, 0)


async def test_a_learner_that_ends_welcomes_nobody(make_harness: Make) -> None:
    harness = make_harness(is_open=False)
    known, late = harness.actor(), harness.actor()
    await known.hello()
    harness.server.close_admission()
    await known.spec()
    await late.say(Hello(PROTOCOL, late.uuid, "b", bytes(16), 0, 0))
    await late.say(b"nonsense")
    await late.hear(lambda: bool(late.rejects))
    assert harness.schemas == []
    assert known.grants == []
    assert late.welcome is None


async def test_an_expired_session_ends_whether_it_ever_joined_or_not(
    make_harness: Make, caplog: pytest.LogCaptureFixture
) -> None:
    harness = make_harness(learner={"lease_s": 1})
    actor, stranger = await harness.join(), harness.actor()
    await stranger.hello()

    def is_over() -> bool:
        harness.server.reap()
        return len(harness.server.table) == 0

    await until(is_over, "both leases over")
    assert harness.count("sessions/expired") == 2
    # Of who never was one, nobody says that it is gone.
    assert [m for m in caplog.messages if "gone" in m] == ["actor 0 is gone: its lease is over"]
    await actor.beat(Heartbeat(actor.session, {}))
    await actor.refused("hello_again")
