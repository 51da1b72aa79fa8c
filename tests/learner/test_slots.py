"""Batch memory is touched once, and stays; and every column in it is accounted for."""

import platform
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.learner import slots as module
from impala_async.learner.slots import (
    Ledger,
    Settlement,
    SlotFiller,
    allocate_slots,
    touched_memory,
)
from impala_async.metrics.names import DROP_REASONS
from impala_async.metrics.report import merge
from impala_async.wire.messages import VERDICTS
from tests.learner.columns import big_schema, planes_of, put, room, small_schema
from tests.learner.server_harness import check_identities

B = 4
MMAP, TRIM, ARENAS = -3, -1, -8


def test_planes_are_allocated_once_each_and_never_again():
    sizes: list[int] = []

    def allocate(num_bytes):
        sizes.append(num_bytes)
        return touched_memory(num_bytes)

    schema = big_schema()
    slots = allocate_slots(schema, B, 3, allocate)
    layout = schema.layout
    assert sizes == [B * layout.obs_bytes, B * layout.small_bytes] * 3
    submitted: list[int] = []
    filler = SlotFiller(lambda _: None)
    filler.open(slots, submitted.append)
    places = [(slot.obs.ctypes.data, slot.small.ctypes.data) for slot in slots]
    planes = planes_of(schema, 3)

    def fill(num_messages):
        for _ in range(num_messages):
            put(filler, planes)
            while submitted:
                index = submitted.pop()
                filler.ledger.settle(Settlement(slots[index].batch, trained=B))
                filler.release(index)

    fill(100)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        fill(400)
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Views come and go; nothing the size of a plane does.
    assert peak - before < layout.column_bytes / 2
    assert now - before < layout.column_bytes / 4
    assert places == [(slot.obs.ctypes.data, slot.small.ctypes.data) for slot in slots]
    assert len(sizes) == 6
    assert touched_memory(100).tolist() == [0] * 100


def test_room_is_assigned_behind_what_was_assigned_and_free_until_it_is_committed():
    submitted: list[int] = []
    schema = small_schema()
    filler, slots = SlotFiller(print), allocate_slots(schema, 4, 3)
    assert filler.free_columns == 0
    filler.open(slots, submitted.append)

    def assign(num_columns):
        arrival = room(filler, num_columns)
        assert arrival is not None
        return arrival

    def fill(num_columns):
        return put(filler, planes_of(schema, num_columns), update=num_columns)

    first, second = assign(2), assign(2)
    assert (first.start, second.start, filler.free_columns) == (0, 2, 12)
    assert np.shares_memory(second.obs, slots[0].obs[2:])
    assert room(filler, 1) is None
    # What was not committed is written over.
    filler.commit([])
    assert assign(1).start == 0
    filler.commit([])
    is_only = []
    for num_columns, left in ((1, 11), (4, 7), (3, 4), (4, 0)):
        # What does not fit behind the others goes through the scratch.
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


# -------------------- the accounts: they hold at every moment, whatever happens in whatever order


def check(ledger: Ledger) -> dict[str, Any]:
    report: dict[str, Any] = ledger.report()
    check_identities(report)
    return report


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("arstx"), st.integers(0, 4), st.integers(0, 2))))
def test_the_identities_hold_after_every_step(steps):
    ledger, alive = Ledger(), list[int]()
    filling = num_batches = 0
    for action, columns, choice in steps:
        if action == "a" and filling + columns <= B:
            ledger.admit(columns)
            filling += columns
            if filling == B:
                num_batches += 1
                ledger.submit(num_batches, B)
                alive.append(num_batches)
                filling = 0
        elif action == "r":
            ledger.reject(columns, VERDICTS[choice])
        elif action == "t" and alive:
            dropped = {DROP_REASONS[choice]: columns} if columns else {}
            trained = B - columns
            done = 2 * trained + columns
            partial = {DROP_REASONS[choice]: columns} if columns else {}
            batch = alive.pop(choice % len(alive))
            ledger.settle(Settlement(batch, trained, dropped, done, 0, partial))
        elif action == "x":
            # Whoever resumes from here has lost what is in slots.
            resumed = Ledger()
            resumed.restore(ledger.save())
            assert check(resumed)["trajectories/in_slots"] == 0
        report = check(ledger)
        assert report["trajectories/in_slots"] == ledger.in_slots == filling + B * len(alive)
        passes = 2 * report["trajectories/trained"] + report["passes/partial"]
        assert report["passes/done"] + report["passes/init_short"] == passes


def test_the_filling_slot_is_given_up_at_the_end():
    ledger = Ledger()
    ledger.admit(3)
    ledger.abandon()
    ledger.abandon()
    report = check(ledger)
    assert (report["dropped/shutdown"], report["trajectories/in_slots"]) == (3, 0)


def test_a_batch_that_does_not_add_up_is_a_bug():
    ledger = Ledger()
    ledger.admit(8)
    ledger.submit(1, 4)
    with pytest.raises(AssertionError, match="twice"):
        ledger.submit(1, 4)
    with pytest.raises(AssertionError, match="held 4 columns and 3 came out"):
        ledger.settle(Settlement(1, trained=3))
    with pytest.raises(KeyError):
        ledger.settle(Settlement(7, trained=4))


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
    assert check(resumed) == {**before, **lost}


# -------------------- freed memory

NUM_ROUNDS = 20
CHURN = f"""
import resource, sys
import numpy as np
from impala_async.learner.slots import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def churn():
    # A block beside it is freed last, as an activation is: so the heap could shrink each time.
    first, second = np.ones(24 << 20, np.uint8), np.ones(40 << 20, np.uint8)
churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({NUM_ROUNDS}):
    churn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    ran = subprocess.run(
        [sys.executable, "-c", CHURN, how], capture_output=True, text=True, check=True
    )
    return int(ran.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is another one")
def test_what_is_allocated_again_faults_no_more():
    kept, given_back = page_faults("keep"), page_faults("as it is")
    assert kept < 100 * NUM_ROUNDS
    # Otherwise this test shows nothing.
    assert given_back > 10 * kept


FLOOD = """
import threading
import numpy as np, psutil
from impala_async.learner.slots import give_back_freed_memory, keep_freed_memory
keep_freed_memory()
rss = psutil.Process().memory_info
flood = []
before = rss().rss
fill = lambda: flood.extend(np.ones(16 << 10, np.uint8) for _ in range(3000))
thread = threading.Thread(target=fill)
thread.start()
thread.join()
flood.clear()
kept = rss().rss
give_back_freed_memory()
print(kept - before, rss().rss - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is another one")
def test_memory_of_a_flood_in_another_thread_can_be_given_back() -> None:
    ran = subprocess.run([sys.executable, "-c", FLOOD], capture_output=True, text=True, check=True)
    kept, left = map(int, ran.stdout.split())
    assert kept > 40e6
    assert left < 10e6


class Library:
    """A C library that refuses thresholds over a limit, and one that knows none."""

    def __init__(self, largest: int) -> None:
        self.set: dict[int, int] = {}

        def mallopt(option: int, value: int) -> int:
            if option == MMAP and value > largest:
                return 0
            self.set[option] = value
            return 1

        if largest >= 0:
            self.mallopt = mallopt


@pytest.mark.parametrize(
    ("largest", "options"),
    [(1 << 40, {MMAP, TRIM, ARENAS}), (32 << 20, {MMAP, TRIM, ARENAS}), (0, {ARENAS}), (-1, set())],
    ids=["new", "old", "stubborn", "another"],
)
def test_both_thresholds_or_none(largest, options, monkeypatch):
    library = Library(largest)
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: library)
    module.keep_freed_memory()
    assert library.set.keys() == options
    assert library.set.get(MMAP, 0) <= largest or largest < 0
