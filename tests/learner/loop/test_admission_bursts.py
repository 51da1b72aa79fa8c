"""Messages that come in one burst are checked together, and fare as if each had come alone."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impala_async.errors import ProtocolError
from impala_async.learner.loop.ledger import Settlement
from impala_async.learner.loop.sessions import Answer
from impala_async.learner.slots import Region
from impala_async.trajectory import ColumnChecks
from impala_async.weights import Lineage, Version
from impala_async.wire.codec import encode_data
from impala_async.wire.messages import PROTOCOL, VERDICTS, Data, Grant, Hello, unpack
from impala_async.wire.peer import Peer
from tests.learner.columns import Planes, big_schema, planes_of, small_schema
from tests.learner.hand_actor import until
from tests.learner.pure_learner import PureLearner, Rest

SCHEMA = small_schema()
B = 8
WIDTHS = (1, 2, 3)
KINDS = ("good", "good", "good", "nan", "no choice", "endless episode", "short", "again", "stale",
         "from nowhere", "without credit")  # fmt: skip
Step = tuple[int, str]
"""Who sends, and what."""


class Bay(PureLearner):
    """Three actors, and a learner that is done at once."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.refused: list[str] = []
        self.taken: list[tuple[int, int, bytes]] = []
        self.grants: list[Grant] = []
        self.verdicts: list[tuple[bytes, int, str]] = []
        self.is_behind = False
        self.goal = float("inf")
        lineage = Lineage(0, {}).resumed(1, 5)
        super().__init__(
            SCHEMA, columns=B, max_lag=3, recorder=self, is_open=False, lineage=lineage
        )
        self.deliver = self._note
        self.open()
        self.peers = [self._join(number, width) for number, width in enumerate(WIDTHS)]
        self.next_seqs = [0] * len(WIDTHS)
        self.num_sent = 0
        self.planes: list[Planes] = []
        self.publish()

    def take(self, rank: int, data: Data, region: Region, episodes: Any) -> None:
        self.taken.append((rank, data.seq, region.obs.tobytes() + region.small.tobytes()))

    def send(self, step: Step) -> None:
        number, kind = step
        try:
            self.hear(b"", self._message(self.peers[number], number, kind))
        except ProtocolError as error:
            self.refused.append(error.reason)

    def end_burst(self) -> None:
        self.admission.decide(self.now)
        for slot in [*self.full]:
            planes = (slot.obs.tobytes(), slot.small.tobytes())
            self.batches.append((*planes, slot.updates_B.tolist(), slot.valid_rows_B.tolist()))
            self.ledger.settle(Settlement(slot.batch, trained=B, passes_done=B))
            self.filler.release(slot.index)
        self.full.clear()
        self._say(self.admission.deal(self.now))

    def all_that_came_of_it(self) -> Any:
        # In a burst a message that is refused by its header has its verdict before others.
        told = self.grants, sorted(self.verdicts), self.refused, self.episodes
        return told, self.batches, self.taken, self.ledger.report()

    def _note(self, answer: Answer) -> None:
        grant = unpack(bytes(answer.frames[0]))
        assert isinstance(grant, Grant)
        self.grants.append(grant._replace(verdicts=[]))
        for seq, verdict in grant.verdicts:
            self.verdicts.append((grant.session, seq, VERDICTS[verdict]))

    def count(self, episodes: Any) -> None:
        super().count(episodes)
        if episodes["total"].max() >= self.goal:
            self.admission.close()

    def _join(self, number: int, width: int) -> Peer:
        hello = Hello(PROTOCOL, bytes([number]) * 16, "", bytes(16), 0, 0)
        peer = self.table.hello(hello, b"route-%d" % number, 0.0)
        assert isinstance(peer, Peer)
        assert self.table.join(peer, width, 2)
        peer.usual_s = 0.0
        return peer

    def _message(self, peer: Peer, number: int, kind: str) -> Data:
        self.num_sent += 1
        planes = planes_of(SCHEMA, peer.columns, seed=self.num_sent)
        self.planes.append(planes)
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
                bay.admission.decide(0.0)
        bay.end_burst()
    return bay


STEPS = st.tuples(st.integers(0, 2), st.sampled_from(KINDS))


@given(st.lists(st.lists(STEPS, max_size=9), min_size=1, max_size=8))
def test_a_burst_comes_to_the_same_as_its_messages_alone(bursts: list[list[Step]]) -> None:
    together, alone = play(bursts, alone=False), play(bursts, alone=True)
    assert together.all_that_came_of_it() == alone.all_that_came_of_it()


def test_what_is_sound_is_checked_once_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    is_sound = ColumnChecks.is_sound

    def note(screen: ColumnChecks, obs: Any, small: Any) -> bool:
        checked.append(len(small))
        return is_sound(screen, obs, small)

    monkeypatch.setattr(ColumnChecks, "is_sound", note)
    monkeypatch.delattr(ColumnChecks, "find_fault")
    bay = play([[(0, "good"), (1, "good"), (2, "good")]], alone=False)
    assert checked == [1 + 2 + 3]
    assert bay.ledger.report()["trajectories/admitted"] == 6


def test_what_is_refused_leaves_no_gap_between_its_neighbours() -> None:
    bursts = [[(0, "good"), (1, "nan"), (2, "good"), (0, "good")], [(1, "good"), (2, "good")]]
    bay = play(bursts, alone=False)
    assert [seq for _, seq, _ in bay.taken] == [0, 0, 1, 1, 1]
    report = bay.ledger.report()
    assert (report["rejected/nonfinite"], report["trajectories/admitted"]) == (2, 10)
    assert sorted(bay.verdicts) == [(bay.peers[1].session, 0, "nonfinite")]
    ((obs, small, updates, valid_rows),) = bay.batches
    # The numbers of those that are in it, and how many of their columns are.
    sent = [(1, 1), (3, 3), (4, 1), (5, 2), (6, 1)]
    planes = [bay.planes[number - 1] for number, _ in sent]
    widths = [width for _, width in sent]
    assert obs == b"".join(p.obs[:w].tobytes() for p, w in zip(planes, widths, strict=True))
    assert small == b"".join(p.small[:w].tobytes() for p, w in zip(planes, widths, strict=True))
    assert updates == [5 - number % 3 for number, width in sent for _ in range(width)]
    counts = [p.columns.mask_CT[:w].sum(1).tolist() for p, w in zip(planes, widths, strict=True)]
    assert valid_rows == [count for each in counts for count in each]


@pytest.mark.parametrize(
    ("burst", "num_admitted"),
    [
        # Both are admitted before the goal is counted, and then the batch is not full.
        ([(2, "good"), (1, "good")], 7),
        # The last one fills the batch: it has gone out when the doors are closed.
        ([(2, "good"), (1, "good"), (0, "good")], 8),
        # The last one does not fit behind the others: when they are decided, it is too late for it.
        ([(2, "good"), (1, "good"), (1, "good")], 7),
    ],
)
def test_a_goal_that_is_reached_in_a_burst_closes_the_doors_behind_it(
    burst: list[Step], num_admitted: int
) -> None:
    bay = play([[(0, "good")] * 2], alone=False)
    # The return of the episode in the first message of the burst.
    bay.goal = 3.0
    for step in burst:
        bay.send(step)
    bay.end_burst()
    report = bay.ledger.report()
    assert report["trajectories/admitted"] == num_admitted == report["trajectories/received"]
    assert report["trajectories/in_slots"] == 0
    assert len(bay.batches) == num_admitted // B
    assert report["dropped/shutdown"] == num_admitted % B
    # As the service does once more when it winds down.
    bay.admission.close()
    assert bay.ledger.report() == report


async def test_what_an_actor_says_is_heard_after_what_it_sent(make_harness: Any) -> None:
    harness = make_harness()
    actor = await harness.join(2)
    hear, route = harness.server.admission.hear, b"nobody"
    planes = planes_of(harness.schema, 2)
    data = Data(actor.session, 0, 1, 0, harness.schema.rows, 2, 0, 0, None)
    (frame,) = encode_data(data, planes.obs, planes.small, [])
    nothing: Any = Rest()
    hear(route, unpack(frame), nothing, 0.0)
    assert harness.server.ledger.report()["trajectories/received"] == 0
    hear(route, Hello(PROTOCOL, actor.uuid, "", harness.server.table.run_id, 0, 0), nothing, 0.0)
    assert harness.count("trajectories/admitted") == 2
    (peer,) = harness.server.table
    assert (peer.granted, peer.watermark.below) == (1, 1)


async def test_a_body_that_is_cut_off_leaves_nothing_between_its_neighbours(
    make_harness: Any,
) -> None:
    harness = make_harness(big_schema(), learner={"batch_columns": 8})
    actors = [await harness.join() for _ in range(4)]
    sent = [planes_of(harness.schema, 1, seed=number) for number in range(4)]
    for actor in actors:
        await actor.credit()
    for number, (actor, planes) in enumerate(zip(actors, sent, strict=True)):
        data = Data(actor.session, 0, 1, 0, harness.schema.rows, 1, 0, 0, None)
        header, obs, small = encode_data(data, planes.obs, planes.small, [])
        # The observations of the second are there before its fault shows.
        assert actor.data.send([header, obs, bytes(small)[:-1] if number == 1 else small])
    await until(lambda: harness.count("trajectories/received") == 4)
    assert harness.count("rejected/invalid") == 1
    rows = sorted(harness.slots[0].obs[i].tobytes() for i in range(3))
    assert rows == sorted(planes.obs.tobytes() for planes in (sent[0], *sent[2:]))


async def test_a_burst_of_frames_is_taken_in(make_harness: Any) -> None:
    harness = make_harness(big_schema(), learner={"batch_columns": 12})
    actors = [await harness.join(width) for width in (1, 3, 2)]
    sent: list[Planes] = []
    for seq in (0, 1):
        for actor in actors:
            await actor.credit()
        for actor in actors:
            planes = planes_of(harness.schema, actor.columns, seed=len(sent))
            data = Data(actor.session, seq, 1, 0, harness.schema.rows, actor.columns, 0, 0, None)
            header, *frames = encode_data(data, planes.obs, planes.small, [(2.5, 1)])
            # No turn of the loop between them: the endpoint finds all three.
            assert actor.data.send([header, *frames])
            actor.seq = seq + 1
            sent.append(planes)
        await until(lambda: len(harness.episodes) == len(sent))
    assert harness.count("trajectories/admitted") == 12
    slot = harness.slots[harness.full[0]]
    # Of several actors the order of arrival is nobody's.
    rows = {slot.obs[i].tobytes() + slot.small[i].tobytes() for i in range(12)}
    assert rows == {
        planes.obs[i].tobytes() + planes.small[i].tobytes()
        for planes in sent
        for i in range(len(planes.obs))
    }


def test_a_late_message_is_taken_if_there_is_room_for_it() -> None:
    bay = Bay()
    late = bay.peers[2]
    late.lapsed = late.granted
    bay.send((2, "good"))
    bay.end_burst()
    assert bay.refused == []
    assert bay.ledger.report()["trajectories/admitted"] == WIDTHS[2]


@pytest.fixture
def late_bay() -> Bay:
    """The third is slow, no room is kept for it, and all that is free is the others'."""
    bay = Bay()
    bay.peers[2].usual_s = 5.0
    bay.peers[2].lapse()
    for peer in bay.peers[:2]:
        peer.streams = 100
    bay.table.deal(3 * B, now=0.0)
    return bay


def test_a_late_message_for_which_there_is_no_room_comes_again(late_bay: Bay) -> None:
    late = late_bay.peers[2]
    late.gives_way = True
    late_bay.send((2, "good"))
    late_bay.end_burst()
    assert (late_bay.refused, late_bay.ledger.report()["trajectories/received"]) == ([], 0)
    assert late_bay.admission.report()["credit/turned_away"] == WIDTHS[2]
    for number in (0, 1) * 7:
        late_bay.send((number, "good"))
        late_bay.end_burst()
    assert late.called_back == 0
    assert late.keeps_room_for(0)
    late_bay.next_seqs[2] = 0
    late_bay.send((2, "good"))
    late_bay.end_burst()
    assert late_bay.refused == []
    assert late.watermark.is_settled(0)


def test_an_actor_that_cannot_be_called_back_comes_again_in_a_new_session(late_bay: Bay) -> None:
    late = late_bay.peers[2]
    late_bay.send((2, "good"))
    late_bay.end_burst()
    assert late_bay.refused == ["unknown_session"]
    assert late_bay.table.peer_of(late.session) is None
    assert not late.watermark.is_settled(0)
    # The others have room for all that they were granted.
    for number in (0, 1) * 6:
        late_bay.send((number, "good"))
        late_bay.end_burst()
    assert late_bay.refused == ["unknown_session"]
