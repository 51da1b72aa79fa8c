"""Credit from end to end, sessions that end, and the sockets themselves."""

import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from impala_async.errors import ConfigError
from impala_async.learner.loop.endpoint import MAX_HELLOS
from impala_async.learner.loop.server import ActorServer
from impala_async.metrics.report import merge
from impala_async.weights import Lineage
from impala_async.wire.codec import decode_settings
from impala_async.wire.connections import SAID_HELLO
from impala_async.wire.messages import BYE_REASONS, PROTOCOL, ByeOk, Heartbeat, Hello, pack
from impala_async.wire.session import MAX_OVER_ONE_CONNECTION
from impala_async.wire.sockets import Dealer, new_context
from tests.learner.columns import planes_of, same, small_schema
from tests.learner.hand_actor import Actor, until
from tests.learner.server_harness import RUN_ID, ServerHarness, config_of

Make = Callable[..., ServerHarness]


async def send_while_granted(actor: Actor) -> int:
    """Everything that may go, without waiting for more credit; how many messages."""
    num_sent = 0
    while actor.granted > actor.seq:
        await actor.send()
        num_sent += 1
    return num_sent


async def is_idle(harness: ServerHarness) -> None:
    """Until everybody knows of every column that could be granted."""

    def all_told() -> bool:
        for actor in harness.actors:
            actor.listen()
        peers = {peer.session: peer for peer in harness.server.table}
        return all(actor.granted == peers[actor.session].granted for actor in harness.actors)

    await until(all_told, "all grants heard")


async def test_what_is_granted_fits_into_what_is_free(make_harness: Make) -> None:
    harness = make_harness(num_slots=3)
    actors = [await harness.join(columns) for columns in (1, 2, 3, 1)]
    sent = 0
    while True:
        await is_idle(harness)
        assert harness.count("credit/granted_columns") <= harness.count("credit/free_columns")
        assert harness.count("credit/free_columns") == 3 * 4 - sent
        num_before = sent
        for actor in actors:
            sent += actor.columns * await send_while_granted(actor)
        if sent == num_before:
            break
    # Nothing more fits: what is left is narrower than whoever has waited longest.
    assert sum(actor.rejects != [] for actor in actors) == 0
    assert harness.count("trajectories/in_slots") == sent >= 10
    assert len(harness.full) == sent // 4


async def test_an_acknowledgement_waits_for_the_next_credit(
    make_harness: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each word to an actor takes the learner thread from its work."""
    monkeypatch.setattr("impala_async.learner.loop.server.ACKNOWLEDGE_AFTER_S", 60.0)
    harness = make_harness(num_slots=1, learner={"batch_columns": 1})
    actor = await harness.join()
    for seq in range(3):
        await actor.credit()
        num_words = len(actor.grants)
        await actor.send(is_waiting=False)
        await until(lambda: bool(harness.full), "a full slot")
        harness.train()
        await actor.hear(lambda: actor.settled > seq)  # noqa: B023
        assert actor.granted == seq + 2
        assert len(actor.grants) == num_words + 1


async def test_without_credit_an_actor_is_told_soon_what_became_of_its_message(
    make_harness: Make,
) -> None:
    harness = make_harness(num_slots=1, learner={"batch_columns": 1})
    actor = await harness.join()
    await actor.send(is_waiting=False)
    await until(lambda: bool(harness.full), "a full slot")
    assert actor.settled == 0
    await actor.hear(lambda: actor.settled == 1)
    assert actor.granted == 1


async def test_no_more_than_one_batch_ahead(make_harness: Make) -> None:
    harness = make_harness(num_slots=3)
    for _ in range(6):
        await harness.join()
    await is_idle(harness)
    assert harness.count("credit/free_columns") == 12
    assert harness.count("credit/granted_columns") == 4


async def test_credit_comes_back_with_a_released_slot(make_harness: Make) -> None:
    harness = make_harness(num_slots=2)
    actor = await harness.join(4)
    await actor.send()
    await actor.send()
    await is_idle(harness)
    assert harness.count("credit/free_columns") == 0
    assert actor.granted == actor.seq == 2
    harness.train()
    await actor.credit()
    await actor.send()
    assert harness.count("trajectories/trained") == 4


async def test_slots_go_round_and_hold_what_was_sent_last(make_harness: Make) -> None:
    harness = make_harness(num_slots=2)
    actor = await harness.join(4)
    for batch in range(1, 8):
        sent = await actor.send()
        assert harness.slots[harness.full[0]].batch == batch
        taken = harness.train()
        assert all(same(taken, i, sent.columns, i) for i in range(4))
    assert harness.count("trajectories/trained") == 28


async def test_columns_are_dealt_in_turn_to_more_actors_than_there_are(make_harness: Make) -> None:
    harness = make_harness(num_slots=2, learner={"batch_columns": 2})
    actors = [await harness.join() for _ in range(5)]
    for _ in range(50):
        await is_idle(harness)
        for actor in actors:
            await send_while_granted(actor)
        while harness.full:
            harness.train()
    per_actor = [actor.seq for actor in actors]
    assert sum(per_actor) >= 90
    assert max(per_actor) - min(per_actor) <= 2


async def test_a_wide_actor_gets_its_turn_among_narrow_ones(make_harness: Make) -> None:
    harness = make_harness(num_slots=2)
    actors = [await harness.join(columns) for columns in (2, 2, 4)]
    for _ in range(20):
        await is_idle(harness)
        for actor in actors:
            await send_while_granted(actor)
        while harness.full:
            harness.train()
    assert all(actor.seq >= 5 for actor in actors)


async def test_credit_of_a_lost_actor_goes_to_the_others(make_harness: Make) -> None:
    harness = make_harness(num_slots=1, learner={"lease_s": 1})
    lost = await harness.join(4)
    await lost.credit()
    other = await harness.join(4)
    assert other.granted == 0
    lost.data.close()
    lost.weights.close()

    def has_credit() -> bool:
        harness.server.reap()
        other.listen()
        return other.granted > 0

    # One that speaks is never reaped; one whose connection is closed is, before its lease ends.
    await other.beat(Heartbeat(other.session, {}))
    await until(has_credit, "the credit of the lost one")
    assert harness.count("sessions/expired") == 1
    assert harness.count("num_actors") == 1


async def test_a_silent_actor_that_is_there_is_reminded_of_its_credit(make_harness: Make) -> None:
    harness = make_harness(learner={"lease_s": 1})
    actor = await harness.join()
    await actor.credit()
    actor.grants.clear()

    def is_reminded() -> bool:
        harness.server.reap()
        actor.listen()
        return bool(actor.grants)

    await until(is_reminded)
    assert harness.count("num_actors") == 1


async def test_before_the_slots_are_there_nothing_is_granted(make_harness: Make) -> None:
    harness = make_harness(is_open=False, num_slots=2)
    actor = harness.actor(2)
    await actor.join()
    assert harness.schemas == [harness.schema]
    await actor.beat(Heartbeat(actor.session, {}))
    await actor.hear(lambda: len(actor.grants) == 2)
    assert actor.granted == 0
    harness.publish(0)
    harness.open()
    await actor.send()
    assert harness.count("trajectories/admitted") == 2


async def test_before_the_first_version_nothing_is_granted(make_harness: Make) -> None:
    harness = make_harness(is_open=False, num_slots=2)
    actor = await harness.join(2)
    harness.open()
    await actor.beat(Heartbeat(actor.session, {}))
    await actor.hear(lambda: len(actor.grants) == 2)
    assert actor.granted == 0
    harness.publish(0)
    await actor.send()
    assert harness.count("trajectories/admitted") == 2


async def test_everybody_is_told_goodbye(make_harness: Make) -> None:
    harness = make_harness()
    polite, rude = await harness.join(), await harness.join()
    harness.server.close_admission()
    await harness.server.say_bye("finished", timeout_s=0.0)
    await rude.hear(lambda: bool(rude.byes))
    await polite.hear(lambda: bool(polite.byes))
    assert [bye.reason for bye in polite.byes] == [BYE_REASONS.index("finished")]
    await polite.say(ByeOk(polite.session))
    await until(lambda: len(harness.server.table) == 1, "the answer")
    assert harness.count("sessions/closed") == 1


async def test_goodbye_waits_only_until_all_have_answered(make_harness: Make) -> None:
    harness = make_harness()
    actor = await harness.join()
    await actor.say(ByeOk(actor.session))
    await harness.server.say_bye("restarting", timeout_s=1e6)
    assert len(harness.server.table) == 0


async def test_a_new_hello_of_the_same_actor_replaces_its_session(make_harness: Make) -> None:
    harness = make_harness(num_slots=1)
    actor = await harness.join(2)
    await actor.send()
    former = actor.session
    await actor.join()
    assert actor.session != former
    assert harness.count("num_actors") == 1
    # The seqs go on, and what is sent again is known.
    actor.seq = 0
    await actor.send(planes_of(harness.schema, 2), is_waiting=False)
    await actor.hear(lambda: actor.settled == 1)
    await actor.send()
    assert harness.count("rejected/duplicate") == 2
    assert harness.count("trajectories/admitted") == 4


async def test_answers_follow_an_actor_to_its_new_connection(make_harness: Make) -> None:
    harness = make_harness()
    actor = await harness.join()
    # A grant that is under way to the former connection is lost with it.
    await actor.credit()
    context = new_context()
    again = Dealer(context, harness.server.data_url)
    try:
        former, actor.data = actor.data, again
        former.close()
        await actor.send()
        assert actor.settled == 1
    finally:
        actor.data.close()
        context.term()


async def test_over_ipc_too(make_harness: Make) -> None:
    harness = make_harness()
    actor = harness.actor()
    await actor.hello()
    welcome = actor.welcome
    assert welcome is not None
    assert Path(welcome.nonce_path).read_bytes() == welcome.nonce
    local = Actor(
        f"ipc://{welcome.ipc_data}", f"ipc://{welcome.ipc_weights}", harness.schema, columns=4
    )
    harness.actors.append(local)
    await local.join()
    await local.send()
    assert len(harness.full) == 1


async def test_urls_can_be_dialled_and_settings_be_read(make_harness: Make) -> None:
    harness = make_harness(actor={"num_envs": 3})
    for url in (harness.server.data_url, harness.server.weights_url):
        assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d*", url)
    actor = harness.actor()
    await actor.hello()
    settings = decode_settings(actor.settings)
    assert settings["trajectory"] == {"rows": harness.schema.rows}
    assert settings["actor"]["num_envs"] == 3
    assert actor.welcome is not None
    assert actor.welcome.weights_port == int(harness.server.weights_url.rpartition(":")[2])


async def test_every_number_it_reports_is_declared(make_harness: Make) -> None:
    harness = make_harness()
    merge(harness.server.report())


@pytest.mark.parametrize("key", ["data", "weights"])
async def test_a_taken_port_is_named_and_nothing_stays_bound(key: str) -> None:
    schema = small_schema()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"bind\.{key}: .*another learner"):
            new_front(schema, bind={key: url})


async def test_settings_that_are_too_long_for_a_welcome_are_a_config_error() -> None:
    schema = small_schema()
    with pytest.raises(ConfigError, match=r"env\.kwargs"):
        new_front(schema, env={"kwargs": {"text": "x" * 70_000}})


def new_front(schema, **sections) -> ActorServer:
    return ActorServer(
        config_of(schema, **sections),
        run_id=RUN_ID,
        lineage=Lineage(0).resumed(1, 0),
        schema=schema,
        on_schema=print,
        on_episodes=print,
        on_loss=print,
    )


async def test_a_message_larger_than_any_batch_ends_only_its_own_connection(
    make_harness: Make,
) -> None:
    harness = make_harness(small_schema(num_obs=2))
    good, greedy = await harness.join(), harness.actor()
    await greedy.say(pack(greedy.header()), bytes(1 << 20), b"")
    await good.send()
    await good.send()
    assert harness.count("trajectories/admitted") == 2


async def test_who_says_hello_again_and_again_is_cut_off(make_harness: Make) -> None:
    harness = make_harness()
    good, flood = await harness.join(), harness.actor()
    for number in range(MAX_HELLOS + 1):
        actor = number.to_bytes(16, "little")
        await flood.say(Hello(PROTOCOL, actor, "", bytes(16), 0, 0))
    await until(lambda: harness.count("wire/cut") == 1)
    assert harness.server._data.connections.cut_off == {SAID_HELLO: 1}
    assert harness.count("sessions/given_way") == MAX_HELLOS - MAX_OVER_ONE_CONNECTION
    # The last of them, and nobody else.
    assert len(harness.server.table) == 1 + MAX_OVER_ONE_CONNECTION
    await good.send()
    assert good.rejects == []


async def test_a_learner_that_builds_for_longer_than_a_lease_blames_nobody(
    make_harness: Make,
) -> None:
    harness = make_harness(learner={"lease_s": 1})
    await harness.join()
    # The loop stands still before the table was ever looked through.
    time.sleep(1.1)
    harness.server.reap()
    assert len(harness.server.table) == 1


async def test_what_strangers_do_is_one_line_each_ten_seconds(
    make_harness: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness()
    server, hellos = harness.server, harness.server._data.hellos
    now = time.monotonic()
    monkeypatch.setattr("impala_async.learner.loop.server.time.monotonic", lambda: now)
    for second in range(1, 26):
        now += 1.0
        hellos.update({b"one": 600, b"two": 400})
        if second <= 20:
            server._data.connections.cut_off["said hello"] += 1
            server.table.num_given_way += 999
        server.reap()
    lines = [line for line in caplog.messages if line.startswith("strangers")]
    assert (
        lines
        == ["strangers in 10 s: 10 said hello, 9,990 gave way; 10,000 hellos over 2 connections"]
        * 2
    )
    now += 10.0
    server.reap()
    # Hellos alone are nothing to tell.
    assert len([line for line in caplog.messages if line.startswith("strangers")]) == 2
    assert hellos.total() == 0
