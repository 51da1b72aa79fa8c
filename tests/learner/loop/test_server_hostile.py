"""Thousands of mutated messages at both ports, while a well-behaved actor works."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from impala_async.learner.loop import endpoint
from impala_async.trajectory import columns_over
from impala_async.wire import sockets
from impala_async.wire.codec import encode_data
from impala_async.wire.messages import (
    REJECT_CODES,
    Bye,
    ByeOk,
    Get,
    Grant,
    Heartbeat,
    Message,
    NotModified,
    Reject,
    Spec,
    pack,
)
from tests.columns import find_fault
from tests.learner.columns import Planes, big_schema, planes_of, same
from tests.learner.hand_actor import LAYOUT, Actor, until
from tests.learner.server_harness import ServerHarness

NUM_MESSAGES = 6000
ROUND = 50
COUNTED_AS_BAD = {REJECT_CODES.index(code) for code in ("bad_message", "hello_again", "wrong_port")}


class Vandal:
    """Says what is nearly right, in the name of a session of its own."""

    def __init__(self, actor: Actor, seed: int) -> None:
        self.actor = actor
        self.session = actor.session
        self.random = random.Random(seed)
        self.planes = planes_of(actor.schema, 1, seed=99)

    def frames(self) -> list[Any]:
        """The next message."""
        if self.random.random() < 0.1:
            return [self._noise() for _ in range(self.random.randint(1, 4))]
        frames = self._right()
        return frames if self.random.random() < 0.25 else self._mutate(frames)

    def _noise(self) -> bytes:
        return self.random.randbytes(self.random.choice((0, 1, 3, 20, 300, 5000, 13_000)))

    def _right(self) -> list[Any]:
        actor, rng = self.actor, self.random
        session = self.session if rng.random() < 0.7 else rng.randbytes(16)
        schema = actor.schema
        messages: list[Message] = [
            actor.hello_of(protocol=rng.choice((1, 1, 2)), actor=rng.randbytes(16)),
            Get(session, rng.randrange(3), rng.randrange(5)),
            Heartbeat(session, {"env_time_ms": 1.0, rng.choice("ab"): 2}),
            Grant(session, 1, 0, 1, 1, []),
            Reject(0, "no", 0.0),
            NotModified(1, 1),
            rng.choice((ByeOk(rng.randbytes(16)), Bye(rng.randbytes(16), 0))),
        ]
        choice = rng.randrange(len(messages) + 4)
        if choice < len(messages):
            return [pack(messages[choice])]
        if choice == len(messages):
            spec = Spec(session, schema.digest, LAYOUT, rng.randint(1, 9), rng.randint(1, 3))
            return [pack(spec), rng.choice((schema.to_json(), b"{}", b"[1]", self._noise()))]
        header = actor.header(
            session=session,
            seq=rng.choice((actor.settled, actor.settled + 1, rng.randrange(2**62))),
            epoch=rng.choice((1, 1, 1, 0, 2, 2**31)),
            rows=rng.choice((schema.rows, schema.rows, 1, 65535)),
            columns=rng.choice((1, 1, 1, 2, 4096)),
        )
        return list(encode_data(header, self.planes.obs, self.planes.small, []))

    def _mutate(self, frames: list[Any]) -> list[Any]:
        rng = self.random
        frames = [bytes(frame) for frame in frames]
        for _ in range(rng.choice((1, 1, 2, 3))):
            at = rng.randrange(len(frames))
            what = rng.randrange(5)
            if what == 0 and len(frames) > 1:
                del frames[at]
            elif what == 1:
                frames.insert(at, self._noise())
            elif what == 2:
                frames[at] = frames[at][: rng.randrange(len(frames[at]) + 1)]
            elif what == 3:
                frames[at] += self._noise()
            elif frames[at]:
                damaged = bytearray(frames[at])
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
                frames[at] = bytes(damaged)
        return frames


async def vandalise(harness: ServerHarness, vandal: Vandal, is_heard: Callable[[int], bool]) -> int:
    """Everything it has to say; how many messages were really said, its hellos included."""
    actor, num_said = vandal.actor, 0
    for number in range(1, NUM_MESSAGES + 1):
        first, *others = vandal.frames()
        socket = actor.weights if vandal.random.random() < 0.4 else actor.data
        await actor.say(first, *others, to=socket)
        num_said += 1
        if number % ROUND == 0:
            # Not faster than it is heard: what zmq drops could not be counted.
            await until(lambda said=num_said: is_heard(said))
            actor.listen()
            if harness.server.table.find(vandal.session, 0.0) is None:
                await actor.hello()
                await actor.spec()
                vandal.session = actor.session
                num_said += 2
    await until(lambda: is_heard(num_said))
    return num_said


async def work(harness: ServerHarness, actor: Actor, is_over: asyncio.Event) -> list[Planes]:
    """What a good actor sends meanwhile, message after message."""
    sent: list[Planes] = []
    while not is_over.is_set() or len(sent) < 20:
        planes = planes_of(actor.schema, actor.columns, seed=len(sent))
        sent.append(await actor.send(planes, episodes=[(float(len(sent)), 3)]))
    return sent


async def train(harness: ServerHarness, is_over: asyncio.Event) -> list[Any]:
    """Every column that came through, each checked as the learner would trust it."""
    taken: list[Any] = []
    while not is_over.is_set() or harness.full:
        while harness.full:
            slot = harness.slots[harness.full[0]]
            assert find_fault(harness.schema, slot.columns) is None
            obs, small = slot.obs.copy(), slot.small.copy()
            columns = columns_over(harness.schema, obs, small)
            taken += [(columns, i) for i in range(len(obs))]
            harness.train()
        await asyncio.sleep(0)
    return taken


async def test_thousands_of_bad_messages(make_harness, monkeypatch):
    # Or it would be cut off.
    monkeypatch.setattr(endpoint, "MAX_HELLOS", NUM_MESSAGES)
    # It says much before it reads the answers, and asks for many welcomes and weights at once.
    monkeypatch.setattr(sockets, "MAX_UNSENT", 1000)
    monkeypatch.setattr(sockets, "MAX_UNDER_WAY", 1000)
    harness = make_harness(big_schema(rows=2))
    good, bad = await harness.join(2), await harness.join(1)
    is_over = asyncio.Event()
    before = harness.count("wire/messages")

    def is_heard(num_said):
        heard: Any = harness.server.report()["wire/messages"]
        return bool(heard == before + num_said + good.seq)

    working = asyncio.create_task(work(harness, good, is_over))
    training = asyncio.create_task(train(harness, is_over))
    num_said = await vandalise(harness, Vandal(bad, seed=1), is_heard)
    is_over.set()
    sent, taken = await working, await training

    def num_told():
        return sum(answer.code in COUNTED_AS_BAD for answer in bad.rejects)

    await bad.hear(lambda: num_told() >= harness.count("wire/bad"))

    # Every message was heard, and each of the bad ones was counted and answered.
    assert harness.count("wire/messages") == before + num_said + len(sent)
    assert harness.count("wire/unroutable") < num_said / 10
    assert harness.count("wire/bad") == num_told() > NUM_MESSAGES / 2
    counts = harness.counts()
    assert all(counts[f"bad/{reason}"] > 0 for reason in endpoint.BAD_REASONS)

    # The good one never noticed.
    assert good.rejects == []
    assert good.verdicts == []
    assert len(harness.episodes) >= len(sent)
    rewards = {columns.rewards_CT[i].tobytes(): (columns, i) for columns, i in taken}
    wanted = [(planes.columns, i) for planes in sent for i in range(2)]
    found = [rewards.get(columns.rewards_CT[i].tobytes()) for columns, i in wanted]
    missing = [place for place, column in enumerate(found) if column is None]
    # Only the filling slot may still hold some of the newest.
    assert len(wanted) > 40
    assert missing == list(range(len(wanted) - len(missing), len(wanted)))
    assert len(missing) <= 3
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a is not None]
    assert all(same(a[0], a[1], b[0], b[1]) for a, b in pairs)
    assert np.isfinite([total for total, _ in harness.episodes]).all()
