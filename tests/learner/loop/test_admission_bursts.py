"""Messages that come in one burst are checked together, and fare as if each had come alone."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impala_async.learner.slots import Arrival
from impala_async.trajectory import ColumnChecks
from impala_async.weights import Lineage, Version
from impala_async.wire.messages import Data, encode_data, unpack
from tests.learner.columns import Planes, big_schema, planes_of, small_schema
from tests.learner.pure_learner import HandActor, PureLearner

SCHEMA = small_schema()
B = 8
WIDTHS = (1, 2, 3)
KINDS = ("good", "good", "good", "nan", "no choice", "endless episode", "short", "again", "stale",
         "from nowhere", "without credit")  # fmt: skip
Step = tuple[int, str]
"""Who sends, and what."""


class Bay(PureLearner):
    """Three actors, and a learner that is done at once."""

    def __init__(self, *, goal: float = float("inf")) -> None:
        self.batches: list[Any] = []
        self.refused: list[str] = []
        self.taken: list[tuple[int, int, bytes]] = []
        self.planes: list[Planes] = []
        self.is_behind = False
        self.goal = goal
        lineage = Lineage(0, {}).resumed(1, 5)
        super().__init__(SCHEMA, columns=B, max_lag=3, recorder=self, lineage=lineage)
        self.actors = [HandActor(self, width) for width in WIDTHS]
        for number, actor in enumerate(self.actors):
            actor.uuid = bytes([number]) * 16
            actor.hello()
            actor.spec(streams=2)
        self.peers = list(self.table)
        for peer in self.peers:
            peer.usual_s = 0.0
        self.end_burst()

    def take(self, arrival: Arrival) -> None:
        planes = arrival.obs.tobytes() + arrival.small.tobytes()
        self.taken.append((arrival.peer.rank, arrival.data.seq, planes))

    def count(self, episodes: Any) -> None:
        super().count(episodes)
        if episodes["total"].max() >= self.goal:
            self.admission.close()

    def end_burst(self) -> None:
        self.admission.decide(self.now)
        while self.full:
            slot = self.full.pop(0)
            planes = (slot.obs.tobytes(), slot.small.tobytes())
            self.batches.append((*planes, slot.updates_B.tolist()))
            self.settle(slot, is_dealing=False)
        self._say(self.admission.deal(self.now))

    def send(self, number: int, kind: str) -> None:
        actor, granted = self.actors[number], self.peers[number].granted
        self.planes.append(planes_of(SCHEMA, actor.columns, seed=len(self.planes) + 1))
        num_sent, planes = len(self.planes), self.planes[-1]
        planes.columns.mask_CT[-1, : num_sent % 3] = False
        episodes = [(float(num_sent), 3)] if num_sent % 2 else []
        seq, version = actor.seq, Version(1, 5 - num_sent % 3)
        if kind == "again" and seq:
            seq -= 1
        elif kind == "without credit":
            seq = granted
        elif seq < granted:
            actor.seq += 1
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
        header = actor.header(seq=seq, epoch=version.epoch, update=version.update)
        (frame,) = encode_data(header, planes.obs, planes.small, episodes)
        message = unpack(frame)
        assert isinstance(message, Data)
        assert message.body is not None
        if kind == "short":
            message = message._replace(body=message.body[:-1])
        if reason := actor.say(message):
            self.refused.append(reason)

    def all_that_came_of_it(self) -> Any:
        grants = [[g._replace(verdicts=[]) for g in actor.grants] for actor in self.actors]
        # In a burst a message that is refused by its header has its verdict before others.
        told = grants, [sorted(actor.verdicts) for actor in self.actors], self.refused
        return told, self.episodes, self.batches, self.taken, self.ledger.report()


def play(bursts: list[list[Step]], *, alone: bool = False) -> Bay:
    bay = Bay()
    for burst in bursts:
        for step in burst:
            bay.send(*step)
            if alone:
                bay.admission.decide(0.0)
        bay.end_burst()
    return bay


STEPS = st.tuples(st.integers(0, 2), st.sampled_from(KINDS))


@given(st.lists(st.lists(STEPS, max_size=9), min_size=1, max_size=8))
def test_a_burst_comes_to_the_same_as_its_messages_alone(bursts):
    together, alone = play(bursts), play(bursts, alone=True)
    assert together.all_that_came_of_it() == alone.all_that_came_of_it()


def test_what_is_sound_is_checked_once_a_burst(monkeypatch):
    checked: list[int] = []
    find_fault = ColumnChecks.find_fault

    def note(checks, obs, small):
        checked.append(len(small))
        return find_fault(checks, obs, small)

    monkeypatch.setattr(ColumnChecks, "find_fault", note)
    bay = play([[(0, "good"), (1, "good"), (2, "good")]])
    assert checked == [1 + 2 + 3]
    assert bay.ledger.report()["trajectories/admitted"] == 6


def test_what_is_refused_leaves_no_gap_between_its_neighbours():
    bay = play([[(0, "good"), (1, "nan"), (2, "good"), (0, "good")], [(1, "good"), (2, "good")]])
    assert [seq for _, seq, _ in bay.taken] == [0, 0, 1, 1, 1]
    report = bay.ledger.report()
    assert (report["rejected/nonfinite"], report["trajectories/admitted"]) == (2, 10)
    assert [len(actor.verdicts) for actor in bay.actors] == [0, 1, 0]
    ((obs, small, updates),) = bay.batches
    # The numbers of those that are in it, and how many of their columns are.
    sent = [(1, 1), (3, 3), (4, 1), (5, 2), (6, 1)]
    parts = [(bay.planes[number - 1], width) for number, width in sent]
    assert obs == b"".join(planes.obs[:width].tobytes() for planes, width in parts)
    assert small == b"".join(planes.small[:width].tobytes() for planes, width in parts)
    assert updates == [5 - number % 3 for number, width in sent for _ in range(width)]


def test_a_body_that_is_cut_off_leaves_nothing_between_its_neighbours():
    schema = big_schema()
    learner = PureLearner(schema, columns=8)
    actors = [HandActor(learner).join() for _ in range(4)]
    sent = [planes_of(schema, 1, seed=number) for number in range(4)]
    for number, (actor, planes) in enumerate(zip(actors, sent, strict=True)):
        _, _, (header, obs, small) = actor.data_of(planes, [(float(number), 1)])
        # The observations of the second are there before its fault shows.
        actor.say(header, obs, bytes(small)[:-1] if number == 1 else small)
    learner.end_burst()
    report = learner.report()
    assert (report["rejected/invalid"], report["trajectories/admitted"]) == (1, 3)
    for place, planes in enumerate((sent[0], *sent[2:])):
        assert np.array_equal(learner.slots[0].obs[place], planes.obs[0])
        assert np.array_equal(learner.slots[0].small[place], planes.small[0])
    assert learner.episodes == [(0.0, 1), (2.0, 1), (3.0, 1)]


@pytest.mark.parametrize(
    ("burst", "num_admitted"),
    [
        # Both are admitted before the goal is counted, and then the batch is not full.
        ([2, 1], 7),
        # The last one fills the batch: it has gone out when the doors are closed.
        ([2, 1, 0], 8),
        # The last one does not fit behind the others: when they are decided, it is too late for it.
        ([2, 1, 1], 7),
    ],
)
def test_a_goal_that_is_reached_in_a_burst_closes_the_doors_behind_it(burst, num_admitted):
    bay = play([[(0, "good")] * 2])
    # The return of the episode in the first message of the burst.
    bay.goal = 3.0
    for number in burst:
        bay.send(number, "good")
    bay.end_burst()
    report = bay.ledger.report()
    assert report["trajectories/admitted"] == num_admitted == report["trajectories/received"]
    assert report["trajectories/in_slots"] == 0
    assert len(bay.batches) == num_admitted // B
    assert report["dropped/shutdown"] == num_admitted % B
    # As the service does once more when it winds down.
    bay.admission.close()
    assert bay.ledger.report() == report


@pytest.mark.parametrize("how", ["there is room", "it gives way", "it cannot be called back"])
def test_a_late_message_is_taken_comes_again_or_begins_anew(how):
    """The third is slow, and no room is kept for it."""
    bay = Bay()
    late, first = bay.peers[2], bay.peers[:2]
    late.usual_s = 5.0
    late.lapse()
    late.gives_way = how == "it gives way"
    if how != "there is room":
        # All that is free is the others'.
        for peer in first:
            peer.streams = 100
        bay.table.deal(3 * B, now=0.0)
    bay.send(2, "good")
    bay.end_burst()
    report = bay.report()
    num_taken = WIDTHS[2] * (how == "there is room")
    assert (
        report["trajectories/admitted"]
        == num_taken
        == report["trajectories/received"] - (WIDTHS[2] * (how == "it cannot be called back"))
    )
    assert report["credit/turned_away"] == WIDTHS[2] * (how == "it gives way")
    assert bay.refused == ["unknown_session"] * (how == "it cannot be called back")
    # The others have room for all that they were granted.
    for number in (0, 1) * 7:
        bay.send(number, "good")
        bay.end_burst()
    assert len(bay.refused) <= 1
    if how == "it cannot be called back":
        assert bay.table.peer_of(late.session) is None
        assert not late.watermark.is_settled(0)
    if how == "it gives way":
        assert late.called_back == 0
        assert late.has_call_room
        bay.actors[2].seq = 0
        bay.send(2, "good")
        bay.end_burst()
        assert bay.refused == []
        assert late.watermark.is_settled(0)
