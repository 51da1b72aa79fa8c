"""What an actor offers to run: agreed, or refused with the field and both values."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from impala_async.errors import SpacesError
from impala_async.learner.loop.sessions import MAX_SCHEMA_BYTES
from impala_async.schema import ArraySpec, ObsSpec, Schema
from impala_async.wire.messages import NO_LAYOUT, Get, Spec, WeightsReply, unpack
from tests.learner.columns import small_schema
from tests.learner.hand_actor import LAYOUT
from tests.learner.server_harness import ServerHarness

Make = Callable[..., ServerHarness]


async def test_a_spec_that_fits_joins(make_harness: Make) -> None:
    harness = make_harness()
    actor = await harness.join(2)
    assert actor.grants[0].session == actor.session
    assert harness.count("num_actors") == 1


async def test_a_spec_that_comes_again_is_answered_and_said_of_once(
    make_harness: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Over a new connection, to which the answers go from then on."""
    caplog.set_level("INFO")
    harness = make_harness()
    actor = await harness.join(2)
    again = harness.actor()
    again.session = actor.session
    again.columns = actor.columns
    await again.spec()
    await again.hear(lambda: bool(again.grants))
    assert harness.count("num_actors") == 1
    assert caplog.text.count("joined with 2 columns") == 1


def changed(schema: Schema, what: str) -> Schema:
    leaf = ArraySpec("", (3,), "float32")
    return {
        "shape": replace(schema, obs=ObsSpec((leaf,))),
        "dtype": replace(schema, obs=ObsSpec((ArraySpec("", (2,), "float64"),))),
        "rows": replace(schema, rows=4),
        "choices": replace(
            schema, action=type(schema.action)((replace(schema.action.parts[0], choices=(9,)),))
        ),
    }[what]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("shape", ["obs", "(2,) at the learner", "(3,) at the actor"]),
        ("dtype", ["dtype", "float32 at the learner", "float64 at the actor"]),
        ("rows", ["rows: 3 at the learner, 4 at the actor"]),
        ("choices", ["choices: (3,) at the learner, (9,) at the actor"]),
    ],
)
async def test_a_schema_that_differs_is_refused_with_the_field_and_both_values(
    make_harness: Make, what: str, says: list[str]
) -> None:
    harness = make_harness()
    actor = harness.actor(schema=changed(harness.schema, what))
    await actor.hello()
    await actor.spec()
    text = await actor.refused("mismatch")
    assert all(part in text for part in says), text
    assert harness.count("sessions/refused") == 1
    assert len(harness.server.table) == 0


async def test_too_many_columns_are_refused_with_both_numbers(make_harness: Make) -> None:
    harness = make_harness()
    actor = harness.actor(5)
    await actor.hello()
    await actor.spec()
    text = await actor.refused("mismatch")
    assert "actor.num_envs: 5" in text
    assert "learner.batch_columns = 4" in text


async def test_another_model_is_refused(make_harness: Make) -> None:
    harness = make_harness()
    actor = harness.actor()
    actor.layout = b"?" * 16
    await actor.hello()
    await actor.spec()
    assert "model differs" in await actor.refused("mismatch")


async def test_an_actor_without_a_model_is_told_the_layout_of_the_weights(
    make_harness: Make,
) -> None:
    harness = make_harness()
    actor = harness.actor()
    actor.layout = NO_LAYOUT
    await actor.join()
    (frame,) = actor.after_grant
    assert json.loads(frame) == [{"name": "w", "shape": [16], "dtype": "float32"}]
    await actor.beat(Get(actor.session, 0, 0))
    await actor.hear(lambda: bool(actor.others))
    reply = unpack(actor.others[0][0])
    assert isinstance(reply, WeightsReply)
    assert reply.layout_digest == hashlib.sha256(frame).digest()[:16]
    # Those who have one are told nothing.
    assert (await harness.join()).after_grant == []


async def test_a_schema_may_be_written_in_any_way(make_harness: Make) -> None:
    actor = make_harness().actor()
    await actor.hello()
    text = json.dumps(json.loads(actor.schema.to_json()), indent=2).encode()
    spec = Spec(actor.session, hashlib.sha256(text).digest()[:16], LAYOUT, 1, 1)
    await actor.say(spec, text)
    await actor.hear(lambda: bool(actor.grants))


async def test_a_digest_of_something_else_is_refused(make_harness: Make) -> None:
    actor = make_harness().actor()
    await actor.hello()
    spec = Spec(actor.session, b"?" * 16, LAYOUT, 1, 1)
    await actor.say(spec, actor.schema.to_json())
    assert "digest" in await actor.refused("mismatch")


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
    make_harness: Make, frames: list[bytes], reason: str
) -> None:
    harness = make_harness()
    actor = harness.actor()
    await actor.hello()
    await actor.say(Spec(actor.session, actor.schema.digest, LAYOUT, 1, 1), *frames)
    assert (await actor.refused("bad_message")).startswith(reason)
    assert harness.count(f"bad/{reason}") == 1
    await actor.spec()
    await actor.send()
    assert harness.count("trajectories/admitted") == 1


async def test_a_second_spec_cannot_widen_the_credit_of_the_first(make_harness: Make) -> None:
    harness = make_harness(num_slots=1)
    actor = await harness.join(1)
    await actor.credit()
    actor.columns = 4
    await actor.spec()
    assert (await actor.refused("bad_message")).startswith("not_allowed_now")
    actor.columns = 1
    await actor.spec()
    await actor.send()
    assert harness.counts()["trajectories/admitted"] == 1


async def test_without_a_schema_the_first_actor_brings_it(make_harness: Make) -> None:
    harness = make_harness(is_open=False)
    await harness.join()
    assert harness.schemas == [harness.schema]
    other = harness.actor(schema=changed(harness.schema, "shape"))
    await other.hello()
    await other.spec()
    assert "(2,) at the learner, (3,) at the actor" in await other.refused("mismatch")
    assert len(harness.schemas) == 1


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
    make_harness: Make, fields: dict[str, object]
) -> None:
    harness = make_harness(is_open=False)
    actor = harness.actor()
    await actor.hello()
    text = edited(harness.schema, **fields)
    await actor.say(Spec(actor.session, bytes(16), LAYOUT, 1, 1), text)
    await actor.refused("bad_message")
    assert harness.schemas == []


@pytest.mark.parametrize(
    ("rows", "columns", "says"),
    [
        (4, 1, "trajectory.rows: 3 at the learner, 4 at the actor"),
        (3, 5, "learner.batch_columns = 4"),
    ],
)
async def test_a_first_actor_that_does_not_fit_decides_nothing(
    make_harness: Make, rows: int, columns: int, says: str
) -> None:
    harness = make_harness(is_open=False)
    actor = harness.actor(columns, schema=replace(harness.schema, rows=rows))
    await actor.hello()
    await actor.spec()
    assert says in await actor.refused("mismatch")
    assert harness.schemas == []


async def test_a_first_actor_of_another_model_decides_nothing(make_harness: Make) -> None:
    harness = make_harness(is_open=False)
    harness.server.sessions.find_layout = lambda schema: bytes(15) + b"x"
    actor = harness.actor()
    await actor.hello()
    await actor.spec()
    assert "the model differs" in await actor.refused("mismatch")
    assert harness.schemas == []
    assert harness.server.sessions.schema is None


async def test_a_first_schema_that_cannot_be_built_is_refused_and_decides_nothing(
    make_harness: Make,
) -> None:
    harness = make_harness(is_open=False)

    def build(schema: Schema) -> None:
        raise SpacesError("the model has no recurrent state")

    harness.server.sessions.on_schema = build
    actor = harness.actor()
    await actor.hello()
    await actor.spec()
    assert "no recurrent state" in await actor.refused("mismatch")
    assert harness.server.sessions.schema is None
    assert len(harness.server.table) == 0
