"""Messages that come in one burst are checked together, and fare as if each had come alone."""

import itertools
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from impala_async.errors import ProtocolError
from impala_async.learner.ingest import Ingest
from impala_async.learner.ledger import Ledger, Settlement
from impala_async.learner.publisher import Publisher
from impala_async.learner.slots import Place, allocate_slots
from impala_async.screen import Screen
from impala_async.weights import Lineage, Version, Weights
from impala_async.wire.codec import encode_data
from impala_async.wire.messages import PROTOCOL, Data, Hello, unpack
from impala_async.wire.session import Peer, SessionTable
from tests.learner.columns import planes_of, small_schema

SCHEMA = small_schema()
B = 8
NEWEST = Version(1, 5)
WIDTHS = (1, 2, 3)
KINDS = ("good", "good", "good", "nan", "no choice", "endless episode", "short", "again", "stale",
         "from nowhere", "without credit")  # fmt: skip
Step = tuple[int, str]
"""Who sends, and what."""


class Deaf:
    """A port that sends nothing; whatever comes is inline."""

    router = None

    def send(self, route: bytes, frames: list[Any]) -> bool:
        return True


class Bay:
    """An ingest with its table and ledger, three actors, and a learner that is done at once."""

    def __init__(self) -> None:
        numbers = itertools.count()
        self.table = SessionTable(
            run_id=bytes(16),
            lineage=Lineage(0).resumed(1, 0),
            lease_s=10.0,
            max_lag=3,
            new_id=lambda: next(numbers).to_bytes(16, "big"),
        )
        self.ledger = Ledger()
        publisher = Publisher()
        publisher.publish(Weights(NEWEST, np.zeros(4, np.uint8)))
        self.episodes: list[tuple[float, int]] = []
        self.batches: list[Any] = []
        self.refused: list[str] = []
        self.full: list[int] = []
        self.taken: list[tuple[int, int, bytes]] = []
        self.is_behind = False
        self.port: Any = Deaf()
        self.ingest = Ingest(
            self.table,
            self.ledger,
            publisher,
            clock=lambda: 0.0,
            on_episodes=lambda episodes: self.episodes.extend(episodes.tolist()),
            tap=self,
        )
        self.slots = allocate_slots(SCHEMA, B, 3)
        self.ingest.open(SCHEMA, self.slots, self.full.append)
        self.peers = [self._join(number, width) for number, width in enumerate(WIDTHS)]
        self.next_seqs = [0] * len(WIDTHS)
        self.num_sent = 0
        self.ingest.answer(self.port)

    def take(self, rank: int, data: Data, place: Place, episodes: Any) -> None:
        self.taken.append((rank, data.seq, place.obs.tobytes() + place.small.tobytes()))

    def send(self, step: Step) -> None:
        number, kind = step
        try:
            self.ingest.handle(self.port, b"", self._message(self.peers[number], number, kind))
        except ProtocolError as error:
            self.refused.append(error.reason)

    def end_burst(self) -> None:
        self.ingest.decide()
        for index in self.full:
            slot = self.slots[index]
            planes = (slot.obs.tobytes(), slot.small.tobytes())
            self.batches.append((*planes, slot.updates_B.tolist(), slot.valid_rows_B.tolist()))
            self.ledger.settle(Settlement(slot.batch, trained=B, passes_done=B))
            self.ingest.release(index)
        self.full.clear()
        self.ingest.answer(self.port)

    def all_that_came_of_it(self) -> Any:
        verdicts = [peer.verdicts for peer in self.peers]
        marks = [(peer.granted, peer.watermark.below) for peer in self.peers]
        told = (self.batches, self.episodes, self.refused, self.taken, verdicts, marks)
        return told, self.ledger.report()

    def _join(self, number: int, width: int) -> Peer:
        hello = Hello(PROTOCOL, bytes([number]) * 16, "", bytes(16), 0, 0)
        peer = self.table.hello(hello, b"", 0.0)
        assert isinstance(peer, Peer)
        peer.columns, peer.streams = width, 2
        return peer

    def _message(self, peer: Peer, number: int, kind: str) -> Data:
        self.num_sent += 1
        planes = planes_of(SCHEMA, peer.columns, seed=self.num_sent)
        planes.columns.mask_CT[-1, : self.num_sent % 3] = False
        episodes = [(float(self.num_sent), 3)] if self.num_sent % 2 else []
        seq, version = self.next_seqs[number], Version(1, 5 - self.num_sent % 3)
        if kind == "again" and seq:
            seq -= 1
        elif kind == "without credit":
            seq = peer.granted
        elif seq < peer.granted:
            self.next_seqs[number] += 1
        if kind == "nan":
            planes.columns.rewards_CT[-1, -1] = np.nan
        elif kind == "no choice":
            planes.columns.actions[""][0, -1] = 99
        elif kind == "endless episode":
            episodes = [(float("inf"), 3)]
        elif kind == "stale":
            version = Version(1, 1)
        elif kind == "from nowhere":
            version = Version(1, 6)
        data = Data(peer.session, seq, *version, SCHEMA.rows, peer.columns, 0, 0, None)
        (frame,) = encode_data(data, planes.obs, planes.small, episodes)
        message = unpack(frame)
        assert isinstance(message, Data)
        assert message.body is not None
        return message._replace(body=message.body[:-1]) if kind == "short" else message


def play(bursts: list[list[Step]], *, alone: bool) -> Bay:
    bay = Bay()
    for burst in bursts:
        for step in burst:
            bay.send(step)
            if alone:
                bay.ingest.decide()
        bay.end_burst()
    return bay


STEPS = st.tuples(st.integers(0, 2), st.sampled_from(KINDS))


@given(st.lists(st.lists(STEPS, max_size=9), min_size=1, max_size=8))
def test_a_burst_comes_to_the_same_as_its_messages_alone(bursts: list[list[Step]]) -> None:
    together, alone = play(bursts, alone=False), play(bursts, alone=True)
    assert together.all_that_came_of_it() == alone.all_that_came_of_it()


def test_what_is_sound_is_checked_once_a_burst(monkeypatch: Any) -> None:
    checked: list[int] = []
    find_fault = Screen.find_fault

    def note(screen: Screen, obs: Any, small: Any) -> Any:
        checked.append(len(small))
        return find_fault(screen, obs, small)

    monkeypatch.setattr(Screen, "find_fault", note)
    bay = play([[(0, "good"), (1, "good"), (2, "good")]], alone=False)
    assert checked == [1 + 2 + 3]
    assert bay.ledger.report()["trajectories/admitted"] == 6


def test_what_is_refused_leaves_no_gap_between_its_neighbours() -> None:
    bursts = [[(0, "good"), (1, "nan"), (2, "good"), (0, "good")], [(1, "good"), (2, "good")]]
    bay = play(bursts, alone=False)
    assert [seq for _, seq, _ in bay.taken] == [0, 0, 1, 1, 1]
    report = bay.ledger.report()
    assert (report["rejected/nonfinite"], report["trajectories/admitted"]) == (2, 10)
    ((obs, small, *_),) = bay.batches
    sent = [(1, 1), (3, 3), (4, 1), (5, 2), (6, 1)]
    planes = [(planes_of(SCHEMA, width, seed=seed), width) for seed, width in sent]
    assert obs == b"".join(each.obs[:width].tobytes() for each, width in planes)
    assert len(small) == B * SCHEMA.layout.small_bytes
