"""A server in lockstep, over real sockets: first weights, who is waited for, what is refused."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from impala_async.learner.loop import server as server_module
from impala_async.weights import Version
from impala_async.wire import peer
from impala_async.wire.messages import (
    BYE_REASONS,
    VERDICTS,
    Bye,
    Get,
    Heartbeat,
    NotModified,
    WeightsReply,
    pack,
    unpack,
)
from tests.learner.columns import planes_of
from tests.learner.hand_actor import Actor, until
from tests.learner.server_harness import ServerHarness

Make = Callable[..., ServerHarness]


@pytest.fixture
async def harness(make_harness: Make) -> ServerHarness:
    return lockstep(make_harness)


def lockstep(make_harness: Make, lag: int = 0, **sections: Any) -> ServerHarness:
    """Two actors of two columns each."""
    pace = {"mode": "lockstep", "lag": lag, **sections.pop("pace", {})}
    learner = {"batch_columns": 4, **sections.pop("learner", {})}
    return make_harness(
        pace=pace, learner=learner, actor={"num_envs": 2}, train={"num_actors": 2}, **sections
    )


async def first_weights(actor: Actor) -> Version | None:
    """What a first pull gives now."""
    num_before = len(actor.others)
    await actor.beat(Get(actor.session, 0, 0))
    await actor.hear(lambda: len(actor.others) > num_before)
    reply = unpack(actor.others[-1][0])
    if isinstance(reply, NotModified):
        return None
    assert isinstance(reply, WeightsReply)
    return Version(reply.epoch, reply.update)


async def test_a_batch_is_complete_when_both_are_in_it(harness: ServerHarness) -> None:
    first, second = await harness.join(2), await harness.join(2)
    assert [actor.welcome and actor.welcome.rank for actor in (first, second)] == [0, 1]
    await second.send()
    assert harness.full == []
    assert second.granted == 1
    await first.send()
    taken = harness.train()
    harness.publish(1)
    assert np.array_equal(taken.rewards_CT[2:], planes_of(harness.schema, 2, 0).columns.rewards_CT)
    await first.send(update=1)
    await second.send(update=1)
    harness.train()
    assert harness.count("trajectories/trained") == 8
    assert first.verdicts == second.verdicts == []


async def test_an_announced_version_comes_over_the_weights_port(harness: ServerHarness) -> None:
    actor = await harness.join(2)
    await actor.beat(Heartbeat(actor.session, {}))
    await actor.hear(lambda: len(actor.grants) > 1)
    harness.publish(1)
    await actor.hear(lambda: actor.version == Version(1, 1))


@pytest.mark.parametrize("lag", [0, 1])
async def test_first_weights_are_those_of_the_first_batch(make_harness: Make, lag: int) -> None:
    harness = lockstep(make_harness, lag, learner={"lease_s": 1})
    first, second = await harness.join(2), await harness.join(2)
    assert await first_weights(first) == Version(1, 0)
    await first.send()
    await second.say(Bye(second.session, BYE_REASONS.index("leaving")))
    # Without the one that left, the batch is complete.
    await until(lambda: len(harness.full) == 1, "a batch")
    late = await harness.join(2)
    # Its first batch is the next, which version 1 is for.
    assert await first_weights(late) is None
    harness.publish(1)
    assert await first_weights(late) == Version(1, 1)


async def test_before_it_has_said_what_it_runs_nobody_gets_weights(harness: ServerHarness) -> None:
    actor = harness.actor(2)
    await actor.hello()
    assert await first_weights(actor) is None
    await actor.spec()
    await actor.credit()
    assert await first_weights(actor) == Version(1, 0)


async def test_wrong_versions_leave_a_place_empty_and_the_run_goes_on(
    harness: ServerHarness,
) -> None:
    first, second = await harness.join(2), await harness.join(2)
    await first.send()
    await second.send()
    harness.train()
    harness.publish(1)
    await second.send(update=1)
    await first.send(update=0)
    assert first.verdicts == [[1, VERDICTS.index("stale")]]
    slot = harness.slots[harness.full[0]]
    assert slot.filled_B.tolist() == [False, False, True, True]
    harness.train()
    assert harness.count("rejected/stale") == 2
    assert harness.count("trajectories/trained") == 6


@pytest.mark.parametrize("what", ["another width", "another layout of streams"])
async def test_who_runs_something_else_does_not_fit(harness: ServerHarness, what: str) -> None:
    actor = harness.actor(1 if what == "another width" else 2)
    await actor.hello()
    await actor.spec(streams=1 if what == "another width" else 2)
    text = await actor.refused("mismatch")
    assert "pace.mode lockstep wants one message of 2 columns" in text


async def test_a_third_one_is_not_needed(harness: ServerHarness) -> None:
    for _ in range(2):
        await harness.join(2)
    extra = harness.actor(2)
    await extra.hello()
    assert "already has its 2 actors" in await extra.refused("full")


async def test_who_is_slow_is_waited_for_however_long(
    make_harness: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In lockstep a credit that lies unused is that of the one for whom the others wait."""
    monkeypatch.setattr(peer, "UNUSED_S", 0.0)
    monkeypatch.setattr(peer, "PATIENCE", 0.0)
    harness = lockstep(make_harness)
    fast, slow = await harness.join(2), await harness.join(2)
    await fast.send()
    for _ in range(5):
        harness.server.reap()
        harness.server.take_back()
        await fast.beat(Heartbeat(fast.session, {}))
        await slow.beat(Heartbeat(slow.session, {}))
    assert harness.count("num_actors") == 2
    await slow.send()
    assert len(harness.full) == 1


async def test_a_closed_connection_does_not_end_a_session_whose_lease_runs(
    make_harness: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SILENT_HEARTBEATS", 0.0)
    harness = lockstep(make_harness, learner={"lease_s": 1})
    fast, gone = await harness.join(2), await harness.join(2)
    heard_at = time.monotonic()
    await fast.send()
    gone.data.close()

    def beats_until(is_so: Callable[[], bool]) -> Callable[[], bool]:
        def look() -> bool:
            harness.server.reap()
            fast.weights.send([pack(Heartbeat(fast.session, {}))])
            fast.listen()
            return is_so()

        return look

    await until(beats_until(lambda: harness.count("wire/unroutable") > 0), "a lost connection")
    assert harness.count("num_actors") == 2
    await until(beats_until(lambda: len(harness.full) == 1), "a batch without it")
    assert time.monotonic() - heard_at > 0.9
    assert harness.num_losses == 0


async def test_a_loss_is_told_where_it_ends_the_run(make_harness: Make) -> None:
    harness = lockstep(make_harness, pace={"on_loss": "stop"})
    first, second = await harness.join(2), await harness.join(2)
    await first.send()
    await second.say(Bye(second.session, BYE_REASONS.index("leaving")))
    await until(lambda: harness.num_losses > 0, "a loss")
    assert harness.full == []


@pytest.mark.parametrize("lag", [0, 1])
async def test_credit_is_for_as_many_batches_as_can_be_open(make_harness: Make, lag: int) -> None:
    harness = lockstep(make_harness, lag)
    first, second = await harness.join(2), await harness.join(2)
    for actor in (first, second):
        await actor.credit()
        assert actor.granted == 1 + lag
    assert harness.count("credit/granted_columns") == 4 * (1 + lag)
    assert harness.count("credit/granted_columns") <= harness.count("credit/free_columns")
