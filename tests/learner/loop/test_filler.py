"""Room in slots: what is set aside, what is free, and what comes back. That columns arrive there as
they were sent is shown in test_admission.py."""

import numpy as np
import pytest

from impala_async.learner.loop.filler import Arrival, SlotFiller
from impala_async.learner.slots import Region, Slot, allocate_slots
from impala_async.metrics.report import merge
from impala_async.weights import Version
from tests.learner.columns import small_schema


def test_room_is_assigned_behind_what_was_assigned_and_free_until_it_is_committed() -> None:
    submitted: list[Slot] = []
    filler, slots = SlotFiller(print), allocate_slots(small_schema(), 4, 3)
    assert filler.free_columns == 0
    filler.open(slots, submitted.append)

    def room(num_columns: int) -> Region:
        region = filler.assign(num_columns, 0)
        assert region is not None
        return region

    def put(num_columns: int) -> Region:
        region = room(num_columns)
        valid_rows = np.full(num_columns, 3)
        filler.commit([Arrival(0, region, valid_rows, Version(1, num_columns))])
        return region

    regions = [room(2), room(2)]
    assert [(region.start, filler.free_columns) for region in regions] == [(0, 12), (2, 12)]
    assert np.shares_memory(regions[1].obs, slots[0].obs[2:])
    assert regions[0].through(regions[1]).small.shape == slots[0].small.shape
    assert filler.assign(1, 0) is None
    # What was not committed is written over.
    filler.commit([])
    assert room(1).start == 0
    filler.commit([])
    is_only = []
    for num_columns, left in ((1, 11), (4, 7), (3, 4), (4, 0)):
        # What does not fit behind the others goes through the scratch.
        is_only.append(put(num_columns).is_only)
        assert filler.free_columns == left
    assert is_only == [False, True, False, False]
    assert [slot.updates_B.tolist() for slot in slots] == [[1, 4, 4, 4], [4, 3, 3, 3], [4] * 4]
    with pytest.raises(AssertionError, match="credit"):
        put(1)
    filler.release(1)
    assert filler.free_columns == 4
    put(4)
    assert [slot.index for slot in submitted] == [0, 1, 2, 1]
    assert slots[1].batch == 4
    assert merge(filler.report()) == {
        "queue/idle_depth_quantiles": [1.0, 1.0, 1.5, 2.7, 3.0],
        "queue/idle_capacity": 3,
    }
