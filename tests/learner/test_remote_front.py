"""A front in a process of its own: real actors, real memory, and both of its ends."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable

import psutil
import pytest

from impala_async.errors import ConfigError, ServiceError
from impala_async.learner import remote_front
from impala_async.wire.codec import decode_weights
from impala_async.wire.messages import (
    PROTOCOL,
    Get,
    Heartbeat,
    Hello,
    WeightsReply,
    unpack,
)
from tests.learner.columns import planes_of, same, small_schema
from tests.learner.hand_actor import until
from tests.learner.world import Harbour, process_of

Make = Callable[..., Harbour]


async def counts(harbour: Harbour) -> dict[str, object]:
    await harbour.front.refresh()
    return harbour.counts()


async def test_columns_arrive_in_slots_and_accounts_add_up(make_remote: Make) -> None:
    harbour = make_remote()
    harbour.publish(7)
    # It goes over when those before have arrived: until then grants name them.
    while (await counts(harbour)).get("weights/version_update") != 7:
        pass
    first, second = await harbour.join(3), await harbour.join(2)
    sent = await first.send(planes_of(harbour.schema, 3, seed=1))
    await second.send(planes_of(harbour.schema, 2, seed=2))
    await until(lambda: harbour.full == [0], "a full slot")
    slot = harbour.slots[0]
    assert slot.batch == 1
    assert slot.updates_B.tolist() == [7, 7, 7, 7]
    assert slot.filled_B.all()
    assert (slot.valid_rows_B > 0).all()
    for column in range(3):
        assert same(slot.columns, column, sent.columns, column)
    before = await counts(harbour)
    assert before["trajectories/in_slots"] == 5
    harbour.train()
    after = await counts(harbour)
    assert (after["trajectories/trained"], after["trajectories/in_slots"]) == (4, 1)
    assert after["num_actors"] == harbour.front.num_actors == 2


async def test_slots_go_round(make_remote: Make) -> None:
    harbour = make_remote()
    actor = await harbour.join(2)
    for turn in range(20):
        sent = [await actor.send(planes_of(harbour.schema, 2, seed=2 * turn + n)) for n in (0, 1)]
        await until(lambda: len(harbour.full) == 1, "a full slot")
        taken = harbour.train()
        assert all(same(taken, c, sent[c // 2].columns, c % 2) for c in range(4))
    assert (await counts(harbour))["trajectories/trained"] == 80


async def test_of_weights_the_newest_comes_through(make_remote: Make) -> None:
    harbour = make_remote()
    actor = await harbour.join()
    for update in range(1, 50):
        newest = harbour.publish(update, layout_digest=b"words".ljust(16, b"-"))

    async def has_it() -> bool:
        await actor.beat(Heartbeat(actor.session, {}))
        num_grants = len(actor.grants)
        await actor.hear(lambda: len(actor.grants) > num_grants)
        return actor.version == newest.version

    while not await has_it():
        pass
    await actor.beat(Get(actor.session, 0, 0))
    await actor.hear(lambda: bool(actor.others))
    reply = unpack(actor.others[0][0])
    assert isinstance(reply, WeightsReply)
    weights = decode_weights(reply, actor.others[0])
    assert weights.version == newest.version
    assert weights.buffer.tolist() == newest.buffer.tolist()
    assert reply.layout_digest == b"words".ljust(16, b"-")


async def test_episodes_come_in_order_and_soon(make_remote: Make) -> None:
    harbour = make_remote()
    actor = await harbour.join(2)
    await actor.send(episodes=[(1.5, 10)])
    await actor.send(episodes=[(2.5, 20), (3.5, 30)])
    # Of a batch that is filling.
    await actor.send(episodes=[(4.5, 40)])
    await until(lambda: len(harbour.episodes) == 4, "all episodes")
    assert harbour.episodes == [(1.5, 10), (2.5, 20), (3.5, 30), (4.5, 40)]


async def test_the_first_actor_brings_the_schema(make_remote: Make) -> None:
    harbour = make_remote(is_open=False)
    made: list[object] = []

    def build(schema: object) -> None:
        made.append(schema)
        if len(made) == 1:
            raise ValueError("no network for that")
        harbour.open()
        harbour.publish(0)

    harbour.front._events = harbour.front._events.__class__(build, print, print)
    unlucky = harbour.actor()
    await unlucky.hello()
    await unlucky.spec()
    assert "no network for that" in await unlucky.refused("mismatch")
    actor = await harbour.join(4)
    await actor.send()
    await until(lambda: harbour.full == [0])
    assert made == [harbour.schema, harbour.schema]
    misfit = harbour.actor(schema=small_schema(num_obs=5))
    await misfit.hello()
    await misfit.spec()
    await misfit.refused("mismatch")


async def test_nobody_is_heard_before_there_are_slots(make_remote: Make) -> None:
    harbour = make_remote(is_late=True)
    misfit, actor = harbour.actor(schema=small_schema(num_obs=5)), harbour.actor(4)
    for each in (misfit, actor):
        await each.say(Hello(PROTOCOL, each.uuid, "b", bytes(16), 0, 0))
    time.sleep(0.2)
    for each in (misfit, actor):
        each.listen()
        assert each.welcome is None
    harbour.open()
    harbour.publish(0)
    for each in (misfit, actor):
        await each.hear(lambda each=each: each.welcome is not None)
        await each.spec()
    await misfit.refused("mismatch")
    await actor.send()
    await until(lambda: harbour.full == [0])
    # The learner's schema is the one that rules, and it is asked for none.
    assert harbour.schemas == []


async def test_accounts_go_on_in_another_start(make_remote: Make) -> None:
    harbour = make_remote()
    actor = await harbour.join(4)
    sent = await actor.send()
    await until(lambda: harbour.full == [0])
    harbour.train()
    accounts = await harbour.front.accounts()
    again = make_remote(accounts=accounts)
    assert await again.front.accounts() == accounts
    assert (await counts(again))["trajectories/trained"] == 4
    # What was settled there is known here from the first hello on.
    returned = again.actor(4)
    returned.uuid = actor.uuid
    await returned.join()
    await returned.send(sent, seq=0, epoch=1, update=0, is_waiting=False)
    while not (report := await counts(again)).get("trajectories/rejected"):
        pass
    assert report["rejected/duplicate"] == 4
    assert returned.settled == 1


async def test_a_batch_that_nobody_takes_is_given_up(make_remote: Make) -> None:
    harbour = make_remote()
    actor = await harbour.join(4)
    await actor.send()
    await actor.send(is_waiting=False)
    harbour.front.close_admission()
    await harbour.front.refresh()
    # All that got full before it was closed has been told by now.
    for index in harbour.full:
        harbour.front.give_up(harbour.slots[index].batch)
    report = await counts(harbour)
    assert report["trajectories/dropped"] == report["trajectories/admitted"]
    assert "trajectories/in_slots" not in report


async def test_goodbyes_are_said_and_waited_for(make_remote: Make) -> None:
    harbour = make_remote()
    actor = await harbour.join()
    await harbour.front.say_bye("finished", 0.05)
    await actor.hear(lambda: bool(actor.byes))


@pytest.mark.parametrize("key", ["data", "weights"])
async def test_a_taken_port_is_named_and_no_process_stays(make_remote: Make, key: str) -> None:
    before = psutil.Process().children()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"bind\.{key}: .*another learner"):
            make_remote(bind={key: url})
    assert psutil.Process().children() == before


async def test_its_death_is_told_and_nobody_waits_for_it(make_remote: Make) -> None:
    harbour = make_remote()
    asked = harbour.front.accounts()
    process_of(harbour).send_signal(signal.SIGKILL)
    await until(lambda: bool(harbour.deaths), "word of its death")
    assert len(harbour.deaths) == 1
    before = harbour.front.report()
    await harbour.front.refresh()
    assert harbour.front.report() == before
    await harbour.front.say_bye("finished", 5.0)
    with pytest.raises(ServiceError, match="accounts"):
        await asked


async def test_who_is_asked_when_it_dies_is_answered(make_remote: Make) -> None:
    harbour = make_remote()
    process = process_of(harbour)
    process.suspend()
    waiting = asyncio.ensure_future(harbour.front.refresh())
    await asyncio.sleep(0)
    process.kill()
    await waiting
    assert [str(death) for death in harbour.deaths] == [
        "the ingest process is gone: it was killed (SIGKILL), by hand, or by the system when "
        "memory or a limit of processor time ran out; go on with --resume"
    ]


async def test_one_that_hears_but_does_not_answer_is_dead(
    make_remote: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_front, "SILENT_REAPS", 3)
    harbour = make_remote()
    process = process_of(harbour)
    for _ in range(20):
        await harbour.front.refresh()
        harbour.front.reap()
    assert harbour.deaths == []
    process.suspend()
    waiting = asyncio.ensure_future(harbour.front.refresh())
    await asyncio.sleep(0)
    for _ in range(5):
        harbour.front.reap()
    await waiting
    assert [str(death) for death in harbour.deaths] == ["the ingest process does not answer"]
    assert not process.is_running()


async def test_so_is_one_that_is_awaited_for_too_long(
    make_remote: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_front, "ANSWER_S", 0.05)
    harbour = make_remote()
    process_of(harbour).suspend()
    await harbour.front.refresh()
    assert len(harbour.deaths) == 1


async def test_closing_it_ends_its_process_and_tells_no_death(make_remote: Make) -> None:
    harbour = make_remote()
    process = process_of(harbour)
    harbour.front.close()
    assert not process.is_running()
    assert harbour.deaths == []
