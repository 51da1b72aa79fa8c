"""Trajectories in: from the data port straight into slots, each with one verdict, counted.

What comes in one burst is received first, one behind the other in the slot that is filling, and
then checked all at once: of many small messages each costs a fraction of a check.

Runs on: event loop
"""

import logging
import math
from collections.abc import Callable
from typing import NamedTuple

from impala_async.errors import ProtocolError
from impala_async.learner.loop.body import BodyReader
from impala_async.learner.loop.endpoint import Endpoint
from impala_async.learner.loop.filler import Arrival, Count, SlotFiller, Submit
from impala_async.learner.loop.ledger import Ledger
from impala_async.learner.loop.lockstep import LockstepFiller
from impala_async.learner.loop.publisher import Publisher
from impala_async.learner.recorder import Recorder
from impala_async.learner.slots import Episodes, Region, Slot
from impala_async.schema import Schema
from impala_async.trajectory import Fault
from impala_async.weights import NO_VERSION, Version
from impala_async.wire.messages import Data, pack
from impala_async.wire.peer import Peer
from impala_async.wire.session import SessionTable
from impala_async.wire.sockets import Router

logger = logging.getLogger(__name__)

UNFIT_VERSIONS = {
    "invalid": "it was acted with weights of a version that it cannot have had",
    "stale": "it was acted with weights that are too old by now",
    "dead_branch": "it was acted with weights of an epoch that was given up",
}
WARN_EVERY_S = 10.0
Filler = SlotFiller | LockstepFiller
MakeFiller = Callable[[list[Slot], Submit, Count], Filler]


class _Received(NamedTuple):
    """A message whose planes are in their place, unchecked."""

    peer: Peer
    data: Data
    region: Region
    episodes: Episodes | None


class Ingest:
    """Admits columns into slots and gives out credit for what is free.

    Until `open` has given it slots, it admits and grants nothing.
    """

    def __init__(
        self,
        table: SessionTable,
        ledger: Ledger,
        publisher: Publisher,
        *,
        max_columns: int,
        clock: Callable[[], float],
        on_episodes: Callable[[Episodes], None],
        make_filler: MakeFiller = SlotFiller,
        recorder: Recorder | None = None,
    ) -> None:
        self._table = table
        self._ledger = ledger
        self._publisher = publisher
        self._max_columns = max_columns
        self._clock = clock
        self._on_episodes = on_episodes
        self._make_filler = make_filler
        self._recorder = recorder
        self._filler: Filler | None = None
        # By session and seq, in the order of their arrival.
        self._received: dict[tuple[bytes, int], _Received] = {}
        # Sessions that have sent something since the last word to them.
        self._to_acknowledge: dict[bytes, Peer] = {}
        self._is_closed = False
        self._num_turned_away = 0
        self._warn_at: dict[str, float] = {}

    def open(self, schema: Schema, slots: list[Slot], submit: Callable[[int], None]) -> None:
        """Slots are there: credit can be given out."""

        def submit_batch(slot: Slot) -> None:
            self._ledger.submit(slot.batch, int(slot.filled_B.sum()))
            submit(slot.index)

        self._filler = self._make_filler(slots, submit_batch, self._on_episodes)
        self._bodies = BodyReader(schema, self._filler.batch_columns)

    def handle(self, endpoint: Endpoint, route: bytes, data: Data) -> None:
        """Reserve by the header and receive the body; or give the reason why not."""
        peer = self._table.find(data.session, self._clock())
        if peer is None:
            self._refuse(data, "unknown_session")
            raise ProtocolError("unknown_session")
        peer.data_route = route
        self._to_acknowledge[peer.session] = peer
        if self._is_closed:
            return  # what is under way at the end never came: the actor is told so by our goodbye
        if self._filler is None:
            raise ProtocolError("not_allowed_now", "Data before Spec")
        verdict = self._judge(peer, data, self._filler)
        if verdict is None:
            if data.seq < peer.lapsed:
                # The messages that have been received still count as under way.
                self.decide()
            if self._table.has_room(peer, data, self._filler.free_columns):
                self._receive(endpoint.router, peer, data, self._filler)
            elif peer.gives_way:
                self._num_turned_away += data.columns
            else:
                self._refuse(data, "unknown_session")
                raise ProtocolError("unknown_session")
            return
        if verdict in UNFIT_VERSIONS:
            self._warn(peer, data, verdict, UNFIT_VERSIONS[verdict], hint="")
        self._settle(peer, data, verdict)

    def decide(self) -> None:
        """Check what has been received, and take it in or refuse it."""
        if self._filler is None:
            return
        received = list(self._received.values())
        self._received.clear()
        faults = self._bodies.find_faults([(each.region, each.episodes) for each in received])
        arrivals = []
        for message, fault in zip(received, faults, strict=True):
            if fault is None:
                arrivals.append(self._admit(message))
            else:
                self._warn(message.peer, message.data, *fault)
            self._settle(message.peer, message.data, fault.reason if fault else None)
        self._filler.commit(arrivals)

    def release(self, slot: int) -> None:
        """A slot is empty again."""
        assert self._filler is not None
        self._filler.release(slot)

    def note_version(self, update: int) -> None:
        """A version is published."""
        if self._filler is not None and not self._is_closed:
            self._filler.note_version(update)

    def answer(self, endpoint: Endpoint) -> None:
        """Deal out the free credit, and tell whoever got some. The others wait: a word to each
        message would cost the learner thread more than it tells the actor."""
        self.decide()
        # Before the first version nothing can be judged: what an earlier start earned looks wrong.
        is_ready = self._publisher.version != NO_VERSION and not self._is_closed
        is_held_back = self._recorder is not None and self._recorder.is_behind
        if self._filler is not None and is_ready and not is_held_back:
            for peer in self._filler.deal(self._table, self._clock()):
                self._to_acknowledge.pop(peer.session, None)
                self._grant(endpoint, peer)

    @property
    def owes_acknowledgements(self) -> bool:
        return bool(self._to_acknowledge)

    def acknowledge(self, endpoint: Endpoint) -> None:
        """Tell those what became of what they sent who got no credit since."""
        self.decide()
        for peer in self._to_acknowledge.values():
            self._grant(endpoint, peer)
        self._to_acknowledge.clear()

    def close(self) -> None:
        """Nothing more comes in; what fills the last slot is given up."""
        self._is_closed = True
        self._ledger.abandon_filling()

    def report(self) -> dict[str, object]:
        return {
            "credit/granted_columns": self._table.outstanding_columns,
            "credit/free_columns": self._filler.free_columns if self._filler else 0,
            "credit/turned_away": self._num_turned_away,
            **(self._filler.report() if self._filler else {}),
        }

    def _grant(self, endpoint: Endpoint, peer: Peer) -> None:
        endpoint.send(peer.data_route, [pack(peer.grant(self._publisher.version))])

    def _judge(self, peer: Peer, data: Data, filler: Filler) -> str | None:
        """By the header: why it cannot be taken, if so."""
        if (peer.session, data.seq) in self._received:
            return "duplicate"
        verdict = self._table.reserve(peer, data, self._publisher.version)
        return verdict or filler.judge(peer.rank, Version(data.epoch, data.update))

    def _receive(self, router: Router, peer: Peer, data: Data, filler: Filler) -> None:
        try:
            region = filler.assign(data.columns, peer.rank)
            if region is None:
                self.decide()
                if self._is_closed:
                    return
                region = filler.assign(data.columns, peer.rank)
            assert region is not None, "there is always room for what has a credit"
            episodes = self._bodies.receive(router, data, region)
        except ProtocolError as error:
            fault = Fault("invalid", str(error))
            self._warn(peer, data, *fault)
            self._settle(peer, data, fault.reason)
            raise
        self._received[peer.session, data.seq] = _Received(peer, data, region, episodes)
        if region.is_only:
            self.decide()

    def _admit(self, message: _Received) -> Arrival:
        peer, data, region, episodes = message
        self._ledger.receive(data.columns)
        self._ledger.admit(data.columns)
        if self._recorder is not None:
            self._recorder.take(peer.rank, data, region, episodes)
        valid_rows = self._bodies.count_valid(region)
        return Arrival(peer.rank, region, valid_rows, Version(data.epoch, data.update), episodes)

    def _settle(self, peer: Peer, data: Data, verdict: str | None) -> None:
        """Count what was refused, and give its credit back."""
        if verdict is not None:
            self._refuse(data, verdict)
        if verdict != "duplicate":
            self._table.settle(peer, data.seq, verdict)
            if verdict is not None and self._filler is not None:
                self._filler.skip(peer.rank)

    def _warn(
        self, peer: Peer, data: Data, reason: str, what: str, hint: str = " Is it the environment?"
    ) -> None:
        """Data that is wrong is wrong at its source: say so, now and then."""
        now = self._clock()
        if now < self._warn_at.get(reason, -math.inf):
            return
        logger.warning(
            "actor %d: a message of %d columns is refused: %s (%s, %d columns so far from all "
            "actors).%s",
            peer.rank,
            data.columns,
            what,
            reason,
            self._ledger.rejected(reason) + data.columns,
            hint,
        )
        self._warn_at[reason] = now + WARN_EVERY_S

    def _refuse(self, data: Data, reason: str) -> None:
        # A stranger can claim any number.
        columns = min(data.columns, self._max_columns)
        self._ledger.receive(columns)
        self._ledger.reject(columns, reason)
