"""A session without an actor behind it: how it begins, what it says, and how it is lost."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from impala_async.actor.stand_in import RunOver, StandIn
from impala_async.errors import MismatchError, UnreachableError
from impala_async.weights import NO_VERSION, Version
from impala_async.wire.messages import Grant
from impala_async.wire.session import reject
from impala_async.wire.sockets import new_context
from tests.actor.tapes import SCHEMA
from tests.learner.hand_actor import LAYOUT, until
from tests.learner.server_harness import ServerHarness


@contextmanager
def standing_in(harness: ServerHarness, told: list[bool] | None = None) -> Iterator[StandIn]:
    """One that is used on a thread of its own, as `on` does it."""
    context = new_context()
    made = StandIn(context, harness.server.data_url, should_stop=lambda: bool(told), connect_s=10.0)
    try:
        yield made
    finally:
        made._has_session = False
        made.leave()
        context.term()


async def on(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(pool, call), 10.0)


async def joined(stand_in: StandIn, columns: int = 2, streams: int = 1) -> None:
    await on(stand_in.connect)
    await on(lambda: stand_in.join(SCHEMA, LAYOUT, columns=columns, streams=streams))


Make = Callable[..., ServerHarness]


@pytest.fixture
async def make_harness() -> Any:
    made: list[ServerHarness] = []

    def make(**settings: Any) -> ServerHarness:
        made.append(ServerHarness(**settings))
        return made[-1]

    yield make
    for harness in made:
        harness.close()


async def test_it_joins_as_an_actor_does(make_harness: Make) -> None:
    harness = make_harness()
    with standing_in(harness) as stand_in:
        settings = await on(stand_in.connect)
        assert settings.trajectory.rows == SCHEMA.rows
        await on(lambda: stand_in.join(SCHEMA, LAYOUT, columns=2, streams=3))
        assert stand_in.newest == Version(1, 0)
        (peer,) = harness.server.table
        assert (peer.columns, peer.streams) == (2, 3)
        await until(lambda: harness.count("credit/granted_columns") == 2)
        await on(lambda: stand_in.pump(0.1))
        assert stand_in.granted == 1
        await on(stand_in.leave)
        assert harness.count("sessions/closed") == 1


async def test_it_waits_for_the_first_version(make_harness: Make) -> None:
    harness = make_harness(is_open=False, learner={"heartbeat_s": 0.05})
    with standing_in(harness) as stand_in:
        joining = asyncio.create_task(joined(stand_in))
        await until(lambda: len(harness.schemas) == 1, "the schema")
        await asyncio.sleep(0.05)
        assert not joining.done()
        harness.open()
        harness.publish(0)
        await joining


async def test_its_lease_lives_while_it_is_pumped(make_harness: Make) -> None:
    harness = make_harness(learner={"heartbeat_s": 0.02})
    with standing_in(harness) as stand_in:
        await joined(stand_in)
        (peer,) = harness.server.table
        before = peer.last_heard
        until_s = time.monotonic() + 0.1

        def pump() -> None:
            while time.monotonic() < until_s:
                stand_in.pump(0.001)

        await on(pump)
        assert peer.last_heard > before
        assert peer.weights_route


async def test_it_may_ask_for_the_newest_version_alone(make_harness: Make) -> None:
    harness = make_harness()
    with standing_in(harness) as stand_in:
        await joined(stand_in)
        harness.publish(5)

        def ask() -> None:
            while stand_in.newest.update < 5:
                stand_in.ask()
                stand_in.pump(0.001)

        await on(ask)
        assert harness.count("weights/served") == 0
        assert stand_in.longest_gap_s > 0


async def test_or_for_the_weights_too(make_harness: Make) -> None:
    harness = make_harness()
    with standing_in(harness) as stand_in:
        await joined(stand_in)

        def pull() -> None:
            while stand_in._have == NO_VERSION:
                stand_in.pull()
                stand_in.pump(0.001)
            stand_in.pull()

        await on(pull)
        assert stand_in._have == Version(1, 0)
        assert harness.count("weights/served") == 1
        assert harness.count("weights/not_modified") == 0


async def test_a_goodbye_is_answered_and_ends_it(make_harness: Make) -> None:
    harness = make_harness()
    for reason, is_finished in (("finished", True), ("restarting", False)):
        with standing_in(harness) as stand_in:
            await joined(stand_in)
            bye = asyncio.create_task(harness.server.say_bye(reason, 5.0))
            with pytest.raises(RunOver):
                await on(lambda: [stand_in.pump(0.01) for _ in range(500)])
            await on(stand_in.leave)
            await asyncio.wait_for(bye, 1.0)
            assert stand_in.is_finished == is_finished


async def test_it_ends_when_it_is_told_to(make_harness: Make) -> None:
    told: list[bool] = []
    with standing_in(make_harness(), told) as stand_in:
        await joined(stand_in)
        told.append(True)
        with pytest.raises(RunOver):
            await on(lambda: stand_in.pump(0.0))


async def test_a_session_that_the_learner_ended_is_not_begun_again(make_harness: Make) -> None:
    harness = make_harness(learner={"heartbeat_s": 0.02})
    with standing_in(harness) as stand_in:
        await joined(stand_in)
        harness.server.table.end(next(iter(harness.server.table)))
        with pytest.raises(UnreachableError, match="the learner has ended the session"):
            await on(lambda: [stand_in.pump(0.01) for _ in range(500)])


async def test_a_learner_that_says_nothing_is_lost(make_harness: Make) -> None:
    with standing_in(make_harness()) as stand_in:
        await joined(stand_in)
        await asyncio.sleep(0.05)
        # The learner's loop stands still while this one is pumped here, and its last words are out.
        stand_in.pump(0.05)
        stand_in._last_heard = time.monotonic() - 19.9
        with pytest.raises(UnreachableError, match="is lost: nothing came from it for 20 s"):
            _ = [stand_in.pump(0.01) for _ in range(100)]


async def test_refusals(make_harness: Make, caplog: pytest.LogCaptureFixture) -> None:
    with standing_in(make_harness()) as stand_in:
        await joined(stand_in)
        stand_in._take(reject("bad_message", "what is this"))
        assert "the learner refused a message: what is this" in caplog.text
        with pytest.raises(MismatchError, match="does not fit"):
            stand_in._take(reject("mismatch", "does not fit"))


async def test_grants_are_cumulative_and_its_own(make_harness: Make) -> None:
    with standing_in(make_harness()) as stand_in:
        await joined(stand_in)
        session = stand_in.welcome.session
        stand_in._take(Grant(session, 9, 4, 1, 3, [[2, 1], [3, 1]]))
        stand_in._take(Grant(session, 8, 3, 1, 2, [[1, 4]]))
        stand_in._take(Grant(bytes(16), 99, 99, 9, 9, [[1, 4]]))
        assert (stand_in.granted, stand_in.settled, stand_in.newest) == (9, 4, Version(1, 3))
        assert stand_in.refused == {"invalid": 2, "stale": 1}
