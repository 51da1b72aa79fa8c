"""Everything that an actor says except its trajectories, over real sockets."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from impala_async import __version__
from impala_async.learner.desk import MAX_SCHEMA_BYTES
from impala_async.metrics.report import merge
from impala_async.spec import ArraySpec, ObsSpec, Schema
from impala_async.wire.codec import decode_weights
from impala_async.wire.messages import (
    PROTOCOL,
    REJECT_CODES,
    Bye,
    ByeOk,
    Get,
    Grant,
    Heartbeat,
    Message,
    NotModified,
    Spec,
    WeightsReply,
    unpack,
)
from tests.learner.world import LAYOUT, RUN_ID, Actor, Harbour, small_schema, until

Make = Callable[..., Harbour]
MISMATCH = REJECT_CODES.index("mismatch")


async def refused(actor: Actor, code: str) -> str:
    """The text of the refusal that comes."""
    await actor.hear(lambda: bool(actor.rejects))
    assert actor.rejects[0].code == REJECT_CODES.index(code)
    return actor.rejects[0].text


async def test_a_welcome_says_what_an_actor_must_know(make_harbour: Make) -> None:
    harbour = make_harbour(learner={"lease_s": 7, "heartbeat_s": 1.5, "batch_columns": 6})
    first, second = harbour.actor(), harbour.actor()
    await first.hello()
    await second.hello()
    welcome = first.welcome
    assert welcome is not None and second.welcome is not None
    assert (welcome.run_id, welcome.epoch) == (RUN_ID, 1)
    assert (welcome.lease_s, welcome.heartbeat_s, welcome.max_columns) == (7, 1.5, 6)
    assert (welcome.rank, second.welcome.rank) == (0, 1)
    assert welcome.session != second.welcome.session
    assert harbour.count("sessions/opened") == 2
    # It has not joined before its Spec came.
    assert harbour.count("num_actors") == 0


async def test_another_protocol_is_refused_with_both_versions(make_harbour: Make) -> None:
    harbour = make_harbour()
    actor = harbour.actor()
    await actor.hello(protocol=PROTOCOL + 6)
    text = await refused(actor, "protocol")
    assert str(PROTOCOL) in text and str(PROTOCOL + 6) in text
    assert actor.rejects[0].retry_after_s < 0
    assert harbour.count("sessions/refused") == 1 and len(harbour.front.table) == 0


async def test_another_build_is_welcome_and_noted(
    make_harbour: Make, caplog: pytest.LogCaptureFixture
) -> None:
    actor = make_harbour().actor()
    await actor.hello(build="9.9")
    assert actor.welcome is not None
    assert f"9.9, the learner {__version__}" in caplog.text


async def test_a_spec_that_fits_joins(make_harbour: Make) -> None:
    harbour = make_harbour()
    actor = await harbour.join(2)
    assert actor.grants[0].session == actor.session
    assert harbour.count("num_actors") == 1


def changed(schema: Schema, what: str) -> Schema:
    leaf = ArraySpec("", (3,), "float32")
    return {
        "shape": replace(schema, obs=ObsSpec((leaf,))),
        "dtype": replace(schema, obs=ObsSpec((ArraySpec("", (2,), "float64"),))),
        "rows": replace(schema, rows=4),
        "choices": replace(
            schema, action=type(schema.action)((replace(schema.action.parts[0], num_choices=9),))
        ),
    }[what]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("shape", ["obs", "(2,) here", "(3,) there"]),
        ("dtype", ["dtype", "float32 here", "float64 there"]),
        ("rows", ["rows: 3 here, 4 there"]),
        ("choices", ["num_choices: 3 here, 9 there"]),
    ],
)
async def test_a_schema_that_differs_is_refused_with_the_field_and_both_values(
    make_harbour: Make, what: str, says: list[str]
) -> None:
    harbour = make_harbour()
    actor = harbour.actor(schema=changed(harbour.schema, what))
    await actor.hello()
    await actor.spec()
    text = await refused(actor, "mismatch")
    assert all(part in text for part in says), text
    assert harbour.count("sessions/refused") == 1
    assert len(harbour.front.table) == 0


async def test_too_many_columns_are_refused_with_both_numbers(make_harbour: Make) -> None:
    harbour = make_harbour()
    actor = harbour.actor(5)
    await actor.hello()
    await actor.spec()
    text = await refused(actor, "mismatch")
    assert "actor.num_envs: 5" in text and "learner.batch_columns = 4" in text


async def test_another_model_is_refused(make_harbour: Make) -> None:
    harbour = make_harbour()
    actor = harbour.actor()
    await actor.hello()
    await actor.spec(layout=b"?" * 16)
    assert "model differs" in await refused(actor, "mismatch")


async def test_a_digest_of_something_else_is_refused(make_harbour: Make) -> None:
    actor = make_harbour().actor()
    await actor.hello()
    spec = Spec(actor.session, b"?" * 16, LAYOUT, 1, 1)
    await actor.say(spec, actor.schema.to_json())
    assert "digest" in await refused(actor, "mismatch")


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "wrong_frame_count"),
        ([small_schema().to_json(), b""], "wrong_frame_count"),
        ([b" " * (MAX_SCHEMA_BYTES + 1)], "wrong_size"),
        ([b""], "malformed_header"),
        ([b"{}"], "malformed_header"),
        ([b"[" * 60_000], "malformed_header"),
        ([b"\xff"], "malformed_header"),
        ([small_schema().to_json().replace(b"float32", b"object_")], "malformed_header"),
    ],
)
async def test_a_broken_spec_is_told_and_may_be_repeated(
    make_harbour: Make, frames: list[bytes], reason: str
) -> None:
    harbour = make_harbour()
    actor = harbour.actor()
    await actor.hello()
    await actor.say(Spec(actor.session, actor.schema.digest, LAYOUT, 1, 1), *frames)
    assert (await refused(actor, "bad_message")).startswith(reason)
    assert harbour.count(f"bad/{reason}") == 1
    await actor.spec()
    await actor.send()
    assert harbour.count("trajectories/admitted") == 1


async def test_a_second_spec_cannot_widen_the_credit_of_the_first(make_harbour: Make) -> None:
    harbour = make_harbour(num_slots=1)
    actor = await harbour.join(1)
    await actor.credit()
    actor.columns = 4
    await actor.spec()
    assert (await refused(actor, "bad_message")).startswith("not_allowed_now")
    actor.columns = 1
    await actor.spec()
    await actor.send()
    assert harbour.counts()["trajectories/admitted"] == 1


async def test_without_a_schema_the_first_actor_brings_it(make_harbour: Make) -> None:
    harbour = make_harbour(is_open=False)
    await harbour.join()
    assert harbour.schemas == [harbour.schema]
    other = harbour.actor(schema=changed(harbour.schema, "shape"))
    await other.hello()
    await other.spec()
    assert "(2,) here, (3,) there" in await refused(other, "mismatch")
    assert len(harbour.schemas) == 1


def edited(schema: Schema, **fields: object) -> bytes:
    return json.dumps({**json.loads(schema.to_json()), **fields}).encode()


@pytest.mark.parametrize(
    "fields",
    [
        {"obs": {"leaves": []}},
        {"action": {"parts": []}},
        {"obs": {"leaves": [{"name": "", "shape": [2**30, 2**30], "dtype": "float64"}]}},
    ],
)
async def test_a_schema_that_nobody_can_hold_is_refused_before_anything_is_built(
    make_harbour: Make, fields: dict[str, object]
) -> None:
    harbour = make_harbour(is_open=False)
    actor = harbour.actor()
    await actor.hello()
    text = edited(harbour.schema, **fields)
    await actor.say(Spec(actor.session, bytes(16), LAYOUT, 1, 1), text)
    await refused(actor, "bad_message")
    assert harbour.schemas == []


@pytest.mark.parametrize(
    ("rows", "columns", "says"),
    [(4, 1, "trajectory.rows: 3 here, 4 there"), (3, 5, "learner.batch_columns = 4")],
)
async def test_a_first_actor_that_does_not_fit_decides_nothing(
    make_harbour: Make, rows: int, columns: int, says: str
) -> None:
    harbour = make_harbour(is_open=False)
    actor = harbour.actor(columns, schema=replace(harbour.schema, rows=rows))
    await actor.hello()
    await actor.spec()
    assert says in await refused(actor, "mismatch")
    assert harbour.schemas == []


async def answer_on_weights(actor: Actor, message: Message) -> list[bytes]:
    actor.others.clear()
    await actor.beat(message)
    await actor.hear(lambda: bool(actor.others))
    return actor.others[0]


async def test_weights_are_pulled(make_harbour: Make) -> None:
    harbour = make_harbour()
    weights = harbour.publish(12)
    actor = await harbour.join()
    frames = await answer_on_weights(actor, Get(actor.session, 1, 11))
    reply = unpack(frames[0])
    assert isinstance(reply, WeightsReply) and reply.layout_digest == LAYOUT
    assert decode_weights(reply, frames).buffer.tolist() == weights.buffer.tolist()
    (frame,) = await answer_on_weights(actor, Get(actor.session, 1, 12))
    assert unpack(frame) == NotModified(1, 12)
    assert (harbour.count("weights/served"), harbour.count("weights/not_modified")) == (1, 1)


async def test_a_heartbeat_is_answered_with_what_the_actor_may_do(make_harbour: Make) -> None:
    harbour = make_harbour()
    actor = await harbour.join()
    await actor.credit()
    actor.grants.clear()
    harbour.publish(5)
    await actor.beat(Heartbeat(actor.session, {}))
    await actor.hear(lambda: bool(actor.grants))
    assert actor.grants == [Grant(actor.session, 2, 0, 1, 5, [])]


async def test_timers_are_means_over_the_actors_that_are_there(make_harbour: Make) -> None:
    harbour = make_harbour()
    actors = [await harbour.join() for _ in range(3)]
    for actor, ms in zip(actors, (1, 2.0, 6.0), strict=True):
        await actor.hear(lambda actor=actor: bool(actor.grants))  # type: ignore[misc]
        actor.grants.clear()
        await actor.beat(Heartbeat(actor.session, {"env_time_ms": ms, "unheard_of": 1.0}))
        await actor.hear(lambda actor=actor: bool(actor.grants))  # type: ignore[misc]
    report = merge(harbour.front.report())
    assert report["actor/env_time_ms"] == 3.0
    assert report["actor/act_time_ms"] is None
    # One comes back under a new session, one leaves: what they once said is of no account.
    await actors[2].join()
    await actors[1].say(Bye(actors[1].session, 2))
    await until(lambda: harbour.count("sessions/closed") == 1)
    assert harbour.count("actor/env_time_ms") == 1.0


async def test_bye_is_answered_and_ends_the_session(make_harbour: Make) -> None:
    harbour = make_harbour()
    actor = await harbour.join()
    await actor.say(Bye(actor.session, 2))
    await actor.hear(lambda: bool(actor.others))
    assert unpack(actor.others[0][0]) == ByeOk(actor.session)
    assert harbour.count("sessions/closed") == 1
    assert harbour.count("num_actors") == 0
    assert harbour.count("credit/granted_columns") == 0


@pytest.mark.parametrize("message", [Spec, Get, Heartbeat])
async def test_an_unknown_session_is_counted_and_told_to_say_hello(
    make_harbour: Make, message: type[Message]
) -> None:
    harbour = make_harbour()
    actor = harbour.actor()
    nobody = b"?" * 16
    if message is Spec:
        await actor.say(Spec(nobody, nobody, nobody, 1, 1), b"{}")
    elif message is Get:
        await actor.beat(Get(nobody, 1, 1))
    else:
        await actor.beat(Heartbeat(nobody, {}))
    await refused(actor, "hello_again")
    assert actor.rejects[0].retry_after_s == 0
    assert harbour.count("bad/unknown_session") == 1


async def test_a_goodbye_to_a_session_that_is_over_changes_nothing(make_harbour: Make) -> None:
    harbour = make_harbour()
    actor = await harbour.join()
    await actor.say(Bye(b"?" * 16, 0))
    await actor.say(ByeOk(b"?" * 16))
    await actor.send()
    assert harbour.count("wire/bad") == 0
    assert harbour.count("num_actors") == 1


@pytest.mark.parametrize("port", ["data", "weights"])
@pytest.mark.parametrize("kind", ["Grant", "NotModified", "other port"])
async def test_messages_of_a_learner_or_of_the_other_port_are_not_allowed(
    make_harbour: Make, port: str, kind: str
) -> None:
    harbour = make_harbour()
    actor = await harbour.join()
    messages: dict[str, Message] = {
        "Grant": Grant(actor.session, 1, 0, 1, 0, []),
        "NotModified": NotModified(1, 1),
        "other port": Get(actor.session, 1, 1) if port == "data" else ByeOk(actor.session),
    }
    await actor.say(messages[kind], to=getattr(actor, port))
    assert (await refused(actor, "bad_message")).startswith("not_allowed_now")
    assert harbour.count("bad/not_allowed_now") == 1
    assert harbour.count("num_actors") == 1


async def test_a_learner_that_ends_welcomes_nobody(make_harbour: Make) -> None:
    harbour = make_harbour(is_open=False)
    known, late = harbour.actor(), harbour.actor()
    await known.hello()
    harbour.front.close_admission()
    await known.spec()
    before = harbour.count("wire/messages")
    await late.say(b"nonsense")
    await late.hear(lambda: bool(late.rejects))
    assert harbour.count("wire/messages") > before
    assert harbour.schemas == [] and known.grants == [] and late.welcome is None


async def test_an_expired_session_ends_whether_it_ever_joined_or_not(make_harbour: Make) -> None:
    harbour = make_harbour(learner={"lease_s": 1, "heartbeat_s": 0.001})
    stranger, actor = harbour.actor(), await harbour.join()
    await stranger.hello()

    def is_over() -> bool:
        harbour.front.reap()
        return len(harbour.front.table) == 0

    await until(is_over, "both leases over")
    assert harbour.count("sessions/expired") == 2
    await actor.beat(Heartbeat(actor.session, {}))
    await refused(actor, "hello_again")
