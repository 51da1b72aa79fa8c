"""A learner in lockstep without sockets, clocks or threads, and actors that pace themselves as
`Client` does. The test decides who moves next, so that any order of events can be played.

    batch b, from 0, is trained by update `first_update + b + 1`
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from impala_async import __version__
from impala_async.learner.loop.filler import Count, Submit
from impala_async.learner.loop.ingest import Ingest
from impala_async.learner.loop.ledger import Ledger, Settlement
from impala_async.learner.loop.lockstep import LockstepFiller
from impala_async.learner.loop.publisher import Publisher
from impala_async.learner.loop.sessions import SessionMessages
from impala_async.learner.slots import Episodes, Slot, allocate_slots
from impala_async.weights import NO_VERSION, Lineage, Version, Weights
from impala_async.wire.codec import encode_data
from impala_async.wire.messages import (
    PROTOCOL,
    Bye,
    Data,
    Get,
    Grant,
    Hello,
    Reject,
    Spec,
    WeightsReply,
    Welcome,
    unpack,
)
from impala_async.wire.session import SessionTable
from tests.learner.columns import planes_of, small_schema

SCHEMA = small_schema()
WIDTH = 2
RUN = b"R" * 16
Trajectory = tuple[int, int, Version]
"""Who sent it, its number, and the version it acted with."""


class FakeEndpoint:
    """Delivers at once what the learner sends, to whoever has the route."""

    def __init__(self, simulation: "LockstepSimulation") -> None:
        self._simulation = simulation
        self.router = self

    def send(self, route: bytes, frames: list[Any]) -> bool:
        actor = next((c for c in self._simulation.actors if c.route == route), None)
        if actor is None:
            return False
        actor.hear(unpack(bytes(frames[0])))
        return True

    def cut(self, route: bytes, why: str) -> None:
        """Nothing is under way over a connection here."""

    def receive_into(self, target: memoryview) -> int:
        schema = SCHEMA.to_json()
        target[: len(schema)] = schema
        return len(schema)

    def has_more_frames(self) -> bool:
        return False


@dataclass(eq=False)
class SimulatedActor:
    """An actor by the rules of `Client`. `route` is empty when it is dead."""

    simulation: "LockstepSimulation"
    number: int
    session: bytes = b""
    rank: int = -1
    version: Version = NO_VERSION
    kept_left: int = 0
    acting: Version | None = None
    held: dict[int, Trajectory] = field(default_factory=dict)
    next_seq: int = 0
    granted: int = 0
    settled: int = 0
    num_acted: int = 0
    is_joined: bool = False
    is_dead: bool = False
    arrived: list[Version] = field(default_factory=list)
    is_turned_away: bool = False
    reason_to_refuse: str = ""

    @property
    def uuid(self) -> bytes:
        return self.number.to_bytes(16, "big")

    @property
    def route(self) -> bytes:
        return b"" if self.is_dead else b"route-%d" % self.number

    @property
    def have(self) -> Version:
        return max([self.version, *self.arrived])

    def hear(self, message: Any) -> None:
        if isinstance(message, Welcome):
            self.session, self.rank = message.session, message.rank
        elif isinstance(message, Grant) and message.session == self.session:
            self.is_joined = True
            self.granted = max(self.granted, message.granted)
            self.settled = max(self.settled, message.settled)
            self.held = {seq: t for seq, t in self.held.items() if seq >= self.settled}
            self.next_seq = max(self.next_seq, self.settled)
        elif isinstance(message, WeightsReply):
            version = Version(message.epoch, message.update)
            if version > self.have:
                self.arrived.append(version)
        elif isinstance(message, Reject):
            self.is_turned_away = True

    # What it does, each if it can; whether it could.

    def join(self) -> bool:
        if self.is_joined or self.is_dead:
            return False
        self.is_turned_away = False
        hello = Hello(
            PROTOCOL, self.uuid, __version__, RUN, 0, min(self.held, default=self.next_seq)
        )
        self.simulation.take(self, hello)
        if self.is_turned_away:
            return False
        self.simulation.take(self, Spec(self.session, SCHEMA.digest, LAYOUT, WIDTH, 1))
        return True

    def pull(self) -> bool:
        """Asks as its link thread does: for the first until it has one, then for what is newer."""
        newest = self.simulation.publisher.version
        if not self.is_joined or self.is_dead or (self.have != NO_VERSION and self.have >= newest):
            return False
        before = len(self.arrived)
        self.simulation.take_get(self, Get(self.session, *self.have))
        # In lockstep it keeps no more than it may need.
        assert len(self.arrived) <= 1 + self.simulation.lag
        return len(self.arrived) > before

    def begin(self) -> bool:
        """A trajectory boundary: all that is finished must be under way, then weights."""
        is_waiting = any(seq >= self.granted for seq in self.held)
        if not self.is_joined or self.is_dead or self.acting or is_waiting:
            return False
        if self.version != NO_VERSION and self.kept_left > 0:
            self.kept_left -= 1
        elif not self.arrived:
            return False
        else:
            if self.version == NO_VERSION:
                self.kept_left = self.simulation.lag
            self.version = self.arrived.pop(0)
        self.acting = self.version
        return True

    def finish(self) -> bool:
        if self.acting is None or self.is_dead or len(self.held) > 2:
            return False
        acted, self.acting = self.acting, None
        if self.version == NO_VERSION:
            return True
        self.held[self.next_seq] = (self.number, self.num_acted, acted)
        self.next_seq += 1
        self.num_acted += 1
        return True

    def send(self) -> bool:
        """The first that has credit and is not settled; it may be damaged."""
        for seq, trajectory in self.held.items():
            if seq < self.granted and self.is_joined and not self.is_dead:
                self.simulation.take_data(self, seq, trajectory)
                return True
        return False

    def beat(self) -> bool:
        """How it finds out that its session is over."""
        is_over = self.is_joined and not self.is_dead and not self.simulation.knows(self)
        if is_over:
            self.lose()
        return is_over

    def lose(self) -> None:
        """Its session is over, as it finds out: what it holds is given up."""
        # It listens to nobody any more but who welcomes it.
        self.is_joined, self.session = False, b""
        self.held.clear()
        self.granted = 0
        self.version = NO_VERSION
        self.arrived.clear()

    def die(self) -> None:
        self.is_dead = True

    WORK = ("pull", "begin", "finish", "send")
    MOVES = ("join", "beat", *WORK)


MAX_ROUNDS = 1000
LAYOUT = b"layout".ljust(16, b"-")


class LockstepSimulation:
    """The learner's side, and everybody who talks to it."""

    def __init__(
        self, num_ranks: int, lag: int, *, first_update: int = 0, stops_at_loss: bool = False
    ) -> None:
        self.num_ranks, self.lag, self.first_update = num_ranks, lag, first_update
        self.num_losses = 0
        self._stops_at_loss = stops_at_loss
        self.ledger = Ledger()
        epoch = 1 if first_update == 0 else 2
        self.lineage = Lineage(epoch - 1).resumed(epoch, first_update)
        sessions = itertools.count(1)
        self.table = SessionTable(
            run_id=RUN,
            lineage=self.lineage,
            lease_s=10.0,
            max_lag=lag,
            new_id=lambda: b"session" + next(sessions).to_bytes(9, "big"),
            num_ranks=num_ranks,
        )
        self.publisher = Publisher(num_kept=1 + lag)
        self.publisher.layout_digest = LAYOUT
        self.full: list[Slot] = []
        self.update = first_update
        self.batches: list[list[Trajectory | None]] = []
        self.lags: list[list[int | None]] = []
        self.episodes: list[tuple[float, int]] = []
        self.actors: list[SimulatedActor] = []
        self.endpoint: Any = FakeEndpoint(self)
        self.sessions = SessionMessages(
            self.table,
            self.publisher,
            welcome=self._welcome(epoch),
            settings_frame=b"",
            rows=SCHEMA.rows,
            lockstep_columns=WIDTH,
            clock=lambda: 0.0,
            on_schema=print,
            find_layout=lambda schema: None,
        )
        self.sessions.schema = SCHEMA
        self.ingest = Ingest(
            self.table,
            self.ledger,
            self.publisher,
            max_columns=num_ranks * WIDTH,
            clock=lambda: 0.0,
            on_episodes=self._take_episodes,
            make_filler=self._make_filler,
        )
        self.slots = allocate_slots(SCHEMA, num_ranks * WIDTH, 3)
        self.ingest.open(SCHEMA, self.slots, lambda index: self.full.append(self.slots[index]))
        self.publish()

    def add_actors(self, num_actors: int | None = None) -> list[SimulatedActor]:
        first = 1 + len(self.actors)
        numbers = range(first, first + (num_actors or self.num_ranks))
        new = [SimulatedActor(self, number) for number in numbers]
        self.actors += new
        return new

    def _welcome(self, epoch: int) -> Welcome:
        return Welcome(
            run_id=RUN, epoch=epoch, session=b"", rank=-1, weights_port=1, ipc_data="",
            ipc_weights="", nonce_path="", nonce=bytes(16), lease_s=10.0, heartbeat_s=2.0,
            max_columns=self.num_ranks * WIDTH,
        )  # fmt: skip

    def _make_filler(self, slots: list[Slot], submit: Submit, count: Count) -> LockstepFiller:
        self.filler = LockstepFiller(
            slots,
            submit,
            count,
            num_ranks=self.num_ranks,
            lag=self.lag,
            first_update=self.first_update,
            on_loss=self._note_loss if self._stops_at_loss else None,
        )
        return self.filler

    def _note_loss(self) -> None:
        self.num_losses += 1
        self.ingest.close()

    def _take_episodes(self, episodes: Episodes) -> None:
        self.episodes += [(float(total), int(length)) for total, length in episodes.tolist()]

    def knows(self, actor: SimulatedActor) -> bool:
        return self.table.peer_of(actor.session) is not None

    def take(self, actor: SimulatedActor, message: Any) -> None:
        self.sessions.handle_data_side(self.endpoint, actor.route, message)
        self.answer()

    def take_get(self, actor: SimulatedActor, get: Get) -> None:
        if not actor.beat():
            self.sessions.handle_weights_side(self.endpoint, actor.route, get)

    def take_data(self, actor: SimulatedActor, seq: int, trajectory: Trajectory) -> None:
        """With what it is in its rewards, so that a slot shows what lies where."""
        if actor.beat():
            return
        number, acted, version = trajectory
        planes = planes_of(SCHEMA, WIDTH, seed=number * 1000 + acted)
        planes.columns.rewards_CT[:] = number * 1000 + acted
        if actor.reason_to_refuse:
            planes.columns.obs[""][0, 1] = np.nan
        header = Data(actor.session, seq, *version, SCHEMA.rows, WIDTH, 0, 0, None)
        episodes = [(float(actor.rank), acted + 1)]
        (frame,) = encode_data(header, planes.obs, planes.small, episodes)
        data = unpack(bytes(frame))
        assert isinstance(data, Data)
        self.ingest.handle(self.endpoint, actor.route, data)
        self.answer()

    def answer(self) -> None:
        self.ingest.answer(self.endpoint)
        self.check()

    def check(self) -> None:
        """What must hold at any moment."""
        assert self.table.outstanding_columns <= self.filler.free_columns
        report = self.ledger.report()
        count = {k.removeprefix("trajectories/"): v for k, v in report.items()}
        assert count["received"] == count["admitted"] + count["rejected"]
        assert count["admitted"] == count["trained"] + count["dropped"] + count["in_slots"]
        assert 0 <= count["in_slots"] <= len(self.slots) * self.num_ranks * WIDTH

    def publish(self) -> None:
        version = Version(self.lineage.epoch, self.update)
        self.publisher.publish(Weights(version, np.zeros(4, np.uint8)))
        self.ingest.note_version(self.update)
        self.answer()

    def train(self) -> bool:
        """The update of the oldest full slot, as the learner thread tells of it."""
        if not self.full:
            return False
        slot = self.full.pop(0)
        assert slot.batch == len(self.batches) + 1
        assert np.isfinite(slot.columns.obs[""]).all()
        lags = (self.update - slot.updates_B).tolist()
        rewards = slot.columns.rewards_CT[:, 0].astype(int).tolist()
        places = range(0, len(slot.filled_B), WIDTH)
        self.batches.append(
            [
                (rewards[p] // 1000, rewards[p] % 1000, Version(1, int(slot.updates_B[p])))
                if slot.filled_B[p]
                else None
                for p in places
            ]
        )
        self.lags.append([lags[p] if slot.filled_B[p] else None for p in places])
        self.update += 1
        self.publish()
        trained = int(slot.filled_B.sum())
        self.ledger.settle(Settlement(slot.batch, trained=trained, passes_done=trained))
        self.ingest.release(slot.index)
        self.answer()
        return True

    def end_session(self, actor: SimulatedActor) -> None:
        """Its lease is over."""
        for peer in self.table:
            if peer.actor == actor.uuid:
                self.sessions.lose(peer, "its lease is over")
        self.answer()

    def leave(self, actor: SimulatedActor) -> None:
        """It says goodbye."""
        self.take(actor, Bye(actor.session, 1))
        actor.is_dead = True

    def settle_down(self, moves: tuple[str, ...] = SimulatedActor.WORK) -> int:
        """Everybody who can moves until nobody can; how many updates there were.

        A simulation that can go on does so for ever, so this ends after some.
        """
        before = self.update
        for _ in range(MAX_ROUNDS):
            if self.update - before >= 12:
                break
            has_moved = [getattr(c, move)() for c in self.actors for move in moves]
            if not self.train() and not any(has_moved):
                break
        return self.update - before
