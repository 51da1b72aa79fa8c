"""Credit from end to end, sessions that end, and the sockets themselves."""

import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest

from impala_async.errors import ConfigError
from impala_async.learner.loop import server as server_module
from impala_async.learner.loop.endpoint import MAX_ANSWERED, MAX_HELLOS, RETRY_S
from impala_async.learner.loop.placement import SILENT_S
from impala_async.metrics.report import merge
from impala_async.weights import Version
from impala_async.wire import peer
from impala_async.wire.connections import SAID_HELLO
from impala_async.wire.messages import BYE_REASONS, PROTOCOL, ByeOk, Heartbeat, Hello, pack, unpack
from impala_async.wire.peer import LEAST_USUAL_S
from impala_async.wire.session import MAX_OVER_ONE_CONNECTION
from tests.learner.hand_actor import Actor, until
from tests.learner.server_harness import ServerHarness

Make = Callable[..., ServerHarness]


async def test_a_silent_actor_is_reminded_and_a_lost_one_leaves_its_credit_to_others(make_harness):
    harness = make_harness(num_slots=1, learner={"lease_s": 1})
    lost = await harness.join(4)
    await lost.credit()
    other = await harness.join(4)
    assert other.granted == 0
    other.grants.clear()

    def hears(is_so):
        return lambda: harness.server.reap() or other.listen() or is_so()

    await until(hears(lambda: bool(other.grants)), "a reminder")
    lost.data.close()
    lost.weights.close()
    # One that speaks is never reaped; one whose connection is closed is, before its lease ends.
    await other.beat(Heartbeat(other.session, {}))
    await until(hears(lambda: other.granted > 0), "the credit of the lost one")
    assert harness.count("sessions/expired") == 1
    assert harness.count("num_actors") == 1


async def test_everybody_is_told_goodbye(make_harness):
    harness = make_harness()
    polite, rude = await harness.join(), await harness.join()
    harness.server.admission.close()
    await harness.server.say_bye("finished", timeout_s=0.0)
    await rude.hear(lambda: bool(rude.byes))
    await polite.hear(lambda: bool(polite.byes))
    assert [bye.reason for bye in polite.byes] == [BYE_REASONS.index("finished")]
    await polite.say(ByeOk(polite.session))
    await until(lambda: len(harness.server.table) == 1, "the answer")
    await rude.say(ByeOk(rude.session))
    await harness.server.say_bye("restarting", timeout_s=1e6)
    assert len(harness.server.table) == 0


async def test_actors_are_told_the_host_that_others_know(make_harness):
    bind = {"data": "tcp://0.0.0.0:*", "weights": "tcp://0.0.0.0:*", "host": "localhost"}
    harness = make_harness(bind=bind)
    for url in (harness.server.data_url, harness.server.weights_url):
        assert re.fullmatch(r"tcp://localhost:[1-9]\d*", url)
    await (await harness.join()).send()


async def test_urls_can_be_dialled_settings_be_read_and_ipc_is_offered(make_harness):
    harness = make_harness(actor={"num_envs": 3})
    for url in (harness.server.data_url, harness.server.weights_url):
        assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d*", url)
    actor = harness.actor()
    await actor.hello()
    settings, welcome = msgpack.unpackb(actor.settings), actor.welcome
    assert settings["trajectory"] == {"rows": harness.schema.rows}
    assert settings["actor"]["num_envs"] == 3
    assert welcome.weights_port == int(harness.server.weights_url.rpartition(":")[2])
    assert (welcome.lease_s, welcome.heartbeat_s, welcome.max_columns) == (10, 2, 4)
    assert Path(welcome.nonce_path).read_bytes() == welcome.nonce
    urls = f"ipc://{welcome.ipc_data}", f"ipc://{welcome.ipc_weights}"
    local = Actor(*urls, harness.schema, columns=4)
    harness.actors.append(local)
    await local.join()
    await local.send()
    assert len(harness.full) == 1
    # Every number that it reports is declared.
    merge(harness.server.report())


async def test_what_it_cannot_be_is_a_config_error_and_nothing_stays_bound():
    with pytest.raises(ConfigError, match=r"env\.kwargs"):
        ServerHarness(env={"kwargs": {"text": "x" * 70_000}})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        for key in ("data", "weights"):
            with pytest.raises(ConfigError, match=rf"bind\.{key}: .*another learner"):
                ServerHarness(bind={key: url})


async def test_who_says_hello_again_and_again_is_cut_off(make_harness, monkeypatch):
    harness = make_harness()
    said, send = [], harness.server._data.send

    def note_and_send(route, frames):
        said.append(frames)
        return send(route, frames)

    monkeypatch.setattr(harness.server._data, "send", note_and_send)
    good, flood = await harness.join(), harness.actor()
    for number in range(MAX_HELLOS + 1):
        # The harness counts its own actors from the other end.
        actor = (1 + number).to_bytes(16, "little")
        await flood.say(Hello(PROTOCOL, actor, "", bytes(16), 0, 0))
    await until(lambda: harness.count("wire/cut") == 1)
    assert harness.server._data.connections.cut_off == {SAID_HELLO: 1}
    # An honest one comes again, if it hears that.
    assert unpack(bytes(said[-1][0])).retry_after_s == RETRY_S
    # More than a few are not answered.
    assert harness.server._data.num_unanswered == MAX_HELLOS - MAX_ANSWERED
    assert harness.server.table.num_opened == 1 + MAX_ANSWERED
    assert harness.count("sessions/given_way") == MAX_ANSWERED - MAX_OVER_ONE_CONNECTION
    # The last of them, and nobody else.
    assert len(harness.server.table) == 1 + MAX_OVER_ONE_CONNECTION
    await good.send()
    assert good.rejects == []
    # A connection that was cut off has nothing more to say.
    num_opened, num_heard = harness.server.table.num_opened, harness.count("wire/messages")
    harness.server._data.connections.gone.update(dict.fromkeys(harness.server._data.hellos))
    await good.say(Hello(PROTOCOL, bytes(16), "", bytes(16), 0, 0))
    await until(lambda: harness.count("wire/messages") > num_heard)
    assert harness.server.table.num_opened == num_opened


async def test_a_learner_that_builds_for_longer_than_a_lease_blames_nobody(
    make_harness, monkeypatch
):
    harness = make_harness(learner={"lease_s": 1})
    await harness.join()
    # The loop stands still before the table was ever looked through.
    later = time.monotonic() + 1.1
    monkeypatch.setattr(server_module.time, "monotonic", lambda: later)
    harness.server.reap()
    assert len(harness.server.table) == 1


async def test_what_strangers_do_is_one_line_each_ten_seconds(make_harness, caplog, monkeypatch):
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
    now += 10.0
    server.reap()
    # Hellos alone are nothing to tell.
    lines = [line for line in caplog.messages if line.startswith("strangers")]
    says = "strangers in 10 s: 10 said hello, 9,990 gave way; 10,000 hellos over 2 connections"
    assert (lines, hellos.total()) == ([says, says], 0)


async def test_credit_alone_says_how_much_may_be_under_way(make_harness, monkeypatch):
    """ZeroMQ makes 64 bytes of each 2 that are a frame of nothing."""
    harness = make_harness()
    await harness.join()
    (peer,) = harness.server.table.joined
    allowed, peer.streams = [], 4096
    look = lambda allowances, _, **how: allowed.extend(allowances.values())  # noqa: E731
    monkeypatch.setattr(harness.server._data, "look", look)
    harness.server.look_at_connections()
    assert [size < 1 << 18 for size in allowed] == [True]


URLS = ["tcp://a:1", "tcp://b:2"]


@pytest.fixture
def num_counted(monkeypatch):
    """How many actors count when a server has looked for so long, once a second."""
    now = time.monotonic()

    def look(server, seconds, **how):
        nonlocal now
        for _ in range(int(seconds)):
            now += 1
            with monkeypatch.context() as patched:
                patched.setattr(server_module.time, "monotonic", lambda: now)  # noqa: B023
                server.look_at_connections()
        return server.counts(**({"are_others_ready": True} | how))[0]

    return look


async def test_actors_that_send_nothing_do_not_count_while_other_ranks_wait(
    make_harness, num_counted, caplog
):
    harness = make_harness()
    silent, server = await harness.join(), harness.server
    # A learner that is alone has nobody to get another one from.
    assert num_counted(server, 2 * SILENT_S) == 1
    server.placement.open(URLS)
    assert num_counted(server, SILENT_S + 1) == 1
    assert num_counted(server, 1, are_others_ready=False) == 1
    assert server.counts(are_others_ready=True) == (0, 1)
    assert caplog.messages == ["nothing comes from the 1 actors that joined this rank"]
    await silent.send()
    assert num_counted(server, SILENT_S) == 1


async def test_a_rank_that_waits_for_nothing_is_not_silent(make_harness, num_counted):
    harness = make_harness()
    server = harness.server
    server.placement.open(URLS)
    # For one that joins, the clock begins then.
    assert num_counted(server, 2 * SILENT_S) == 0
    await harness.join()
    assert num_counted(server, 2) == 1
    (joined,) = server.table.joined
    joined.usual_s = SILENT_S
    assert num_counted(server, 3 * SILENT_S) == 1
    joined.usual_s = LEAST_USUAL_S
    # Its batches wait for the learner.
    server._filler._idle.clear()
    assert num_counted(server, 9 * SILENT_S) == 1


async def test_in_lockstep_no_rank_is_silent(make_harness, num_counted):
    harness = make_harness(
        pace={"mode": "lockstep", "lag": 1}, learner={"batch_columns": 2}, train={"num_actors": 1}
    )
    await harness.join(2)
    harness.server.placement.open(URLS)
    assert num_counted(harness.server, 9 * SILENT_S) == 1


async def test_in_lockstep_a_silent_actor_is_waited_for_as_long_as_its_lease_runs(
    make_harness, monkeypatch, caplog
):
    """Neither its connection nor credit that lies unused for long ends it."""
    monkeypatch.setattr(server_module, "SILENT_HEARTBEATS", 0.0)
    monkeypatch.setattr(peer, "UNUSED_S", 0.0)
    monkeypatch.setattr(peer, "PATIENCE", 0.0)
    harness = make_harness(
        pace={"mode": "lockstep"},
        learner={"batch_columns": 4, "lease_s": 1},
        actor={"num_envs": 2},
        train={"num_actors": 2},
    )
    fast, gone = await harness.join(2), await harness.join(2)
    heard_at = time.monotonic()
    await fast.send()
    gone.data.close()

    def beats_until(is_so):
        def look():
            harness.server.reap()
            harness.server.look_at_connections()
            fast.weights.send([pack(Heartbeat(fast.session, {}))])
            fast.listen()
            return is_so()

        return look

    await until(beats_until(lambda: harness.count("wire/unroutable") > 0), "a lost connection")
    assert harness.count("num_actors") == 2
    await until(beats_until(lambda: len(harness.full) == 1), "a batch without it")
    assert time.monotonic() - heard_at > 0.9
    assert "actor 1 is gone: its lease is over" in caplog.messages
    assert harness.losses == []
    # A version is announced at once, over the weights port.
    harness.publish(1)
    await until(lambda: fast.listen() or fast.version == Version(1, 1))
