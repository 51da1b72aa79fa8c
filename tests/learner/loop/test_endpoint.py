"""An endpoint over a real router: bursts, edges that sends eat, and bad input at the header."""

import asyncio
import itertools
import select
from contextlib import ExitStack
from functools import partial

import msgpack
import pytest

from impala_async.errors import ProtocolError
from impala_async.learner.loop.endpoint import (
    BAD_REASONS,
    MAX_IN_VAIN,
    MAX_SPARE_FRAMES,
    WIRE_COUNTS,
    Endpoint,
)
from impala_async.learner.loop.sessions import Answer
from impala_async.metrics.report import Counters, merge
from impala_async.wire import messages as wire
from impala_async.wire.connections import CLAIMED_MUCH, REPLACED
from impala_async.wire.sockets import MAX_DISCARDED, Dealer, Router, new_context
from tests.learner.hand_actor import DEADLINE_S, until
from tests.wire import raw_peer
from tests.wire.ends import until as wait_for

ID = b"i" * 16
DATA = wire.Data(ID, 1, 1, 1, 3, 1, 0, 0, None)


class Bench:
    """An endpoint whose messages a test takes, and a dealer at its other end."""

    def __init__(self):
        self.context, self.counters = new_context(), Counters(WIRE_COUNTS)
        self.router = Router(self.context, "tcp://127.0.0.1:*", None, 1 << 20)
        self.heard, self.bursts, self.is_open = [], [], True
        self.on_message = lambda route, message: None
        after = lambda: self.bursts.append(len(self.heard))  # noqa: E731
        loop = asyncio.get_running_loop()
        self.endpoint = Endpoint(loop, self.router, self.counters, self._handle, after)
        self.dealer = Dealer(self.context, self.router.connectable_url())

    def _handle(self, route, message, rest, now):
        self.heard.append((route, message))
        self.on_message(route, message)
        return []

    async def say(self, *frames):
        await until(lambda: self.dealer.send(frames), "a connection")

    async def refusal(self, code):
        """The text of the refusal that comes."""
        answer = await self.answer()
        assert answer.code == wire.REJECT_CODES.index(code)
        return str(answer.text)

    async def answer(self):
        frames = await until(lambda: self.dealer.receive(0), "an answer")
        return wire.unpack(frames[0])


@pytest.fixture
async def bench():
    made = Bench()
    yield made
    made.dealer.close()
    if made.is_open:
        made.endpoint.close()
    made.context.term()


async def test_messages_arrive_in_order_and_in_bursts_that_let_others_run(bench):
    loop = asyncio.get_running_loop()
    others = []
    for number in range(320):
        await bench.say(wire.pack(wire.Get(ID, 1, number)))

    def tick():
        others.append(len(bench.heard))
        if len(bench.heard) < 320:
            loop.call_soon(tick)

    tick()
    await until(lambda: len(bench.heard) == 320)
    assert max(b - a for a, b in itertools.pairwise(others)) <= 64
    assert [message.update for _, message in bench.heard] == list(range(320))
    assert bench.counters["wire/messages"] == 320
    assert max(b - a for a, b in itertools.pairwise([0, *bench.bursts])) <= 32


@pytest.fixture
def cut(bench, monkeypatch):
    """Connections that are to be ended."""
    told = []
    monkeypatch.setattr(bench.endpoint.connections, "cut", lambda *each: told.append(each))
    return told


async def test_sends_while_messages_wait_lose_none_of_them(bench, cut):
    """A send consumes the edge of the descriptor; the endpoint must look again. Nobody reads."""

    def send_back(route, message):
        for _ in range(3):
            bench.endpoint.send(route, [wire.pack(wire.NotModified(1, 1))])

    def have_come():
        while bench.dealer.receive(0) is not None:
            pass
        return len(bench.heard) == 500

    bench.on_message = send_back
    for number in range(500):
        await bench.say(wire.pack(wire.Get(ID, 1, number)))
        if number % 7 == 0:
            have_come()
            await asyncio.sleep(0)
    await until(have_come, "all messages")


BAD_HEADERS = [
    *(("malformed_header", (text,)) for text in (b"", b"\xff\xff\xff", b"\x91" * 4000)),
    ("malformed_header", (msgpack.packb([6, ID, 1, -1]),)),
    ("unknown_type", (msgpack.packb([99]),)),
    ("oversized_header", (b"\0" * (wire.MAX_HEADER_BYTES + wire.MAX_INLINE_BYTES + 1),)),
    ("oversized_header", (b"\0" * 500_000,)),
    ("wrong_frame_count", (wire.pack(wire.Get(ID, 1, 1)), b"")),
    ("wrong_frame_count", (wire.pack(wire.Heartbeat(ID, {})), b"", b"")),
]


async def test_a_look_at_the_connections_leaves_no_message_lying(bench):
    await bench.say(wire.pack(DATA))
    await until(lambda: bench.heard, "the first")
    bench.dealer.send([wire.pack(DATA._replace(seq=2))])
    # The loop has not heard of it yet.
    assert select.select([bench.router.fd], [], [], DEADLINE_S)[0]
    bench.endpoint.look({}, patience_s=10.0)
    await until(lambda: len(bench.heard) == 2, "the second")


async def test_a_bad_header_is_counted_and_answered(bench):
    for number, (reason, frames) in enumerate(BAD_HEADERS):
        before = bench.counters[f"bad/{reason}"]
        await bench.say(*frames)
        await bench.say(wire.pack(wire.Get(ID, 1, number)))
        assert (await bench.refusal("bad_message")).startswith(f"{reason}: ")
        await until(lambda heard=number + 1: len(bench.heard) == heard)
        assert bench.heard[-1][1] == wire.Get(ID, 1, number)
        assert bench.counters[f"bad/{reason}"] == before + 1
    assert bench.counters["wire/messages"] == 2 * len(BAD_HEADERS)
    merge(bench.counters)


async def test_frames_nobody_took_are_gone_before_the_next_message(bench):
    # A body that is inline may be longer than a header.
    headers = DATA, wire.Spec(ID, ID, ID, 1, 1), DATA._replace(body=b"x" * wire.MAX_INLINE_BYTES)
    for header in headers:
        await bench.say(wire.pack(header), b"one", b"two", b"three" * 1000)
    await until(lambda: [message for _, message in bench.heard] == [*headers])
    assert bench.counters["wire/messages"] == 3


async def test_what_the_handler_refuses_is_counted_under_its_reason(bench):
    reason, text = "", "because"

    def refuse(route, message):
        raise ProtocolError(reason, text)

    bench.on_message = refuse
    for reason in BAD_REASONS:
        await bench.say(wire.pack(DATA), b"left", b"over")
        await bench.refusal("hello_again" if reason == "unknown_session" else "bad_message")
        assert bench.counters[f"bad/{reason}"] == 1
    # A hello belongs to the other port; and a refusal quotes little.
    reason, text = "not_allowed_now", "x" * 1900
    await bench.say(wire.pack(wire.Hello(1, ID, "", ID, 0, 0)))
    assert len(await bench.refusal("wrong_port")) < 250


async def test_an_answer_may_have_another_instead_and_take_the_place_of_a_connection(
    bench, cut, monkeypatch
):
    await bench.say(wire.pack(wire.ByeOk(ID)))
    await until(lambda: len(bench.heard) == 1)
    route = bench.heard[0][0]
    ok, late = [wire.pack(wire.ByeOk(ID))], [wire.pack(wire.NotModified(1, 1))]
    sent = []
    answer = Answer(route, ok, late, on_sent=lambda: sent.append(1))
    bench.endpoint.say([answer, Answer(route, late, replaces=b"former")])
    assert [await bench.answer(), await bench.answer()] == [wire.ByeOk(ID), wire.NotModified(1, 1)]
    assert cut == [(b"former", REPLACED)]
    monkeypatch.setattr(Router, "send", lambda router, route, frames: frames == late)
    bench.endpoint.say([answer])
    assert bench.counters["wire/unroutable"] == 1
    assert sent == [1]


async def test_who_never_reads_is_cut_off(bench, cut):
    with raw_peer.connect(bench.router.connectable_url()) as deaf:
        deaf.sendall(raw_peer.message(wire.pack(wire.Get(ID, 1, 7))))
        await until(lambda: len(bench.heard) == 1)
        route = bench.heard[0][0]
        while bench.endpoint.send(route, [bytes(1 << 20)]):
            assert not cut
        for _ in range(MAX_IN_VAIN):
            bench.endpoint.send(route, [bytes(1 << 20)])
        assert cut[0] == (route, "did not read")


async def test_a_long_routing_id_is_cut_off_unheard(bench, cut):
    for size, taken in (255, bench.heard), (256, cut):
        with raw_peer.connect(bench.router.connectable_url(), b"r" * size) as raw:
            raw.sendall(raw_peer.message(wire.pack(wire.Get(ID, 1, 7))))
            await until(partial(len, taken), "it is taken")
    assert len(bench.heard) == 1
    assert [(len(route), why) for route, why in cut] == [(256, CLAIMED_MUCH)]


async def test_after_the_close_nothing_is_read(bench):
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    await bench.say(wire.pack(wire.Get(ID, 1, 7)))
    assert select.select([bench.router.fd], [], [], DEADLINE_S)[0]
    # Each message that is sent makes the endpoint look again; so a turn of the loop is to come.
    bench.endpoint.send(b"nobody", [wire.pack(wire.ByeOk(ID))])
    bench.endpoint.close()
    bench.is_open = False
    for _ in range(5):
        await asyncio.sleep(0)
    assert bench.heard == []
    assert errors == []


async def test_a_message_of_very_many_frames_is_dropped_in_turns_and_cut_off(bench, cut):
    await bench.say(wire.pack(wire.NotModified(1, 1)), *[b""] * (5 * MAX_DISCARDED))
    await bench.say(wire.pack(DATA))
    await until(lambda: [message for _, message in bench.heard] == [DATA], "the next message")
    # Between them the loop had its turns.
    assert len(bench.bursts) >= 3
    assert bench.counters["bad/wrong_frame_count"] == 1
    assert [why for _, why in cut] == ["sent a message of too many frames"]


async def test_nobody_is_let_in_for_some_time_after_frames_that_cost_some(bench, cut, monkeypatch):
    held = []
    monkeypatch.setattr(bench.endpoint.connections, "hold_shut", held.append)
    for number, (num_frames, num_held) in enumerate([(3, 0), (MAX_SPARE_FRAMES + 1, 1)], 1):
        await bench.say(wire.pack(DATA), *[b""] * num_frames)
        await until(lambda number=number: len(bench.heard) == number, "the message")
        assert len(held) == len(cut) == num_held
    assert held[0] > 0


async def test_who_hung_up_is_not_cut_off_in_the_shape_of_its_successor(bench):
    """The loop stood still meanwhile, and the kernel gave the descriptor again."""
    connections, url = bench.router.connections, bench.router.connectable_url()

    def number_open(number):
        connections.read()
        return len(connections._open) == number

    with raw_peer.connect(url) as gone:
        gone.sendall(raw_peer.EMPTY_AND_MORE * (MAX_DISCARDED + 2) + raw_peer.message(b""))
        wait_for(lambda: number_open(2))
        descriptors = [*connections._open]
    wait_for(lambda: number_open(1))
    with ExitStack() as opened:
        # Another thread of ours may have got the descriptor, and given it back.
        for number in range(2, 6):
            if not {*descriptors} <= {*connections._open}:
                successor = opened.enter_context(raw_peer.connect(url))
                wait_for(partial(number_open, number))
        assert {*descriptors} <= {*connections._open}
        await until(lambda: bench.counters["bad/malformed_header"], "what the first one left")
        successor.sendall(raw_peer.message(wire.pack(DATA)))
        await until(lambda: [message for _, message in bench.heard] == [DATA], "the successor")
    assert connections.cut_off.total() == 0
