"""Loads full host slots, given by index, into batches on the learner's device.

    B columns of a batch

Runs on: learner thread, loader thread (`DeviceLoader.run`)
"""

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from impala_async.learner.handoff import ClosedError
from impala_async.learner.slots import Allocate, Settlement, Slot, touched_memory
from impala_async.metrics.timer import TimerStat
from impala_async.metrics.window import WindowStat
from impala_async.schema import Schema
from impala_async.training.batch import Batch


class IndexQueue:
    """Slot indices from one side to the other: no more than there are slots, so puts never wait."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self.capacity = name, capacity
        self._items: deque[int] = deque()
        self._changed = threading.Condition()
        self._is_closed = self.is_drained = False
        self._get_wait = WindowStat("get_wait")
        self._waited_s = 0.0
        self._depth = WindowStat("depth")

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: int) -> None:
        with self._changed:
            assert len(self._items) < self.capacity, f"{self.name}: more indices than slots"
            self._items.append(item)
            self._depth.push(len(self._items))
            self._changed.notify()

    def get(self, timeout: float | None = None) -> int:
        """Wait for one in a thread: queue.Empty after the timeout, ClosedError at the end."""
        started = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._is_closed, timeout)
            if self._is_closed and not (self.is_drained and self._items):
                raise ClosedError(self.name)
            self._waited_s += time.monotonic() - started
            if not self._items:
                raise queue.Empty
            # It may have been asked for in pieces.
            self._get_wait.push(1000 * self._waited_s)
            self._waited_s = 0.0
            return self._items.popleft()

    def take_all(self) -> list[int]:
        """Take what is left after the close: for the accounts."""
        with self._changed:
            items, self._items = self._items, deque()
            return list(items)

    def close(self, *, is_drained: bool = False) -> None:
        """Wake every waiter, from any side: it raises ClosedError; drained, once this is empty."""
        with self._changed:
            self._is_closed, self.is_drained = True, is_drained
            self._changed.notify_all()

    def report(self) -> dict[str, object]:
        prefix = f"queue/{self.name}"
        with self._changed:
            return {
                f"{prefix}_get_wait_ms": self._get_wait.mean,
                f"{prefix}_depth_quantiles": self._depth.quantiles,
                f"{prefix}_capacity": self.capacity,
            }


class DeviceTimer(TimerStat):
    """Times launches on a GPU by events and without waiting: a timing counts some calls later."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def __enter__(self) -> Self:
        pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        pair[0].record()
        self._pending.append(pair)
        return self

    def __exit__(self, *_: object) -> None:
        self._pending[-1][1].record()
        while self._pending and self._pending[0][1].query():
            start, stop = self._pending.popleft()
            self.push(start.elapsed_time(stop) / 1000)


class LoadedBatch:
    """A batch on its device, which of its columns are alive, and what passes they had.

    `place` is its place in the loader. Arrays of the slot are copied: it may be filled again.
    """

    def __init__(self, place: int, batch: Batch, slot: Slot) -> None:
        self.place, self.batch, self.number = place, batch, slot.batch
        self.updates_B = slot.updates_B.copy()
        self.actors_B = slot.actors_B.copy()
        self.returns = slot.returns
        self.valid_rows_B = slot.columns.mask_CT.sum(axis=1, dtype=np.int64)
        self.alive_B = slot.filled_B.copy()
        self._passes_B = np.zeros(len(self.alive_B), np.int64)
        self._dropped, self._partial = Counter[str](), Counter[str]()

    @property
    def num_valid_rows(self) -> int:
        return int(self.valid_rows_B @ self.alive_B)

    def use(self) -> None:
        self._passes_B += self.alive_B

    def drop(self, which_B: NDArray[np.bool_], reason: str) -> None:
        which_B = which_B & self.alive_B
        if which_B.any():
            self._dropped[reason] += int(np.count_nonzero(which_B))
            self._partial[reason] += int(self._passes_B[which_B].sum())
            self.alive_B &= ~which_B

    def settle(self, num_passes: int, num_given: int, slot: int | None = None) -> Settlement:
        """The batch is done, and the slot is empty by it: what is alive now is trained. Where it
        had fewer passes than it was given, it ended early."""
        trained, done = int(np.count_nonzero(self.alive_B)), int(self._passes_B.sum())
        return Settlement(
            batch=self.number,
            trained=trained,
            dropped=self._dropped,
            passes_done=done,
            passes_init_short=trained * (num_passes - num_given),
            # The passes that are not partial are those of the trained columns.
            passes_ended_early=trained * num_given - (done - sum(self._partial.values())),
            passes_partial=self._partial,
            slot=slot,
        )


class HostLoader:
    """The loader of a CPU: a batch is a view of its slot, which comes back after the last pass."""

    def __init__(self, schema: Schema, slots: list[Slot]) -> None:
        self.slots, self.num_slots = slots, len(slots)
        self.full = IndexQueue("full", len(slots))
        self.bodies: dict[str, Callable[[], None]] = {}
        """Threads that somebody is to start."""
        self.batches = [Batch.in_planes(schema, slot.obs, slot.small) for slot in slots]
        self.load_timer, self.load_wait_timer = TimerStat(), TimerStat()

    def get(self, *, timeout: float | None) -> LoadedBatch:
        """Wait for a batch; raises queue.Empty or ClosedError."""
        slot = self.slots[self.full.get(timeout)]
        return LoadedBatch(slot.index, self.batches[slot.index], slot)

    def release(self, loaded: LoadedBatch) -> int | None:
        """The batch had its last pass; the host slot that is empty by it, if one is."""
        return loaded.place

    def num_waiting(self) -> int:
        """Batches full, loading or ready; not those in the ring."""
        return len(self.full)

    def leftovers(self) -> list[int]:
        """The batches that never reached the ring, once the end has come."""
        return [self.slots[index].batch for index in self.full.take_all()]

    def report(self) -> dict[str, object]:
        return self.full.report()

    def close(self, *, is_drained: bool = False) -> None:
        """Take no more batches. Those that wait are left over; if drained, they come out first."""
        self.full.close(is_drained=is_drained)


class _DeviceSlot:
    def __init__(self, schema: Schema, like: Slot, device: torch.device) -> None:
        self.obs, self.small = (
            torch.zeros(plane.shape, dtype=torch.uint8, device=device)
            for plane in (like.obs, like.small)
        )
        self.batch = Batch.in_planes(schema, self.obs, self.small)
        self.started, self.copied = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.loaded: LoadedBatch | None = None


class DeviceLoader(HostLoader):
    """The loader of a GPU: a thread copies pinned host slots into device slots, of which there are
    more than the ring holds, on a stream of its own.

    A host slot comes back as soon as its copy has completed. The update waits for the copy by an
    event, never by a synchronisation of the host.
    """

    def __init__(
        self,
        schema: Schema,
        slots: list[Slot],
        release_slot: Callable[[int], None],
        *,
        num_device_slots: int,
        device: torch.device,
    ) -> None:
        super().__init__(schema, slots)
        self.num_slots += num_device_slots
        self.bodies = {"loader": self.run}
        self._release_slot, self._device = release_slot, device
        self._stream = torch.cuda.Stream(device)
        self._places = [_DeviceSlot(schema, slots[0], device) for _ in range(num_device_slots)]
        self.batches = [place.batch for place in self._places]
        self._free = IndexQueue("device", num_device_slots)
        self._ready = IndexQueue("ready", num_device_slots)
        # The batch that is neither full nor ready, if there is one.
        self._loading: list[int] = []
        for place in range(num_device_slots):
            self._free.put(place)

    def run(self) -> None:
        """The body of the loader thread; ends with ClosedError."""
        make_current(self._device)
        try:
            while True:
                self._load_next()
        finally:
            # From here on nothing more gets ready.
            self._ready.close(is_drained=self.full.is_drained)

    def get(self, *, timeout: float | None) -> LoadedBatch:
        with self.load_wait_timer if self.num_waiting() else nullcontext():
            device_slot = self._places[self._ready.get(timeout)]
        assert device_slot.loaded is not None
        torch.cuda.current_stream(self._device).wait_event(device_slot.copied)
        return device_slot.loaded

    def release(self, loaded: LoadedBatch) -> None:
        # The next copy into these planes must not overtake what still reads them.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._free.put(loaded.place)

    def num_waiting(self) -> int:
        return len(self.full) + len(self._loading) + len(self._ready)

    def leftovers(self) -> list[int]:
        ready = [self._places[place].loaded for place in self._ready.take_all()]
        return [loaded.number for loaded in ready if loaded] + self._loading + super().leftovers()

    def report(self) -> dict[str, object]:
        return {**self.full.report(), **self._ready.report()}

    def close(self, *, is_drained: bool = False) -> None:
        super().close(is_drained=is_drained)
        # Drained, the loader thread closes these when it is done.
        if not is_drained:
            self._free.close()
            self._ready.close()

    def _load_next(self) -> None:
        slot = self.slots[self.full.get()]
        self._loading = [slot.batch]
        place = self._free.get()
        target = self._places[place]
        with torch.cuda.stream(self._stream):
            target.started.record(self._stream)
            target.obs.copy_(torch.from_numpy(slot.obs), non_blocking=True)
            target.small.copy_(torch.from_numpy(slot.small), non_blocking=True)
            target.copied.record(self._stream)
        target.loaded = LoadedBatch(place, target.batch, slot)
        # The host slot may be filled again only when its bytes have left it.
        target.copied.synchronize()
        self.load_timer.push(target.started.elapsed_time(target.copied) / 1000)
        self._release_slot(slot.index)
        self._loading = []
        self._ready.put(place)


def allocator_for(device: torch.device) -> Allocate:
    """The memory from which a batch gets to a device fastest: a GPU copies from pinned memory."""
    if device.type != "cuda":
        return touched_memory
    return lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()


def make_current(device: torch.device) -> None:
    """This thread works there from now on: every thread begins with the first GPU."""
    # Without a number a device is the current one already, and torch refuses it here.
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
