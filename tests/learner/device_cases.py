"""A device loader at work between a filler and the test, on a GPU or on a fake of one, and the
tests that hold on both: they are collected where a `device` fixture says on which.
"""

import contextlib
import queue
import threading
import time
from dataclasses import fields, replace

import pytest
import torch

from impala_async.learner.handoff import ClosedError
from impala_async.learner.loader import DeviceLoader, allocator_for
from impala_async.learner.slots import SlotFiller, allocate_slots
from impala_async.schema import ArraySpec, ObsSpec
from impala_async.training.batch import Batch
from tests.learner.columns import big_schema, planes_of, put
from tests.learner.hand_actor import DEADLINE_S
from tests.wire.ends import until

COLUMNS = 4


class DeviceBench:
    """Owns the loader thread. `full` is fed by `put`; `released` are host slots that came back."""

    def __init__(self, device, *, num_slots=3, num_device_slots=2):
        leaves = (*big_schema().obs.leaves, ArraySpec("stack", (4, 8, 8), "uint8", is_stack=True))
        self.schema = replace(big_schema(), obs=ObsSpec(leaves))
        self.slots = allocate_slots(self.schema, COLUMNS, num_slots, allocator_for(device))
        self.released = []
        self.ends = []
        self.loader = DeviceLoader(
            self.schema,
            self.slots,
            self.released.append,
            num_device_slots=num_device_slots,
            device=device,
        )
        self.filler = SlotFiller(lambda _: None)
        self.filler.open(self.slots, self.loader.full.put)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, seed):
        """One batch into the next host slot."""
        until(self._has_room)
        planes = planes_of(self.schema, COLUMNS, seed=seed)
        put(self.filler, planes, update=seed)
        return planes

    def close(self):
        self.loader.close()
        self.join()

    def join(self):
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def _has_room(self):
        while self.released:
            self.filler.release(self.released.pop())
        return self.filler.free_columns >= COLUMNS

    def _run(self):
        try:
            self.loader.run()
        except BaseException as error:
            self.ends.append(error)


def holds(loaded, planes):
    """Whether a batch is what was put in, leaf by leaf."""
    sent, pairs = Batch.in_planes(big_schema(), planes.obs, planes.small), []
    for item in fields(Batch):
        one, other = getattr(loaded.batch, item.name), getattr(sent, item.name)
        one, other = ({"": each} if torch.is_tensor(each) else each for each in (one, other))
        pairs += [(one[name], other[name]) for name in other]
    return all(a.dtype == b.dtype and torch.equal(a.cpu(), b) for a, b in pairs)


class FakeEvent:
    """Done as soon as it is recorded."""

    def __init__(self, enable_timing=False):
        self._at = None
        self.stream = None

    def record(self, stream=None):
        self._at, self.stream = time.perf_counter(), stream

    def query(self):
        return self._at is not None

    def synchronize(self):
        assert self.query()

    def elapsed_time(self, other):
        return (other._at - self._at) * 1000


class FakeStream:
    """Runs everything at once; remembers for whom it was told to wait."""

    def __init__(self, device=None):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)

    def wait_event(self, event):
        # Not an error of CUDA, which then waits for nothing.
        assert event.query(), "waits for an event that nobody has recorded"
        self.waited_for.append(event)


class FakeCuda:
    """Does on a CPU as much of `torch.cuda` as the loader uses."""

    Event = FakeEvent
    Stream = FakeStream

    def __init__(self):
        self.compute = FakeStream()

    def current_stream(self, device):
        return self.compute

    def stream(self, stream):
        return contextlib.nullcontext()


def test_batches_come_in_order_and_are_what_was_put_in(device):
    bench = DeviceBench(device)
    for seed in range(10):
        planes = bench.put(seed)
        loaded = bench.loader.get(timeout=5.0)
        assert holds(loaded, planes)
        assert loaded.number == seed + 1
        assert loaded.updates_B.tolist() == [seed] * 4
        assert loaded.valid_rows_B.tolist() == [3] * 4
        bench.loader.release(loaded)
    assert bench.loader.load_timer.count == 10
    report = bench.loader.report()
    assert (report["queue/full_capacity"], report["queue/ready_capacity"]) == (3, 2)
    bench.close()


def test_a_host_slot_comes_back_when_it_is_copied(device):
    bench = DeviceBench(device, num_slots=1, num_device_slots=3)
    sent = [bench.put(seed) for seed in range(3)]
    # One host slot carried all three; nothing on the device changed with it.
    batches = [bench.loader.get(timeout=5.0) for _ in range(3)]
    assert all(holds(loaded, planes) for loaded, planes in zip(batches, sent, strict=True))
    assert [loaded.updates_B.tolist() for loaded in batches] == [[0] * 4, [1] * 4, [2] * 4]
    bench.close()


def test_a_device_slot_is_not_filled_again_before_it_is_released(device):
    bench = DeviceBench(device, num_slots=3, num_device_slots=2)
    sent = [bench.put(seed) for seed in range(4)]
    first, second = bench.loader.get(timeout=5.0), bench.loader.get(timeout=5.0)
    with pytest.raises(queue.Empty):
        bench.loader.get(timeout=0.05)
    assert holds(first, sent[0])
    assert holds(second, sent[1])
    # One waits on its way to the device, one in the queue.
    until(lambda: bench.loader.num_waiting() == 2)
    bench.loader.release(second)
    third = bench.loader.get(timeout=5.0)
    assert third.place == second.place
    assert holds(third, sent[2])
    assert holds(first, sent[0])
    bench.close()


@pytest.mark.parametrize(
    ("num_taken", "closes"),
    # A drained loader ends too when nobody takes batches any more.
    [(0, [False]), (1, [False]), (2, [False]), (1, [True, False]), (1, [False, True])],
)
def test_at_the_close_every_batch_is_somewhere(device, num_taken, closes):
    bench = DeviceBench(device, num_slots=3, num_device_slots=2)
    for seed in range(5):
        bench.put(seed)
    taken = [bench.loader.get(timeout=5.0).number for _ in range(num_taken)]
    for is_drained in closes:
        bench.loader.close(is_drained=is_drained)
    bench.join()
    assert isinstance(bench.ends[0], ClosedError)
    assert taken + sorted(bench.loader.leftovers()) == [1, 2, 3, 4, 5]
    with pytest.raises(ClosedError):
        bench.loader.get(timeout=None)


def test_a_drained_loader_hands_out_what_was_there_at_the_close(device):
    bench = DeviceBench(device)
    sent = [bench.put(seed) for seed in range(5)]
    bench.loader.close(is_drained=True)
    for number, planes in enumerate(sent):
        loaded = bench.loader.get(timeout=5.0)
        assert loaded.number == number + 1
        assert holds(loaded, planes)
        bench.loader.release(loaded)
    with pytest.raises(ClosedError):
        bench.loader.get(timeout=None)
    bench.join()
    assert bench.loader.leftovers() == []
