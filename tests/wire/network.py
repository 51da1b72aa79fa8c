"""A whole network in one thread: a learner's table, actors with outboxes, and a wire that loses,
repeats, delays and reorders what is on it. The clock is a number.

The learner checks as it goes: what is admitted has a place, comes once, and is of its branch.
"""

import itertools
import json
from collections import Counter
from dataclasses import dataclass

from impala_async.errors import ProtocolError
from impala_async.weights import NO_VERSION, Lineage, Version
from impala_async.wire.codec import Frame
from impala_async.wire.messages import (
    Bye,
    ByeOk,
    Data,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Spec,
    Welcome,
    pack,
    unpack,
)
from impala_async.wire.peer import WINDOW, Peer
from impala_async.wire.session import SessionTable, reject
from tests.learner.columns import small_schema
from tests.wire.pure_actor import PureActor

LEASE_S = 4.0
HEARTBEAT_S = 1.0
MAX_LAG = 4
BATCH_COLUMNS = 6
ALL_COLUMNS = 3 * BATCH_COLUMNS
RUN_ID = b"R" * 16
SCHEMA = small_schema()
LEARNER = b"learner"
# What a body turns out to be, once it is looked at.
FAULTS = (None, "nonfinite", "invalid")


@dataclass(frozen=True)
class Checkpoint:
    """What a learner continues from, as it lies on the disk."""

    version: Version
    watermarks: str
    forks: dict[int, int]
    admitted: frozenset[tuple[bytes, int]]


class FakeLearner:
    """Desk and ingest around a session table; slots are a number of free columns."""

    def __init__(
        self,
        wire: "Network",
        epoch: int,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.wire = wire
        self.version = Version(epoch, 0)
        lineage = Lineage(epoch)
        if checkpoint is not None:
            self.version = Version(epoch, checkpoint.version.update)
            past = Lineage(checkpoint.version.epoch, checkpoint.forks)
            lineage = past.resumed(*self.version)
        self.table = SessionTable(
            run_id=RUN_ID,
            lineage=lineage,
            lease_s=LEASE_S,
            max_lag=MAX_LAG,
            new_id=lambda: next(wire.numbers).to_bytes(16, "little"),
        )
        self.admitted: set[tuple[bytes, int]] = set()
        if checkpoint is not None:
            self.table.restore_watermarks(json.loads(checkpoint.watermarks), wire.now)
            self.admitted = set(checkpoint.admitted)
        self.free = ALL_COLUMNS
        # What the last deal was given, less what was admitted since.
        self.handed = 0
        self.received = self.num_admitted = 0
        self.rejected: Counter[str] = Counter()

    def save(self) -> Checkpoint:
        return Checkpoint(
            self.version,
            json.dumps(self.table.watermarks()),
            dict(self.table.lineage.forks),
            frozenset(self.admitted),
        )

    def train(self, updates: int) -> None:
        self.version = Version(self.version.epoch, self.version.update + updates)

    def release(self, columns: int) -> None:
        """Batches are done with."""
        self.free = min(ALL_COLUMNS, self.free + columns)
        self._answer([])

    def reap(self) -> None:
        self.table.expire(self.wire.now)
        self.table.take_back(self.wire.now)
        self._answer([])

    def say_bye(self) -> None:
        for peer in self.table:
            self.wire.send(peer.data_route, LEARNER, Bye(peer.session, 1))

    def receive(self, route: bytes, message: Message) -> None:
        try:
            self._take(route, message)
        except ProtocolError as error:
            code = "hello_again" if error.reason == "unknown_session" else "bad_message"
            self.wire.send(route, LEARNER, reject(code, error.reason, 0.0))

    def _take(self, route: bytes, message: Message) -> None:
        now = self.wire.now
        if isinstance(message, Hello):
            opened = self.table.hello(message, route, now)
            welcome = self._welcome(opened) if isinstance(opened, Peer) else opened
            self.wire.send(route, LEARNER, welcome)
            return
        session = getattr(message, "session", b"")
        peer = self.table.find(session, now)
        if isinstance(message, Bye | ByeOk):
            if peer is not None:
                self.table.end(peer)
            return
        if isinstance(message, Data):
            self.received += message.columns
            if peer is None:
                self.rejected["unknown_session"] += message.columns
        if peer is None:
            raise ProtocolError("unknown_session")
        peer.data_route = route
        if isinstance(message, Spec):
            self.table.join(peer, message.columns, message.streams)
        elif isinstance(message, Data):
            self._ingest(peer, message)
        self._answer([peer])

    def _ingest(self, peer: Peer, data: Data) -> None:
        try:
            verdict = self.table.reserve(peer, data, self.version)
        except ProtocolError:
            self.received -= data.columns
            raise
        if verdict is None and not self.table.has_room(peer, data, self.handed):
            self.received -= data.columns
            return
        version = Version(data.epoch, data.update)
        assert (verdict == "dead_branch") <= (not self.wire.is_ancestor(version))
        verdict = verdict or FAULTS[data.num_episodes]
        if verdict is None:
            self._admit(peer, data, version)
        else:
            self.rejected[verdict] += data.columns
        if verdict != "duplicate":
            self.table.settle(peer, data.seq, verdict)

    def _admit(self, peer: Peer, data: Data, version: Version) -> None:
        key = (peer.actor, data.seq)
        assert key not in self.admitted, f"{key} came in twice"
        assert data.columns <= self.free, "there is no place for it"
        assert self.wire.is_ancestor(version)
        assert 0 <= self.version.update - version.update <= MAX_LAG
        self.admitted.add(key)
        self.num_admitted += data.columns
        self.free -= data.columns
        self.handed -= data.columns

    def _answer(self, peers: list[Peer]) -> None:
        self.handed = min(self.free, BATCH_COLUMNS)
        dealt = self.table.deal(self.handed, now=self.wire.now)
        for peer in {id(peer): peer for peer in (*dealt, *peers)}.values():
            self.wire.send(peer.data_route, LEARNER, peer.grant(self.version))

    def _welcome(self, peer: Peer) -> Welcome:
        return Welcome(
            *(RUN_ID, self.version.epoch, peer.session, peer.rank, 1, "", "", "", bytes(16)),
            *(LEASE_S, HEARTBEAT_S, BATCH_COLUMNS),
        )


class FakeActor:
    """An actor whose trajectories are (version, fault)."""

    def __init__(self, wire: "Network", name: bytes, columns: int, streams: int) -> None:
        self.wire = wire
        self.name = name
        self.columns = columns
        self.num_buffers = streams * (WINDOW + 1)
        self.actor: PureActor[tuple[Version, int]] = PureActor(
            *(name, SCHEMA, bytes(16), columns, streams),
            say=self._say,
            encode=self._encode,
            now=wire.now,
        )
        self.side, self.outbox = self.actor.side, self.actor.side.outbox
        self.version = NO_VERSION
        self.last_said = wire.now
        self.num_produced = 0
        self.actor.tick(wire.now)

    def produce(self, fault: int) -> None:
        """Unroll a trajectory, if there is a buffer for it and there are weights."""
        if self.version != NO_VERSION and len(self.outbox) < self.num_buffers:
            self.outbox.put((self.version, fault))
            self.num_produced += 1

    def tick(self) -> None:
        """What is due by now: a hello, a heartbeat, a second try, what has credit."""
        now = self.wire.now
        if self.side.has_session and self._is_lost(now):
            self.actor.come_back(self.wire.now)
        # On one wire the answer to a heartbeat could pass for the answer to Spec.
        if self.side.is_joined and now - self.last_said >= HEARTBEAT_S:
            self._say([pack(Heartbeat(self.side.session, {}))])
        self.actor.tick(now)

    def leave(self) -> None:
        """Say goodbye."""
        if bye := self.side.bye():
            self._say([pack(bye)])

    def receive(self, message: Message) -> None:
        if isinstance(self.actor.hear(message, self.wire.now), Grant):
            self.version = max(self.version, self.side.named)
            self.actor.tick(self.wire.now)

    def _is_lost(self, now: float) -> bool:
        heard = self.side.last_heard if self.side.is_joined else self.side.told_at
        return now - heard > LEASE_S

    def _encode(self, seq: int, item: tuple[Version, int]) -> list[Frame]:
        version, fault = item
        return [pack(Data(self.side.session, seq, *version, 5, self.columns, 0, fault, None))]

    def _say(self, frames: list[Frame]) -> bool:
        self.last_said = self.wire.now
        self.wire.messages.append((LEARNER, self.name, bytes(frames[0])))
        return True


class Network:
    """One learner at a time, the actors, the clock, and all that is under way between them."""

    def __init__(self) -> None:
        self.now = 0.0
        # To whom, from whom, and the frame.
        self.messages: list[tuple[bytes, bytes, bytes]] = []
        self.numbers = itertools.count(1)
        self.actors: dict[bytes, FakeActor] = {}
        self.epoch = 0
        # From which version each epoch grew.
        self.parents: dict[int, Version | None] = {}
        self.checkpoint: Checkpoint | None = None
        self.restart()

    def restart(self) -> None:
        """A learner dies, and another one continues from the last checkpoint, if there is one."""
        self.epoch += 1
        self.parents[self.epoch] = self.checkpoint.version if self.checkpoint else None
        self.learner = FakeLearner(self, self.epoch, self.checkpoint)

    def send(self, to: bytes, sender: bytes, message: Message) -> None:
        self.messages.append((to, sender, pack(message)))

    def add_actor(self, columns: int, streams: int) -> "FakeActor":
        name = next(self.numbers).to_bytes(16, "big")
        self.actors[name] = FakeActor(self, name, columns, streams)
        return self.actors[name]

    def deliver(self, index: int = 0) -> None:
        """One message arrives; the wire may hold older ones."""
        to, sender, frame = self.messages.pop(index)
        if to == LEARNER:
            self.learner.receive(sender, unpack(frame))
        elif to in self.actors:
            self.actors[to].receive(unpack(frame))

    def is_ancestor(self, version: Version) -> bool:
        """Whether the learner's weights grew out of this version: by walking back."""
        epoch, update = self.learner.version
        while epoch != version.epoch:
            parent = self.parents.get(epoch)
            if parent is None:
                return False
            epoch, update = parent
        return version.epoch >= 1 and version.update <= update

    def settle_everything(self, patience_s: float = 60.0) -> None:
        """The wire works again, time passes, everybody works: what was produced gets settled."""
        produced = {actor: actor.outbox.next_seq for actor in self.actors.values()}
        give_up_at = self.now + patience_s
        while any(actor.outbox.lowest_unsettled < seq for actor, seq in produced.items()):
            assert self.now < give_up_at, "somebody waits for ever"
            self.work()

    def work(self, lost: type | None = None) -> int:
        """Half a second in which all messages arrive, but for those of one kind; how many were."""
        self.now += 0.5
        self.learner.reap()
        self.learner.release(ALL_COLUMNS)
        for actor in self.actors.values():
            # Credit that is never used is never free: whoever lives goes on.
            actor.produce(0)
            actor.tick()
        num_lost = 0
        while self.messages:
            if lost is not None and isinstance(unpack(self.messages[0][2]), lost):
                self.messages.pop(0)
                num_lost += 1
            else:
                self.deliver()
        self.check()
        return num_lost

    def check(self) -> None:
        """What holds at any moment."""
        learner = self.learner
        table = learner.table
        assert table.outstanding_columns <= learner.handed <= learner.free
        assert learner.received == learner.num_admitted + learner.rejected.total()
        for peer in table:
            assert peer.outstanding_messages <= WINDOW * peer.streams
            assert peer.granted >= peer.watermark.below
            assert len(peer.watermark.above) <= 2 * WINDOW * peer.streams
        for actor in self.actors.values():
            assert actor.outbox.next_seq - actor.outbox.lowest_unsettled == len(actor.outbox)
