"""A whole network in one thread: a learner's table, actors with outboxes, and a wire that loses,
repeats, delays and reorders what is on it. The clock is a number.

The learner and the actors here do what `learner/` and `actor/` do, without sockets and bodies.
They check as they go: what is admitted has a place, comes once, and is of the right branch.
"""

import itertools
import json
from collections import Counter
from dataclasses import dataclass

from impala_async.errors import ProtocolError
from impala_async.weights import NO_VERSION, Lineage, Version
from impala_async.wire.messages import (
    PROTOCOL,
    REJECT_CODES,
    Bye,
    ByeOk,
    Data,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Reject,
    Spec,
    Welcome,
    pack,
    unpack,
)
from impala_async.wire.outbox import Outbox
from impala_async.wire.session import WINDOW, Peer, SessionTable, reject

LEASE_S = 4.0
HEARTBEAT_S = 1.0
MAX_LAG = 4
BATCH_COLUMNS = 6
ALL_COLUMNS = 3 * BATCH_COLUMNS
RUN_ID = b"R" * 16
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


class Network:
    """Everything there is, and the messages under way: (to whom, from whom, frame)."""

    def __init__(self) -> None:
        self.now = 0.0
        self.wire: list[tuple[bytes, bytes, bytes]] = []
        self.actors: dict[bytes, FakeActor] = {}
        self.epoch = 0
        # From which version each epoch grew.
        self.parents: dict[int, Version | None] = {}
        self.checkpoint: Checkpoint | None = None
        self.numbers = itertools.count(1)
        self.restart()

    def restart(self) -> None:
        """A learner dies, and another one continues from the last checkpoint, if there is one."""
        self.epoch += 1
        self.parents[self.epoch] = self.checkpoint.version if self.checkpoint else None
        self.learner = FakeLearner(self, self.epoch, self.checkpoint)

    def add_actor(self, columns: int, streams: int) -> "FakeActor":
        name = next(self.numbers).to_bytes(16, "big")
        self.actors[name] = FakeActor(self, name, columns, streams)
        return self.actors[name]

    def send(self, to: bytes, sender: bytes, message: Message) -> None:
        self.wire.append((to, sender, pack(message)))

    def deliver(self, index: int = 0) -> None:
        """One message arrives; the wire may hold older ones."""
        to, sender, frame = self.wire.pop(index)
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
            self.now += 0.5
            self.learner.reap()
            self.learner.release(ALL_COLUMNS)
            for actor in produced:
                # Credit that is never used is never free: whoever lives goes on.
                actor.produce(0)
                actor.tick()
            while self.wire:
                self.deliver()
            self.check()

    def check(self) -> None:
        """What holds at any moment."""
        learner = self.learner
        table = learner.table
        assert table.outstanding_columns <= learner.handed <= learner.free
        assert learner.received == learner.num_admitted + learner.rejected.total()
        for peer in table:
            assert peer.outstanding_messages <= peer.window
            assert peer.granted >= peer.watermark.below
            assert len(peer.watermark.above) <= 2 * peer.window
        for actor in self.actors.values():
            assert actor.outbox.next_seq - actor.outbox.lowest_unsettled == len(actor.outbox)


class FakeLearner:
    """Desk and ingest around a session table; slots are a number of free columns."""

    def __init__(self, network: Network, epoch: int, checkpoint: Checkpoint | None) -> None:
        self.network = network
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
            new_id=lambda: next(network.numbers).to_bytes(16, "little"),
        )
        self.admitted: set[tuple[bytes, int]] = set()
        if checkpoint is not None:
            self.table.restore_watermarks(json.loads(checkpoint.watermarks), network.now)
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
        self.table.expire(self.network.now)
        self._answer([])

    def say_bye(self) -> None:
        for peer in self.table:
            self._send(peer.data_route, Bye(peer.session, 1))

    def receive(self, route: bytes, message: Message) -> None:
        try:
            self._take(route, message)
        except ProtocolError as error:
            code = "hello_again" if error.reason == "unknown_session" else "bad_message"
            self._send(route, reject(code, error.reason, 0.0))

    def _take(self, route: bytes, message: Message) -> None:
        now = self.network.now
        if isinstance(message, Hello):
            opened = self.table.hello(message, route, now)
            self._send(route, self._welcome(opened) if isinstance(opened, Peer) else opened)
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
            peer.columns, peer.streams = message.columns, message.streams
        elif isinstance(message, Data):
            self._ingest(peer, message)
        self._answer([peer])

    def _ingest(self, peer: Peer, data: Data) -> None:
        try:
            verdict = self.table.reserve(peer, data, self.version)
        except ProtocolError:
            self.received -= data.columns
            raise
        version = Version(data.epoch, data.update)
        assert (verdict == "dead_branch") <= (not self.network.is_ancestor(version))
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
        assert self.network.is_ancestor(version)
        assert 0 <= self.version.update - version.update <= MAX_LAG
        self.admitted.add(key)
        self.num_admitted += data.columns
        self.free -= data.columns
        self.handed -= data.columns

    def _answer(self, peers: list[Peer]) -> None:
        self.handed = min(self.free, BATCH_COLUMNS)
        dealt = self.table.deal(self.handed)
        for peer in {id(peer): peer for peer in (*dealt, *peers)}.values():
            self._send(peer.data_route, peer.grant(self.version))

    def _welcome(self, peer: Peer) -> Welcome:
        return Welcome(
            *(RUN_ID, self.version.epoch, peer.session, peer.rank, 1, "", "", "", bytes(16)),
            *(LEASE_S, HEARTBEAT_S, BATCH_COLUMNS),
        )

    def _send(self, route: bytes, message: Message) -> None:
        self.network.send(route, LEARNER, message)


class FakeActor:
    """The client around an outbox; its trajectories are (version, fault)."""

    def __init__(self, network: Network, name: bytes, columns: int, streams: int) -> None:
        self.network = network
        self.name = name
        self.columns = columns
        self.streams = streams
        self.outbox: Outbox[tuple[Version, int]] = Outbox()
        self.welcome: Welcome | None = None
        self.is_at_work = False
        self.has_credit = False
        self.version = NO_VERSION
        self.last_heard = self.last_said = network.now
        self.num_produced = 0
        self._send_hello()

    def produce(self, fault: int) -> None:
        """Unroll a trajectory, if there is a buffer for it and there are weights."""
        has_buffer = len(self.outbox) < self.streams * (WINDOW + 1)
        if self.version != NO_VERSION and has_buffer:
            self.outbox.put((self.version, fault))
            self.num_produced += 1

    def tick(self) -> None:
        """What is due by now: a hello, a heartbeat, a second try, what has credit."""
        now = self.network.now
        is_due = now - self.last_said >= HEARTBEAT_S
        if not self.is_at_work:
            if is_due:
                self._send_hello()
            return
        if now - self.last_heard > LEASE_S:
            self.come_back()
            return
        if is_due:
            self._send(Heartbeat(self._session, {}))
            if not self.has_credit:
                self._send_spec()
        self.outbox.resend_overdue(now, LEASE_S)
        while (one := self.outbox.sendable()) is not None:
            seq, (version, fault) = one
            self._send(
                Data(self._session, seq, *version, 5, self.columns, 0, fault, None),
            )
            self.outbox.mark_sent(seq, now)

    def come_back(self) -> None:
        self.is_at_work = False
        self._send_hello()

    def leave(self) -> None:
        """Say goodbye and be gone."""
        if self.welcome is not None:
            self._send(Bye(self._session, 2))
        del self.network.actors[self.name]

    def receive(self, message: Message) -> None:
        self.last_heard = self.network.now
        if isinstance(message, Welcome) and not self.is_at_work:
            if self.welcome is None or message.epoch >= self.welcome.epoch:
                self._begin(message)
        elif isinstance(message, Grant) and self.is_at_work and message.session == self._session:
            self.outbox.on_grant(message)
            self.has_credit |= message.granted > message.settled
            self.version = max(self.version, Version(message.epoch, message.update))
            self.tick()
        elif isinstance(message, Reject) and self.is_at_work:
            assert REJECT_CODES[message.code] in ("hello_again", "bad_message")
            if message.code == REJECT_CODES.index("hello_again"):
                self.come_back()
        elif isinstance(message, Bye) and self.is_at_work:
            self._send(ByeOk(message.session))
            self.come_back()

    def _begin(self, welcome: Welcome) -> None:
        self.welcome = welcome
        self.is_at_work, self.has_credit = True, False
        self.outbox.on_new_session()
        self._send_spec()

    @property
    def _session(self) -> bytes:
        assert self.welcome is not None
        return self.welcome.session

    def _send_hello(self) -> None:
        run_id, epoch = (bytes(16), 0)
        if self.welcome is not None:
            run_id, epoch = self.welcome.run_id, self.welcome.epoch
        lowest = self.outbox.lowest_unsettled
        self._send(Hello(PROTOCOL, self.name, "0.1.0", run_id, epoch, lowest))

    def _send_spec(self) -> None:
        self._send(Spec(self._session, bytes(16), bytes(16), self.columns, self.streams))

    def _send(self, message: Message) -> None:
        self.last_said = self.network.now
        self.network.send(LEARNER, self.name, message)
