"""A session without an actor behind it: how it begins, what it says, and how it is lost."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from impala_async.errors import MismatchError, UnreachableError
from impala_async.replay.client import ReplayClient, RunOver
from impala_async.weights import NO_VERSION, Version
from impala_async.wire.messages import Grant, pack
from impala_async.wire.session import reject
from impala_async.wire.sockets import new_context
from tests.learner.hand_actor import LAYOUT, until
from tests.learner.server_harness import ServerHarness
from tests.replay.recordings import SCHEMA


@contextmanager
def client_of(harness: ServerHarness) -> Iterator[ReplayClient]:
    """One that is used on a thread of its own, as `on` does it."""
    context = new_context()
    url = harness.server.data_url
    made = ReplayClient(context, url, should_stop=lambda: False, connect_s=10.0)
    try:
        yield made
    finally:
        made._side.has_session = False
        made.leave()
        context.term()


async def on(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(pool, call), 10.0)


async def joined(client: ReplayClient, streams: int = 1) -> None:
    assert (await on(client.connect)).trajectory.rows == SCHEMA.rows
    await on(lambda: client.join(SCHEMA, LAYOUT, columns=2, streams=streams))


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


async def test_it_joins_as_an_actor_does_and_waits_for_the_first_version(
    make_harness: Make,
) -> None:
    harness = make_harness(is_open=False)
    with client_of(harness) as client:
        joining = asyncio.create_task(joined(client, streams=3))
        await until(lambda: len(harness.schemas) == 1, "the schema")
        await asyncio.sleep(0.05)
        assert not joining.done()
        harness.open()
        harness.publish(0)
        await joining
        assert client.newest == Version(1, 0)
        (peer,) = harness.server.table
        assert (peer.columns, peer.streams) == (2, 3)
        await on(lambda: client.pump(0.1))
        assert client.granted == 1
        await on(client.leave)
        assert harness.count("sessions/closed") == 1


async def test_its_lease_lives_while_it_is_pumped(make_harness: Make) -> None:
    harness = make_harness(learner={"lease_s": 1})
    with client_of(harness) as client:
        await joined(client)
        (peer,) = harness.server.table
        before = peer.last_heard
        until_s = time.monotonic() + 0.3

        def pump() -> None:
            while time.monotonic() < until_s:
                client.pump(0.001)

        await on(pump)
        assert peer.last_heard > before
        assert peer.weights_route


async def test_it_asks_for_a_number_alone_or_pulls_weights_that_are_new(
    make_harness: Make,
) -> None:
    harness = make_harness()
    with client_of(harness) as client:
        await joined(client)
        harness.publish(5)

        def ask() -> None:
            while client.newest.update < 5:
                client.ask()
                client.pump(0.001)

        def pull() -> None:
            while client._have == NO_VERSION:
                client.pull()
                client.pump(0.001)
            client.pull()

        await on(ask)
        assert client.longest_gap_s > 0
        assert harness.count("weights/served") == 0
        num_asked = harness.count("weights/not_modified")
        await on(pull)
        assert client._have == Version(1, 5)
        assert harness.count("weights/served") == 1
        assert harness.count("weights/not_modified") == num_asked


@pytest.mark.parametrize("reason", ["finished", "restarting"])
async def test_a_goodbye_is_answered_and_ends_it(make_harness: Make, reason: str) -> None:
    harness = make_harness()
    with client_of(harness) as client:
        await joined(client)
        bye = asyncio.create_task(harness.server.say_bye(reason, 5.0))
        with pytest.raises(RunOver):
            await on(lambda: [client.pump(0.01) for _ in range(500)])
        await on(client.leave)
        await asyncio.wait_for(bye, 1.0)
        assert client.is_finished == (reason == "finished")


async def test_a_session_that_the_learner_ended_is_not_begun_again(make_harness: Make) -> None:
    harness = make_harness(learner={"lease_s": 1})
    with client_of(harness) as client:
        await joined(client)
        harness.server.table.end(next(iter(harness.server.table)))
        with pytest.raises(UnreachableError, match="the learner has ended the session"):
            await on(lambda: [client.pump(0.01) for _ in range(500)])


async def test_refusals(make_harness: Make, caplog: pytest.LogCaptureFixture) -> None:
    with client_of(make_harness()) as client:
        await joined(client)
        client._take([pack(reject("bad_message", "what is this"))])
        assert "the learner refused a message: what is this" in caplog.text
        with pytest.raises(MismatchError, match="does not fit"):
            client._take([pack(reject("mismatch", "does not fit"))])


async def test_grants_are_cumulative_and_its_own(make_harness: Make) -> None:
    with client_of(make_harness()) as client:
        await joined(client)
        session = client.welcome.session
        for grant in (
            Grant(session, 9, 4, 1, 3, [[2, 1], [3, 1]]),
            Grant(session, 8, 3, 1, 2, [[1, 4]]),
            Grant(bytes(16), 99, 99, 9, 9, [[1, 4]]),
        ):
            client._take([pack(grant)])
        assert (client.granted, client.settled, client.newest) == (9, 4, Version(1, 3))
        assert client.refused == {"invalid": 2, "stale": 1}
