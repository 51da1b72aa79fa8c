"""A device loader at work between a filler and the test; on a GPU, or on a stand-in for one."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from impala_async.learner.handoff import IndexQueue
from impala_async.learner.loop.filler import Arrival, SlotFiller
from impala_async.learner.slots import Slot, allocate_slots
from impala_async.learner.threads.batch import LoadedBatch
from impala_async.learner.threads.loader import DeviceLoader, allocator_for
from impala_async.training.batch import Batch
from impala_async.weights import Version
from tests.learner.columns import Planes, big_schema, planes_of
from tests.learner.hand_actor import DEADLINE_S

COLUMNS = 4


class DeviceBench:
    """Owns the loader thread. `full` is fed by `put`; `released` are host slots that came back."""

    def __init__(
        self,
        device: torch.device,
        *,
        num_slots: int = 3,
        num_device_slots: int = 2,
        is_drained: bool = False,
    ) -> None:
        self.schema = big_schema()
        self.slots = allocate_slots(self.schema, COLUMNS, num_slots, allocator_for(device))
        self.full = IndexQueue("full", num_slots)
        self.released: list[int] = []
        self.ends: list[BaseException] = []
        self.loader = DeviceLoader(
            self.slots,
            self.full,
            self.released.append,
            schema=self.schema,
            num_device_slots=num_device_slots,
            device=device,
            is_drained=is_drained,
        )
        self.filler = SlotFiller(self.slots, self._submit, lambda _: None)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, seed: int) -> Planes:
        """One batch into the next host slot."""
        self.until(self._has_room)
        planes = planes_of(self.schema, COLUMNS, seed=seed)
        region = self.filler.assign(COLUMNS, 0)
        assert region is not None
        region.obs[:], region.small[:] = planes.obs, planes.small
        valid_rows = planes.columns.mask_CT.sum(axis=1)
        self.filler.commit([Arrival(0, region, valid_rows, Version(1, seed))])
        return planes

    def until(self, is_so: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < give_up_at
            time.sleep(0.001)

    def close(self) -> None:
        self.loader.close()
        self.join()

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def _submit(self, slot: Slot) -> None:
        self.full.put(slot.index)

    def _has_room(self) -> bool:
        while self.released:
            self.filler.release(self.released.pop())
        return self.filler.free_columns >= COLUMNS

    def _run(self) -> None:
        try:
            self.loader.run()
        except BaseException as error:
            self.ends.append(error)


def holds(loaded: LoadedBatch, planes: Planes) -> bool:
    """Whether a batch on the device is what was put in."""
    got, sent = loaded.tensors, Batch.over(planes.columns)
    pairs = [(got.obs[name], sent.obs[name]) for name in sent.obs]
    pairs += [(got.actions[name], sent.actions[name]) for name in sent.actions]
    pairs += [(got.rewards_BT, sent.rewards_BT), (got.log_probs_BT, sent.log_probs_BT)]
    pairs += [(got.mask_BT, sent.mask_BT), (got.terminated_BT, sent.terminated_BT)]
    return all(torch.equal(a.cpu(), b) for a, b in pairs)


class FakeEvent:
    """Done as soon as it is recorded."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at: float | None = None
        self.stream: object = None

    def record(self, stream: object = None) -> None:
        self._at, self.stream = time.perf_counter(), stream

    def query(self) -> bool:
        return self._at is not None

    def synchronize(self) -> None:
        assert self.query()

    def elapsed_time(self, other: "FakeEvent") -> float:
        assert self._at is not None
        assert other._at is not None
        return (other._at - self._at) * 1000


class FakeStream:
    """Runs everything at once; remembers for whom it was told to wait."""

    def __init__(self, device: object = None) -> None:
        self.waited_for: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited_for.append(other)

    def wait_event(self, event: "FakeEvent") -> None:
        # Not an error of CUDA, which then waits for nothing.
        assert event.query(), "waits for an event that nobody has recorded"
        self.waited_for.append(event)


class FakeCuda:
    """As much of `torch.cuda` as the loader uses, on a CPU."""

    Event = FakeEvent
    Stream = FakeStream

    def __init__(self) -> None:
        self.compute = FakeStream()

    def current_stream(self, device: object) -> FakeStream:
        return self.compute

    def stream(self, stream: FakeStream) -> Any:
        return contextlib.nullcontext()
