"""Batch memory is touched once, and stays; and every column in it is accounted for."""

import numpy as np
import pytest

from impala_async.learner.slots import (
    Ledger,
    Settlement,
    SlotFiller,
    allocate_slots,
    touched_memory,
)
from impala_async.metrics.report import merge
from tests.learner.columns import big_schema, planes_of, put, room, small_schema
from tests.learner.server_harness import check_identities

B = 4


def test_planes_are_allocated_once_each_and_never_again():
    sizes = []

    def allocate(num_bytes):
        sizes.append(num_bytes)
        return touched_memory(num_bytes)

    schema = big_schema()
    slots = allocate_slots(schema, B, 3, allocate)
    layout = schema.layout
    assert sizes == [B * layout.obs_bytes, B * layout.small_bytes] * 3
    submitted = []
    filler = SlotFiller(lambda _: None)
    filler.open(slots, submitted.append)
    places = [(slot.obs.ctypes.data, slot.small.ctypes.data) for slot in slots]
    planes = planes_of(schema, 3)

    for _ in range(40):
        put(filler, planes)
        while submitted:
            filler.release(submitted.pop())
    assert places == [(slot.obs.ctypes.data, slot.small.ctypes.data) for slot in slots]
    assert len(sizes) == 6
    assert touched_memory(100).tolist() == [0] * 100


def test_room_is_assigned_behind_what_was_assigned_and_free_until_it_is_committed():
    submitted = []
    schema = small_schema()
    filler, slots = SlotFiller(print), allocate_slots(schema, 4, 3)
    assert filler.free_columns == 0
    filler.open(slots, submitted.append)

    def fill(num_columns):
        return put(filler, planes_of(schema, num_columns), update=num_columns)

    first, second = room(filler, 2), room(filler, 2)
    assert (first.start, second.start, filler.free_columns) == (0, 2, 12)
    assert np.shares_memory(second.obs, slots[0].obs[2:])
    assert room(filler, 1) is None
    # Columns that were not committed are written over.
    filler.commit([])
    assert room(filler, 1).start == 0
    filler.commit([])
    is_only = []
    for num_columns, left in ((1, 11), (4, 7), (3, 4), (4, 0)):
        # A message that does not fit behind the others goes through the scratch.
        is_only.append(fill(num_columns).slot is None)
        assert filler.free_columns == left
    assert is_only == [False, True, False, False]
    assert [slot.updates_B.tolist() for slot in slots] == [[1, 4, 4, 4], [4, 3, 3, 3], [4] * 4]
    with pytest.raises(AssertionError, match="credit"):
        fill(1)
    filler.release(1)
    assert filler.free_columns == 4
    fill(4)
    assert submitted == [0, 1, 2, 1]
    assert slots[1].batch == 4
    assert merge(filler.report()) == {
        "queue/idle_depth_quantiles": [1.0, 1.0, 1.5, 2.7, 3.0],
        "queue/idle_capacity": 3,
    }


def test_what_is_filling_and_what_never_reached_the_learner_is_given_up_at_the_end():
    ledger = Ledger()
    ledger.admit(7)
    ledger.submit(1, 4)
    for batches in ((), (1,), ()):
        ledger.abandon(*batches)
    report = ledger.report()
    check_identities(report)
    assert (report["dropped/shutdown"], report["trajectories/in_slots"]) == (7, 0)


def test_a_saved_ledger_goes_on_with_the_same_numbers():
    ledger = Ledger()
    ledger.admit(10)
    ledger.submit(1, 4)
    ledger.submit(2, 4)
    ledger.settle(
        Settlement(1, trained=3, dropped={"stale": 1}, passes_done=4, passes_partial={"stale": 1})
    )
    ledger.reject(2, "duplicate")
    before = ledger.report()
    resumed = Ledger()
    resumed.restore(ledger.save())
    # Saving changes nothing for whoever goes on; what was in slots is lost to whoever resumes.
    assert ledger.report() == before
    lost = {"dropped/shutdown": 6, "trajectories/dropped": 7, "trajectories/in_slots": 0}
    check_identities(resumed.report())
    assert resumed.report() == {**before, **lost}
