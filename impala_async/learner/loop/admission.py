"""Trajectories into slots, without sockets, clocks and threads: a message and a moment go in, its
further frames are received where they are to lie, and answers come out. The messages of a burst are
received first and then checked all at once, so that many small ones share the cost of a check.

Runs on: event loop
"""

import logging
import math
from collections.abc import Callable, Sequence

import numpy as np

from impala_async.errors import ProtocolError
from impala_async.learner.loop.sessions import Answer, Sessions
from impala_async.learner.recorder import Recorder
from impala_async.learner.slots import Arrival, Episodes, Slot
from impala_async.schema import Schema
from impala_async.trajectory import LARGEST, ColumnChecks, Fault
from impala_async.weights import NO_VERSION, Version
from impala_async.wire import messages as wire
from impala_async.wire.peer import Peer
from impala_async.wire.sockets import NO_FRAME, Router

logger = logging.getLogger(__name__)

UNFIT_VERSIONS = {
    "invalid": "it was acted with weights of a version that it cannot have had",
    "stale": "it was acted with weights that are too old by now",
    "dead_branch": "it was acted with weights of an epoch that was given up",
}
WARN_EVERY_S = 10.0
TWO_FRAMES = "a body has 2 frames, or is in the header"


class Receiver:
    """Receives the bodies of one schema's messages, which tells their sizes, and checks them."""

    def __init__(self, schema: Schema, most_columns: int) -> None:
        self._schema = schema
        self._checks = ColumnChecks(schema)
        largest = wire.body_sizes(schema.layout, most_columns, most_columns * schema.rows)
        self._small = np.zeros(largest.small, np.uint8)
        self._packed = np.zeros(largest.obs, np.uint8)

    def receive(self, rest: Router, arrival: Arrival) -> Arrival:
        """Receive both planes into their place, and the episodes that came with them, if any; or
        raise ProtocolError for another size or form than such a message can have."""
        data, obs = arrival.data, arrival.obs.reshape(-1)
        if data.rows != self._schema.rows:
            raise ProtocolError("wrong_size", f"{data.rows} rows, not {self._schema.rows}")
        if data.num_episodes > data.columns * data.rows:
            size = f"{data.columns} x {data.rows} rows"
            raise ProtocolError("wrong_size", f"{data.num_episodes} episodes in {size}")
        if data.num_cut >= data.rows:
            raise ProtocolError("wrong_size", f"{data.num_cut} rows cut of {data.rows}")
        sizes = wire.body_sizes(self._schema.layout, data.columns, data.num_episodes)
        small = self._small[: sizes.small]
        if data.body is not None:
            if data.codec != wire.PLAIN:
                raise ProtocolError("wrong_size", "a body that is inline is never compressed")
            parts = wire.split_inline(data.body, sizes)
            obs[:], small = (np.frombuffer(part, np.uint8) for part in parts)
        elif data.codec == wire.ZSTD:
            packed = self._packed.data[: sizes.obs]
            wire.decompress_into(obs.data, packed[: _receive(rest, packed, is_whole=False)])
        else:
            _receive(rest, obs.data)
        if data.body is None:
            _receive(rest, small.data)
        if rest.has_more_frames:
            raise ProtocolError("wrong_frame_count", TWO_FRAMES)
        num_bytes = arrival.small.nbytes
        arrival.small.reshape(-1)[:] = small[:num_bytes]
        if not data.num_episodes:
            return arrival
        # The next message will be received where the episodes lie now.
        return arrival._replace(episodes=np.frombuffer(small[num_bytes:].tobytes(), wire.EPISODE))

    def find_faults(self, arrivals: Sequence[Arrival]) -> list[Fault | None]:
        """Find the fault of each. Where there is none, one look at all of them shows it."""
        faults = [_find_episode_fault(arrival.episodes) for arrival in arrivals]
        if len(arrivals) > 1:
            first, last = arrivals[0], arrivals[-1]
            assert first.slot is not None
            whole = slice(first.start, last.start + last.data.columns)
            if self._checks.find_fault(first.slot.obs[whole], first.slot.small[whole]) is None:
                return faults
        return [
            self._checks.find_fault(arrival.obs, arrival.small) or fault
            for arrival, fault in zip(arrivals, faults, strict=True)
        ]


def _receive(rest: Router, into: memoryview, *, is_whole: bool = True) -> int:
    size = rest.receive_into(into)
    if size == NO_FRAME:
        raise ProtocolError("wrong_frame_count", TWO_FRAMES)
    if size > len(into) or (is_whole and size < len(into)):
        raise ProtocolError("wrong_size", f"a frame of {size} bytes, not {len(into)}")
    return size


def _find_episode_fault(episodes: Episodes | None) -> Fault | None:
    """A return that is no number would stay in every mean and in every checkpoint."""
    if episodes is None:
        return None
    totals, lengths = episodes["total"], episodes["length"]
    if lengths.min() < 1:
        return Fault("invalid", "an episode has no steps")
    # NaN is not below either. The reward that made it so was refused, and a mean could end the run.
    if not (np.abs(totals) <= LARGEST * lengths).all():
        told = f"an episode has a return that is not finite, or of more than {LARGEST:g} a step"
        return Fault("nonfinite", told)
    return None


class Admission:
    """Admits columns into slots, each message with one verdict, and deals credit for free room."""

    def __init__(self, sessions: Sessions, recorder: Recorder | None = None) -> None:
        self._sessions, self._recorder = sessions, recorder
        self._table, self._publisher = sessions.table, sessions.publisher
        self._filler, self._ledger = sessions.filler, sessions.filler.ledger
        # By session and seq, in the order of their arrival: in their place, unchecked.
        self._received: dict[tuple[bytes, int], Arrival] = {}
        # Sessions that have sent something since the last word to them.
        self.to_acknowledge: dict[bytes, Peer] = {}
        self._num_turned_away = 0
        self._warn_at: dict[str, float] = {}

    def open(self, schema: Schema, slots: list[Slot], submit: Callable[[int], None]) -> None:
        """Slots are there: credit can be given out. `submit` takes the index of a full one."""
        self._filler.open(slots, submit)
        self._bodies = Receiver(schema, self._filler.batch_columns)

    def hear(self, route: bytes, message: wire.Message, rest: Router, now: float) -> list[Answer]:
        """Answer a message on the data port, if that cannot wait for the end of the burst."""
        if isinstance(message, wire.Data):
            self._take(route, message, rest, now)
            return []
        # A goodbye or a new hello is said after what was sent before.
        self.decide(now)
        return self._sessions.hear(route, message, rest, now)

    def decide(self, now: float) -> None:
        received = list(self._received.values())
        self._received.clear()
        faults = self._bodies.find_faults(received) if received else []
        admitted = []
        for arrival, fault in zip(received, faults, strict=True):
            peer, data = arrival.peer, arrival.data
            if fault is not None:
                self._settle(peer, data, fault.reason, fault.what, now)
                continue
            self._ledger.admit(data.columns)
            if self._recorder is not None:
                self._recorder.take(arrival)
            self._table.settle(peer, data.seq, None)
            admitted.append(arrival)
        self._filler.commit(admitted)

    def deal(self, now: float) -> list[Answer]:
        """Deal out the free credit, and tell whoever got some. The others wait: a word to each
        message would cost the learner thread more than it tells the actor."""
        self.decide(now)
        # Before the first version nothing can be judged: what an earlier start earned looks wrong.
        is_ready = self._publisher.version != NO_VERSION and not self._sessions.is_closing
        if not is_ready or (self._recorder is not None and self._recorder.is_behind):
            return []
        dealt = self._filler.deal(self._table, now)
        for peer in dealt:
            self.to_acknowledge.pop(peer.session, None)
        return [self._sessions.grant(peer) for peer in dealt]

    def acknowledge(self, now: float) -> list[Answer]:
        """Tell those what became of what they sent who got no credit since."""
        self.decide(now)
        answers = [self._sessions.grant(peer) for peer in self.to_acknowledge.values()]
        self.to_acknowledge.clear()
        return answers

    def close(self) -> None:
        """Nobody and nothing more comes in; what fills the last slot is given up."""
        self._sessions.is_closing = True
        self._ledger.abandon()

    def report(self) -> dict[str, object]:
        return {
            "credit/granted_columns": self._table.outstanding_columns,
            "credit/free_columns": self._filler.free_columns,
            "credit/turned_away": self._num_turned_away,
            **(self._filler.report() if self._filler.batch_columns else {}),
        }

    def _take(self, route: bytes, data: wire.Data, rest: Router, now: float) -> None:
        peer = self._table.find(data.session, now)
        if peer is None:
            raise self._unknown(data)
        peer.data_route = route
        self.to_acknowledge[peer.session] = peer
        if self._sessions.is_closing:
            return  # what is under way at the end never came: the actor is told so by our goodbye
        verdict = "duplicate" if (peer.session, data.seq) in self._received else None
        verdict = verdict or self._table.reserve(peer, data, self._publisher.version)
        verdict = verdict or self._filler.judge(peer, Version(data.epoch, data.update))
        if verdict is not None:
            self._settle(peer, data, verdict, UNFIT_VERSIONS.get(verdict), now)
            return
        if data.seq < peer.lapsed_below:
            # The messages that have been received still count as under way.
            self.decide(now)
        if self._table.has_room(peer, data, self._filler.free_columns):
            self._receive(peer, data, rest, now)
        elif peer.gives_way:
            self._num_turned_away += data.columns
        else:
            raise self._unknown(data)

    def _receive(self, peer: Peer, data: wire.Data, rest: Router, now: float) -> None:
        try:
            place = self._filler.assign(peer, data)
            if place is None:
                self.decide(now)
                if self._sessions.is_closing:
                    return
                place = self._filler.assign(peer, data)
            assert place is not None, "there is always room for what has a credit"
            arrival = self._bodies.receive(rest, place)
        except ProtocolError as error:
            self._settle(peer, data, "invalid", str(error), now)
            raise
        self._received[peer.session, data.seq] = arrival
        if arrival.slot is None:
            self.decide(now)

    def _settle(
        self, peer: Peer, data: wire.Data, verdict: str, what: str | None, now: float
    ) -> None:
        """Refuse for good: count it, give its credit back, and say now and then `what` is wrong."""
        self._refuse(data, verdict)
        if verdict != "duplicate":
            # Messages that came before it are settled first: those that are admitted speak for
            # their actor, and those that are refused against it.
            self.decide(now)
            self._table.settle(peer, data.seq, verdict)
            self._filler.skip(peer)
        if what and now >= self._warn_at.get(verdict, -math.inf):
            self._warn_at[verdict] = now + WARN_EVERY_S
            total = self._ledger.report()[f"rejected/{verdict}"]
            text = "actor %d: a message of %d columns is refused: %s (%s, %s)"
            so_far = f"{total} columns so far from all actors"
            logger.warning(text, peer.number, data.columns, what, verdict, so_far)

    def _unknown(self, data: wire.Data) -> ProtocolError:
        self._refuse(data, "unknown_session")
        return ProtocolError("unknown_session")

    def _refuse(self, data: wire.Data, reason: str) -> None:
        # A stranger can claim any number.
        self._ledger.reject(min(data.columns, self._sessions.welcome.max_columns), reason)
