"""On a CPU a batch is a view of its slot; on any device the leaves of two planes are the same."""

import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from impala_async.learner import loader
from impala_async.learner import loader as module
from impala_async.learner.handoff import ClosedError
from impala_async.learner.slots import Settlement, SlotFiller, allocate_slots, touched_memory
from impala_async.metrics.report import merge
from impala_async.schema import ArraySpec, ObsSpec
from impala_async.training.batch import Batch
from tests.learner.columns import big_schema, planes_of, put, small_schema
from tests.learner.device_cases import *  # noqa: F403
from tests.learner.device_cases import DeviceBench, FakeCuda, holds
from tests.learner.hand_actor import DEADLINE_S


class Bench:
    """A host loader behind a filler."""

    def __init__(self, num_slots=3):
        self.schema = big_schema()
        self.slots = allocate_slots(self.schema, 4, num_slots)
        self.masked_CT = np.zeros((4, self.schema.rows), np.bool_)
        self.loader = loader.HostLoader(self.schema, self.slots)
        self.filler = SlotFiller(lambda _: None)
        self.filler.open(self.slots, self.loader.full.put)

    def put(self, seed):
        planes = planes_of(self.schema, 4, seed=seed)
        planes.columns.mask_CT[self.masked_CT] = False
        put(self.filler, planes, update=10 + seed)
        return planes


def shows(batch, columns):
    """Whether the tensors are these arrays."""
    pairs, fields = [], dict(vars(batch))
    assert not fields.pop("known")
    assert not fields.pop("before")
    assert fields.keys() == {name.replace("_CT", "_BT") for name in vars(columns)}
    for one, other in zip(fields.values(), vars(columns).values(), strict=True):
        if isinstance(one, dict):
            assert one.keys() == other.keys()
            pairs += [(one[name], other[name]) for name in one]
        else:
            pairs.append((one, other))
    return all(a.numpy().dtype == b.dtype and np.array_equal(a.numpy(), b) for a, b in pairs)


def test_batches_come_in_order_as_views_of_their_slots_with_an_account_each():
    bench = Bench()
    bench.masked_CT[1, :2] = True
    sent = [bench.put(0), bench.put(1)]
    assert bench.loader.num_waiting() == 2
    for number, planes in enumerate(sent):
        loaded = bench.loader.get(timeout=None)
        assert loaded.number == number + 1
        assert loaded.alive_B.tolist() == [True] * 4
        assert loaded.updates_B.tolist() == [10 + number] * 4
        assert loaded.valid_rows_B.tolist() == [3, 1, 3, 3]
        assert holds(loaded, planes)
        assert bench.loader.num_waiting() == 1 - number
        slot = bench.slots[loaded.place]
        slot.columns.rewards_CT[2, 1] = 123
        assert loaded.batch.rewards_BT[2, 1] == 123
        assert bench.loader.release(loaded) == slot.index
    assert merge(bench.loader.report())["queue/full_capacity"] == 3


def test_a_slot_used_again_is_a_new_batch_and_what_nobody_filled_is_not_alive():
    bench = Bench(num_slots=1)
    for seed in range(3):
        bench.put(seed)
        loaded = bench.loader.get(timeout=None)
        assert (loaded.number, loaded.alive_B.all()) == (seed + 1, True)
        loaded.drop(np.ones(4, np.bool_), "stale")
        bench.filler.release(loaded.place)
    bench.put(3)
    bench.slots[0].filled_B[1:3] = False
    loaded = bench.loader.get(timeout=None)
    # Its slot may be filled again meanwhile.
    bench.slots[0].filled_B.fill(True)
    assert loaded.alive_B.tolist() == [True, False, False, True]


def test_waiting_ends_with_the_timeout_or_with_the_close():
    for is_drained in (False, True):
        bench = Bench()
        with pytest.raises(queue.Empty):
            bench.loader.get(timeout=0.0)
        bench.put(0)
        bench.put(1)
        bench.loader.close(is_drained=is_drained)
        # A drained loader hands out what was full at the close, until it is closed for good.
        taken = [bench.loader.get(timeout=0.0).number for _ in range(is_drained)]
        if is_drained:
            bench.loader.close()
        with pytest.raises(ClosedError):
            bench.loader.get(timeout=None)
        assert taken + bench.loader.leftovers() == [1, 2]


STACK = ArraySpec("pixels", (4, 8, 8), "uint8", is_stack=True)
SCHEMAS = {
    "one leaf": small_schema(),
    "many leaves": big_schema(),
    "a stack": replace(big_schema(), obs=ObsSpec((big_schema().obs.leaves[0], STACK))),
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_planes_as_tensors_are_the_leaves_that_numpy_sees(schema):
    planes = planes_of(schema, 5, seed=3)
    planes.columns.mask_CT[1, 2] = False
    planes.columns.terminated_CT[4, 0] = True
    planes.columns.truncated_CT[0, 1] = True
    obs, small = torch.from_numpy(planes.obs), torch.from_numpy(planes.small)
    batch = Batch.in_planes(schema, obs, small)
    assert shows(batch, planes.columns)
    # Views: what is copied into the planes later is seen.
    planes.columns.rewards_CT[3, 1] = 7.5
    assert batch.rewards_BT[3, 1] == 7.5
    first = next(iter(batch.obs.values()))
    assert first.data_ptr() == obs.data_ptr()


def test_only_a_gpu_with_a_number_is_made_the_current_one(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("cpu", "cpu:0", "cuda", "cuda:1"):
        loader.make_current(torch.device(name))
    assert current == [torch.device("cuda:1")]
    assert loader.allocator_for(torch.device("cpu")) is touched_memory


# -------------------- on a fake GPU: which slot is whose, and when


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(module.torch, "cuda", fake)
    return fake


@pytest.fixture
def device(cuda):
    return torch.device("cpu")


def test_updates_wait_for_copies_and_copies_for_updates(device, cuda):
    bench = DeviceBench(device)
    bench.put(0)
    loaded = bench.loader.get(timeout=5.0)
    assert cuda.compute.waited_for == [bench.loader._places[loaded.place].copied]
    assert bench.loader._stream.waited_for == []
    bench.loader.release(loaded)
    assert bench.loader._stream.waited_for == [cuda.compute]
    bench.close()


# -------------------- which columns live, and what passes they had


def which(*columns):
    return np.isin(np.arange(4), columns)


def account_of(filled_B):
    nothing = None
    counts_B = np.zeros(len(filled_B), np.int64)
    columns = SimpleNamespace(mask_CT=np.ones((len(filled_B), 3), np.bool_))
    slot = SimpleNamespace(
        batch=7,
        filled_B=filled_B,
        updates_B=counts_B,
        actors_B=counts_B,
        columns=columns,
        returns=(),
    )
    return loader.LoadedBatch(0, nothing, slot)


def test_a_batch_with_all_its_passes_is_trained():
    loaded = account_of(which(0, 2, 3))
    for _ in range(3):
        loaded.use()
    assert loaded.settle(3, 3, slot=2) == Settlement(7, trained=3, passes_done=9, slot=2)
    # The first fill of a ring may have fewer, and any may end early.
    settled = loaded.settle(6, 5)
    assert (settled.passes_init_short, settled.passes_ended_early) == (3, 6)


def test_what_is_dropped_is_dropped_once_and_keeps_its_passes_as_partial():
    loaded = account_of(which(0, 1, 2, 3))
    loaded.drop(which(0), "stale")
    loaded.use()
    loaded.drop(which(0, 1), "stale")
    loaded.use()
    loaded.drop(which(1, 2), "nonfinite_update")
    loaded.use()
    loaded.drop(which(), "shutdown")
    assert loaded.alive_B.tolist() == [False, False, False, True]
    had = loaded.settle(3, 3)
    # Its numbers reach a checkpoint by way of the accounts, as JSON.
    assert {type(number) for number in (had.trained, had.passes_done, had.dropped["stale"])} == {
        int
    }
    assert had == Settlement(
        7,
        trained=1,
        dropped={"stale": 2, "nonfinite_update": 1},
        passes_done=6,
        passes_partial={"stale": 1, "nonfinite_update": 2},
    )


# -------------------- an index queue


def queue_of(*items, capacity=3):
    made = loader.IndexQueue("full", capacity)
    for item in items:
        made.put(item)
    return made


def test_a_queue_keeps_the_order_and_wakes_whoever_waits():
    indices = queue_of(2, 0, 1)
    assert len(indices) == 3
    assert [indices.get(), indices.get(0.0), indices.get(1.0)] == [2, 0, 1]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(indices.get, DEADLINE_S)
        indices.put(5)
    assert waiting.result() == 5


def test_a_close_wakes_all_waiters():
    for is_drained in (False, True):
        indices = queue_of()
        with ThreadPoolExecutor() as pool:
            waiting = [pool.submit(indices.get, timeout) for timeout in (None, DEADLINE_S, None)]
            indices.close(is_drained=is_drained)
        assert [type(each.exception()) for each in waiting] == [ClosedError] * 3


def test_a_drained_close_gives_out_what_is_there():
    indices = queue_of(2, 1)
    indices.close(is_drained=True)
    assert [indices.get(), indices.get(0.0)] == [2, 1]
    for timeout in (None, 0.0, DEADLINE_S):
        with pytest.raises(ClosedError):
            indices.get(timeout)


def test_a_queue_reports_its_three_numbers():
    indices = loader.IndexQueue("ready", 4)
    for index in range(3):
        indices.put(index)
    indices.get()
    report = merge(indices.report())
    assert report["queue/ready_capacity"] == 4
    assert report["queue/ready_depth_quantiles"] == [1.0, 1.2, 2.0, 2.8, 3.0]
    assert 0 <= report["queue/ready_get_wait_ms"] < 1000


def test_a_wait_in_pieces_is_one_wait(monkeypatch):
    indices, now = loader.IndexQueue("full", 4), [0.0]
    monkeypatch.setattr(loader, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def wait_for(is_so, timeout):
        now[0] += timeout
        return is_so()

    monkeypatch.setattr(indices._changed, "wait_for", wait_for, raising=False)
    for _ in range(3):
        with pytest.raises(queue.Empty):
            indices.get(0.25)
    indices.put(0)
    indices.get(0.25)
    assert indices.report()["queue/full_get_wait_ms"] == 1000
    indices.put(1)
    indices.get(0.5)
    assert indices.report()["queue/full_get_wait_ms"] == 750
