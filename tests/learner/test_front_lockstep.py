"""A front in lockstep, over real sockets: first weights, who is waited for, what is refused."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from impala_async.learner import front as front_module
from impala_async.weights import Version
from impala_async.wire import credit
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
from tests.learner.world import Harbour

Make = Callable[..., Harbour]


@pytest.fixture
async def harbour(make_harbour: Make) -> Harbour:
    return lockstep(make_harbour)


def lockstep(make_harbour: Make, lag: int = 0, **sections: Any) -> Harbour:
    """Two actors of two columns each."""
    pace = {"mode": "lockstep", "lag": lag, **sections.pop("pace", {})}
    learner = {"batch_columns": 4, **sections.pop("learner", {})}
    return make_harbour(
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


async def test_a_batch_is_complete_when_both_are_in_it(harbour: Harbour) -> None:
    first, second = await harbour.join(2), await harbour.join(2)
    assert [actor.welcome and actor.welcome.rank for actor in (first, second)] == [0, 1]
    await second.send()
    assert harbour.full == []
    assert second.granted == 1
    await first.send()
    taken = harbour.train()
    harbour.publish(1)
    assert np.array_equal(taken.rewards_CT[2:], planes_of(harbour.schema, 2, 0).columns.rewards_CT)
    await first.send(update=1)
    await second.send(update=1)
    harbour.train()
    assert harbour.count("trajectories/trained") == 8
    assert first.verdicts == second.verdicts == []


async def test_an_announced_version_comes_over_the_weights_port(harbour: Harbour) -> None:
    actor = await harbour.join(2)
    await actor.beat(Heartbeat(actor.session, {}))
    await actor.hear(lambda: len(actor.grants) > 1)
    harbour.publish(1)
    await actor.hear(lambda: actor.version == Version(1, 1))


@pytest.mark.parametrize("lag", [0, 1])
async def test_first_weights_are_those_of_the_first_batch(make_harbour: Make, lag: int) -> None:
    harbour = lockstep(make_harbour, lag, learner={"lease_s": 1, "heartbeat_s": 0.2})
    first, second = await harbour.join(2), await harbour.join(2)
    assert await first_weights(first) == Version(1, 0)
    await first.send()
    await second.say(Bye(second.session, BYE_REASONS.index("leaving")))
    # Without the one that left, the batch is complete.
    await until(lambda: len(harbour.full) == 1, "a batch")
    late = await harbour.join(2)
    # Its first batch is the next, which version 1 is for.
    assert await first_weights(late) is None
    harbour.publish(1)
    assert await first_weights(late) == Version(1, 1)


async def test_before_it_has_said_what_it_runs_nobody_gets_weights(harbour: Harbour) -> None:
    actor = harbour.actor(2)
    await actor.hello()
    assert await first_weights(actor) is None
    await actor.spec()
    await actor.credit()
    assert await first_weights(actor) == Version(1, 0)


async def test_wrong_versions_leave_a_place_empty_and_the_run_goes_on(harbour: Harbour) -> None:
    first, second = await harbour.join(2), await harbour.join(2)
    await first.send()
    await second.send()
    harbour.train()
    harbour.publish(1)
    await second.send(update=1)
    await first.send(update=0)
    assert first.verdicts == [[1, VERDICTS.index("stale")]]
    slot = harbour.slots[harbour.full[0]]
    assert slot.filled_B.tolist() == [False, False, True, True]
    harbour.train()
    assert harbour.count("rejected/stale") == 2
    assert harbour.count("trajectories/trained") == 6


@pytest.mark.parametrize("what", ["another width", "another layout of streams"])
async def test_who_runs_something_else_does_not_fit(harbour: Harbour, what: str) -> None:
    actor = harbour.actor(1 if what == "another width" else 2)
    await actor.hello()
    await actor.spec(streams=1 if what == "another width" else 2)
    text = await actor.refused("mismatch")
    assert "pace.mode lockstep wants one message of 2 columns" in text


async def test_a_third_one_is_not_needed(harbour: Harbour) -> None:
    for _ in range(2):
        await harbour.join(2)
    extra = harbour.actor(2)
    await extra.hello()
    assert "already has its 2 actors" in await extra.refused("full")


async def test_who_is_slow_is_waited_for_however_long(
    make_harbour: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In lockstep a credit that lies unused is that of the one for whom the others wait."""
    monkeypatch.setattr(credit, "UNUSED_S", 0.0)
    monkeypatch.setattr(credit, "PATIENCE", 0.0)
    harbour = lockstep(make_harbour)
    fast, slow = await harbour.join(2), await harbour.join(2)
    await fast.send()
    for _ in range(5):
        harbour.front.reap()
        harbour.front.take_back()
        await fast.beat(Heartbeat(fast.session, {}))
        await slow.beat(Heartbeat(slow.session, {}))
    assert harbour.count("num_actors") == 2
    await slow.send()
    assert len(harbour.full) == 1


async def test_a_closed_connection_does_not_end_a_session_whose_lease_runs(
    make_harbour: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_module, "SILENT_HEARTBEATS", 0.0)
    harbour = lockstep(make_harbour, learner={"lease_s": 1, "heartbeat_s": 0.2})
    fast, gone = await harbour.join(2), await harbour.join(2)
    heard_at = time.monotonic()
    await fast.send()
    gone.data.close()

    def beats_until(is_so: Callable[[], bool]) -> Callable[[], bool]:
        def look() -> bool:
            harbour.front.reap()
            fast.weights.send([pack(Heartbeat(fast.session, {}))])
            fast.listen()
            return is_so()

        return look

    await until(beats_until(lambda: harbour.count("wire/unroutable") > 0), "a lost connection")
    assert harbour.count("num_actors") == 2
    await until(beats_until(lambda: len(harbour.full) == 1), "a batch without it")
    assert time.monotonic() - heard_at > 0.9
    assert harbour.num_losses == 0


async def test_a_loss_is_told_where_it_ends_the_run(make_harbour: Make) -> None:
    harbour = lockstep(make_harbour, pace={"on_loss": "stop"})
    first, second = await harbour.join(2), await harbour.join(2)
    await first.send()
    await second.say(Bye(second.session, BYE_REASONS.index("leaving")))
    await until(lambda: harbour.num_losses > 0, "a loss")
    assert harbour.full == []


@pytest.mark.parametrize("lag", [0, 1])
async def test_credit_is_for_as_many_batches_as_can_be_open(make_harbour: Make, lag: int) -> None:
    harbour = lockstep(make_harbour, lag)
    first, second = await harbour.join(2), await harbour.join(2)
    for actor in (first, second):
        await actor.credit()
        assert actor.granted == 1 + lag
    assert harbour.count("credit/granted_columns") == 4 * (1 + lag)
    assert harbour.count("credit/granted_columns") <= harbour.count("credit/free_columns")
