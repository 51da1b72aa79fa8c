"""On a CPU a batch is a view of its slot; on any device the leaves of two planes are the same."""

import json
import queue
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.learner.handoff import ClosedError, IndexQueue
from impala_async.learner.loop.filler import Arrival, SlotFiller
from impala_async.learner.loop.ledger import Settlement
from impala_async.learner.slots import Slot, allocate_slots, touched_memory
from impala_async.learner.threads.loader import (
    HostLoader,
    LoadedBatch,
    allocator_for,
    make_current,
)
from impala_async.metrics.report import merge
from impala_async.schema import ArraySpec, ObsSpec
from impala_async.training.batch import Batch
from impala_async.weights import Version
from tests.learner.columns import Planes, big_schema, planes_of, small_schema


class Bench:
    """A host loader behind a filler."""

    def __init__(self, num_slots: int = 3, *, is_drained: bool = False) -> None:
        self.schema = big_schema()
        self.slots = allocate_slots(self.schema, 4, num_slots)
        self.full = IndexQueue("full", num_slots)
        self.loader = HostLoader(self.slots, self.full, is_drained=is_drained)
        self.filler = SlotFiller(lambda _: None)
        self.filler.open(self.slots, self._submit)

    def _submit(self, slot: Slot) -> None:
        self.full.put(slot.index)

    def put(self, seed: int) -> Planes:
        planes = planes_of(self.schema, 4, seed=seed)
        region = self.filler.assign(4, 0)
        assert region is not None
        region.obs[:], region.small[:] = planes.obs, planes.small
        valid_rows = planes.columns.mask_CT.sum(axis=1)
        self.filler.commit([Arrival(0, region, valid_rows, Version(1, 10 + seed))])
        return planes


def are_equal(first: Batch, second: Batch) -> bool:
    pairs = [(first.obs[name], second.obs[name]) for name in second.obs]
    pairs += [(first.actions[name], second.actions[name]) for name in second.actions]
    for name in ("rewards", "log_probs", "terminated", "truncated", "mask"):
        pairs.append((getattr(first, f"{name}_BT"), getattr(second, f"{name}_BT")))
    same_form = all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    same_keys = (
        first.obs.keys() == second.obs.keys() and first.actions.keys() == second.actions.keys()
    )
    return same_form and same_keys and all(torch.equal(a, b) for a, b in pairs)


def test_batches_come_in_order_with_an_account_each() -> None:
    bench = Bench()
    sent = [bench.put(0), bench.put(1)]
    assert bench.loader.num_waiting() == 2
    for number, planes in enumerate(sent):
        loaded = bench.loader.get(timeout=None)
        assert loaded.batch == number + 1
        assert loaded.alive_B.tolist() == [True] * 4
        assert loaded.updates_B.tolist() == [10 + number] * 4
        assert loaded.valid_rows_B.tolist() == [3] * 4
        assert are_equal(loaded.tensors, Batch.over(planes.columns))
        assert bench.loader.num_waiting() == 1 - number


def test_a_batch_is_a_view_of_its_slot_and_comes_back_when_released() -> None:
    bench = Bench()
    bench.put(0)
    loaded = bench.loader.get(timeout=None)
    slot = bench.slots[loaded.place]
    slot.columns.rewards_CT[2, 1] = 123
    assert loaded.tensors.rewards_BT[2, 1] == 123
    assert bench.loader.release(loaded) == slot.index


def test_a_slot_used_again_is_a_new_batch() -> None:
    bench = Bench(num_slots=1)
    batches = []
    for seed in range(3):
        bench.put(seed)
        loaded = bench.loader.get(timeout=None)
        loaded.drop(np.ones(4, np.bool_), "stale")
        batches.append(loaded.batch)
        bench.filler.release(loaded.place)
    assert batches == [1, 2, 3]
    bench.put(3)
    assert bench.loader.get(timeout=None).alive_B.all()


def test_waiting_ends_with_the_timeout_or_with_the_close() -> None:
    bench = Bench()
    with pytest.raises(queue.Empty):
        bench.loader.get(timeout=0.0)
    bench.put(0)
    bench.put(1)
    bench.loader.close()
    with pytest.raises(ClosedError):
        bench.loader.get(timeout=None)
    assert bench.loader.leftovers() == [1, 2]


def test_a_drained_loader_hands_out_what_was_full_at_the_close() -> None:
    bench = Bench(is_drained=True)
    bench.put(0)
    bench.put(1)
    bench.loader.close()
    assert [bench.loader.get(timeout=0.0).batch for _ in range(2)] == [1, 2]
    with pytest.raises(ClosedError):
        bench.loader.get(timeout=None)
    assert bench.loader.leftovers() == []


def test_what_nobody_takes_any_more_is_left_over() -> None:
    bench = Bench(is_drained=True)
    bench.put(0)
    bench.loader.abandon()
    with pytest.raises(ClosedError):
        bench.loader.get(timeout=None)
    assert bench.loader.leftovers() == [1]


def test_a_place_that_nobody_filled_is_not_alive() -> None:
    bench = Bench()
    bench.put(0)
    bench.slots[0].filled_B[1:3] = False
    assert bench.loader.get(timeout=None).alive_B.tolist() == [True, False, False, True]


def test_its_report_is_that_of_its_queue() -> None:
    report = merge(Bench().loader.report())
    assert report["queue/full_capacity"] == 3


STACK = ArraySpec("pixels", (4, 8, 8), "uint8", is_stack=True)
SCHEMAS = {
    "one leaf": small_schema(),
    "many leaves": big_schema(),
    "a stack": replace(big_schema(), obs=ObsSpec((big_schema().obs.leaves[0], STACK))),
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_planes_as_tensors_are_the_leaves_that_numpy_sees(schema) -> None:
    planes = planes_of(schema, 5, seed=3)
    planes.columns.mask_CT[1, 2] = False
    planes.columns.terminated_CT[4, 0] = True
    planes.columns.truncated_CT[0, 1] = True
    obs, small = torch.from_numpy(planes.obs), torch.from_numpy(planes.small)
    batch = Batch.in_planes(schema, obs, small)
    assert are_equal(batch, Batch.over(planes.columns))
    # Views: what is copied into the planes later is seen.
    planes.columns.rewards_CT[3, 1] = 7.5
    assert batch.rewards_BT[3, 1] == 7.5
    first = next(iter(batch.obs.values()))
    assert first.data_ptr() == obs.data_ptr()


def test_a_cpu_needs_no_special_memory() -> None:
    assert allocator_for(torch.device("cpu")) is touched_memory


def test_only_a_gpu_with_a_number_is_made_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("cpu", "cpu:0", "cuda", "cuda:1"):
        make_current(torch.device(name))
    assert current == [torch.device("cuda:1")]


# -------------------- which columns live, and what passes they had


def which(*columns: int, of: int = 4) -> np.ndarray:
    mask = np.zeros(of, np.bool_)
    mask[list(columns)] = True
    return mask


def account_of(number: int, filled_B: np.ndarray) -> LoadedBatch:
    nothing: Any = None
    counts_B = np.zeros(len(filled_B), np.int64)
    slot: Any = SimpleNamespace(
        batch=number, filled_B=filled_B, updates_B=counts_B, ranks_B=counts_B, valid_rows_B=counts_B
    )
    return LoadedBatch(0, nothing, slot)


def test_a_batch_with_all_its_passes_is_trained() -> None:
    loaded = account_of(7, np.ones(4, np.bool_))
    for _ in range(3):
        loaded.use()
    assert loaded.settle(3, slot=2) == Settlement(7, trained=4, passes_done=12, slot=2)


def test_the_first_fill_of_a_ring_may_have_fewer_passes() -> None:
    loaded = account_of(1, np.ones(4, np.bool_))
    loaded.use()
    assert loaded.settle(3) == Settlement(1, trained=4, passes_done=4, passes_init_short=8)


def test_what_is_dropped_keeps_its_passes_as_partial() -> None:
    loaded = account_of(1, np.ones(4, np.bool_))
    loaded.drop(which(0), "stale")
    loaded.use()
    loaded.drop(which(0, 1), "stale")
    loaded.use()
    loaded.drop(which(2), "nonfinite_update")
    loaded.use()
    assert loaded.alive_B.tolist() == [False, False, False, True]
    assert loaded.settle(3) == Settlement(
        1,
        trained=1,
        dropped={"stale": 2, "nonfinite_update": 1},
        passes_done=6,
        passes_partial={"stale": 1, "nonfinite_update": 2},
    )


def test_a_place_that_was_never_filled_is_not_counted() -> None:
    loaded = account_of(1, which(0, 2))
    loaded.use()
    loaded.drop(which(0, 1), "nonfinite_update")
    assert loaded.settle(1) == Settlement(
        1,
        trained=1,
        dropped={"nonfinite_update": 1},
        passes_done=2,
        passes_partial={"nonfinite_update": 1},
    )


def test_what_a_slot_is_filled_with_later_does_not_change_the_batch() -> None:
    filled_B = which(0, 2)
    loaded = account_of(1, filled_B)
    filled_B.fill(True)
    assert loaded.alive_B.tolist() == [True, False, True, False]


def test_a_column_is_dropped_once() -> None:
    loaded = account_of(1, np.ones(4, np.bool_))
    loaded.drop(which(1, 2), "stale")
    loaded.drop(which(1, 2), "shutdown")
    loaded.drop(np.zeros(4, np.bool_), "shutdown")
    settlement = loaded.settle(1)
    assert settlement.dropped == {"stale": 2}
    assert settlement.num_columns == 4


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.lists(st.booleans(), min_size=3, max_size=3), st.booleans()), max_size=4),
)
def test_passes_add_up(num_passes: int, story: list[tuple[list[bool], bool]]) -> None:
    loaded = account_of(1, np.ones(3, np.bool_))
    for mask, is_stale in story[:num_passes]:
        loaded.drop(np.array(mask), "stale" if is_stale else "shutdown")
        loaded.use()
    had = loaded.settle(num_passes)
    assert had.num_columns == 3
    partial = sum(had.passes_partial.values())
    assert had.passes_done + had.passes_init_short == num_passes * had.trained + partial
    # Its numbers reach a checkpoint by way of the accounts.
    assert json.dumps([had.trained, had.passes_done, had.passes_init_short, *had.dropped.values()])
