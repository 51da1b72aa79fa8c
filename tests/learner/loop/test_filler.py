"""Columns into slots: in place, through the scratch, over two slots, in memory that stays."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from impala_async.learner.loop.filler import Arrival, SlotFiller
from impala_async.learner.slots import Episodes, Region, Slot, allocate_slots
from impala_async.metrics.report import merge
from impala_async.schema import Schema
from impala_async.weights import Version
from tests.learner.columns import Planes, big_schema, planes_of, same, small_schema

B = 4
V = Version(1, 5)


class Shelf:
    """A filler over three slots, and the order in which they were submitted."""

    def __init__(self, schema: Schema | None = None, num_slots: int = 3) -> None:
        self.schema = schema or small_schema()
        self.slots = allocate_slots(self.schema, B, num_slots)
        self.submitted: list[Slot] = []
        self.episodes: list[Episodes] = []
        self.count: Callable[[Episodes], None] = self.episodes.append
        self.filler = SlotFiller(lambda episodes: self.count(episodes))
        self.filler.open(self.slots, self.submitted.append)

    def put(self, planes: Planes, version: Version = V) -> bool:
        """Take in columns as ingest does; whether they were received in place."""
        region = self.receive(planes)
        self.filler.commit([self.arrival(planes, region, version)])
        return any(np.shares_memory(region.obs, slot.obs) for slot in self.slots)

    def receive(self, planes: Planes) -> Region:
        region = self.filler.assign(len(planes.obs), 0)
        assert region is not None
        region.obs[:], region.small[:] = planes.obs, planes.small
        return region

    def arrival(self, planes: Planes, region: Region, version: Version = V) -> Arrival:
        return Arrival(0, region, planes.columns.mask_CT.sum(axis=1), version)


@pytest.mark.parametrize("schema", [small_schema(), big_schema()], ids=["one leaf", "many leaves"])
def test_what_does_not_fit_is_split_over_two_slots(schema: Schema) -> None:
    shelf = Shelf(schema)
    sent = [planes_of(schema, 3, seed=seed) for seed in range(4)]
    was_in_place = [shelf.put(planes, Version(1, i)) for i, planes in enumerate(sent)]
    # 3 of 4; 1 + 2; 2 + 1; 3 of 3.
    assert was_in_place == [True, False, False, True]
    assert [slot.index for slot in shelf.submitted] == [0, 1, 2]
    assert [slot.batch for slot in shelf.submitted] == [1, 2, 3]
    for place in range(12):
        slot, column = shelf.slots[place // B], place % B
        assert same(slot.columns, column, sent[place // 3].columns, place % 3)
        assert slot.updates_B[column] == place // 3
        assert slot.valid_rows_B[column] == schema.rows


def test_room_is_assigned_behind_what_was_assigned_and_free_until_it_is_committed() -> None:
    shelf = Shelf()
    starts = []
    for _ in range(2):
        region = shelf.filler.assign(2, 1)
        assert region is not None
        starts.append(region.start)
        assert shelf.filler.free_columns == 12
    assert starts == [0, 2]
    assert shelf.filler.assign(1, 1) is None
    # What was not committed is written over.
    shelf.filler.commit([])
    region = shelf.filler.assign(1, 1)
    assert region is not None
    assert region.start == 0
    for num_columns, left in ((1, 11), (4, 7), (3, 4), (4, 0)):
        shelf.put(planes_of(shelf.schema, num_columns))
        assert shelf.filler.free_columns == left
    with pytest.raises(AssertionError, match="credit"):
        shelf.put(planes_of(shelf.schema, 1))
    shelf.filler.release(1)
    assert shelf.filler.free_columns == 4
    shelf.put(planes_of(shelf.schema, 4))
    assert [slot.index for slot in shelf.submitted] == [0, 1, 2, 1]
    assert shelf.slots[1].batch == 4
    report = merge(shelf.filler.report())
    assert report["queue/idle_capacity"] == 3
    assert report["queue/idle_depth_quantiles"] == [1.0, 1.0, 1.5, 2.7, 3.0]


def test_what_lies_behind_a_refused_message_moves_down() -> None:
    shelf = Shelf()
    sent = [planes_of(shelf.schema, n, seed=n) for n in (1, 2, 1)]
    regions = [shelf.receive(planes) for planes in sent]
    assert regions[0].through(regions[2]).small.shape == shelf.slots[0].small.shape
    kept = [shelf.arrival(sent[i], regions[i], Version(1, i)) for i in (1, 2)]
    shelf.filler.commit(kept)
    assert shelf.put(planes_of(shelf.schema, 1, seed=7), Version(1, 7))
    (slot,) = shelf.submitted
    columns = [(sent[1], 0), (sent[1], 1), (sent[2], 0), (planes_of(shelf.schema, 1, seed=7), 0)]
    assert all(same(slot.columns, i, p.columns, c) for i, (p, c) in enumerate(columns))
    assert slot.updates_B.tolist() == [1, 1, 2, 7]


def test_episodes_are_counted_when_all_that_came_with_them_is_in() -> None:
    shelf = Shelf()
    filled: list[int] = []
    shelf.count = lambda _: filled.append(shelf.filler.free_columns)
    sent = [planes_of(shelf.schema, 2, seed=seed) for seed in range(2)]
    episodes: Any = np.zeros(1)
    arrivals = [
        shelf.arrival(planes, shelf.receive(planes))._replace(episodes=episodes) for planes in sent
    ]
    shelf.filler.commit(arrivals)
    assert filled == [8, 8]


def test_a_column_without_valid_rows_says_so() -> None:
    shelf = Shelf()
    planes = planes_of(shelf.schema, 4)
    planes.columns.mask_CT[1] = False
    planes.columns.mask_CT[2, 0] = False
    shelf.put(planes)
    assert shelf.slots[0].valid_rows_B.tolist() == [3, 0, 2, 3]
