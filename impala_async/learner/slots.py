"""All batch memory, and how columns fill it in the order of their arrival (for lockstep see
`loop/lockstep.py`).

A slot is one batch: two planes `[batch_columns, bytes]`, and beside them what the learner must
know of each column. There is a fixed set of them, allocated and touched once. The index of a slot
is what moves between queues; nothing else ever holds a batch.

Runs on: event loop; the learner thread reads a slot between `full` and its release.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from impala_async.metrics.window import WindowStat
from impala_async.schema import Bytes2D, Schema
from impala_async.trajectory import Columns, columns_over
from impala_async.weights import Version
from impala_async.wire.messages import Data, Spec
from impala_async.wire.peer import Peer
from impala_async.wire.session import SessionTable

Allocate = Callable[[int], NDArray[np.uint8]]
Episodes = NDArray[np.void]
"""The episodes that ended in one message."""


def touched_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Memory whose pages are there already: a first touch costs three times a copy."""
    memory = np.empty(num_bytes, np.uint8)
    memory.fill(0)
    return memory


@dataclass(slots=True, eq=False)
class Slot:
    """Room for one batch of B columns. `batch` numbers the batches that it has held."""

    index: int
    obs: Bytes2D
    small: Bytes2D
    columns: Columns
    updates_B: NDArray[np.int64]
    ranks_B: NDArray[np.int64]
    filled_B: NDArray[np.bool_]
    batch: int = 0


def allocate_slots(
    schema: Schema, batch_columns: int, num_slots: int, allocate: Allocate = touched_memory
) -> list[Slot]:
    """The slots of one learner."""
    slots = []
    for index in range(num_slots):
        obs, small = (
            allocate(batch_columns * column_bytes).reshape(batch_columns, -1)
            for column_bytes in (schema.layout.obs_bytes, schema.layout.small_bytes)
        )
        updates_B, ranks_B = np.zeros((2, batch_columns), np.int64)
        filled_B = np.ones(batch_columns, np.bool_)
        columns = columns_over(schema, obs, small)
        slots.append(Slot(index, obs, small, columns, updates_B, ranks_B, filled_B))
    return slots


class Arrival(NamedTuple):
    """A message, and where its columns are received: from column `start` of a slot on.

    Without a slot it is the only one: before there is another, its columns are committed.
    """

    peer: Peer
    data: Data
    obs: Bytes2D
    small: Bytes2D
    slot: Slot | None = None
    start: int = 0
    episodes: Episodes | None = None


class SlotFiller:
    """Puts columns into slots in the order of their arrival; one slot at a time is filling.

    Messages that fit into what is left of the filling slot are received in place, one behind the
    other, and stay where they are if all of them are committed. One that does not fit goes through
    the scratch and is split over two slots.
    """

    is_lockstep = False

    def __init__(self, count: Callable[[Episodes], None]) -> None:
        """`count` takes the episodes of what is committed."""
        self.batch_columns = 0
        self._count = count
        self._slots: list[Slot] = []
        self._idle: deque[Slot] = deque()
        self._idle_depth = WindowStat("depth")
        self._filling: Slot | None = None
        self._num_filled = 0
        # With those that are not committed yet.
        self._num_received = 0
        self._num_batches = 0

    def open(self, slots: list[Slot], submit: Callable[[Slot], None]) -> None:
        """There are slots. Each goes to `submit` when it is full."""
        self._slots, self._submit = slots, submit
        self._idle.extend(slots)
        self.batch_columns = len(slots[0].obs)
        self._scratch = np.zeros_like(slots[0].obs), np.zeros_like(slots[0].small)

    @property
    def free_columns(self) -> int:
        """Columns that can still come in before a slot must be released."""
        return self._left_in_filling + len(self._idle) * self.batch_columns

    def deal(self, table: SessionTable, now: float) -> list[Peer]:
        """Give out credit: at most one batch ahead, as more would only make the data older."""
        return table.deal(self.free_columns, self.batch_columns, now=now)

    def find_misfit(self, spec: Spec) -> str | None:
        """Why an actor that sends this cannot take part: whatever fits into a batch can."""
        return None

    def may_begin(self, peer: Peer, update: int) -> bool:
        """Whether the weights of this update may be the first of a session."""
        return True

    def judge(self, peer: Peer, version: Version) -> str | None:
        """Why a message is refused, beside what the session table knows: for nothing else."""
        return None

    def assign(self, peer: Peer, data: Data) -> Arrival | None:
        """Set room aside for the next message; None where those before it must be committed."""
        if self._left_in_filling == 0 and self._idle:
            self._open_slot()
        start, stop = self._num_received, self._num_received + data.columns
        slot = self._filling
        if slot is not None and stop <= self.batch_columns:
            self._num_received = stop
            return Arrival(peer, data, slot.obs[start:stop], slot.small[start:stop], slot, start)
        if start > self._num_filled:
            return None
        obs, small = self._scratch
        return Arrival(peer, data, obs[: data.columns], small[: data.columns])

    def commit(self, arrivals: Sequence[Arrival]) -> None:
        """Take these in, of all that was given room since the last time; the rest is refused."""
        for arrival in arrivals:
            assert arrival.data.columns <= self.free_columns, "columns without a credit"
            num_written = 0
            while num_written < arrival.data.columns:
                num_written += self._write(arrival, num_written)
        self._num_received = self._num_filled
        # Only now: a goal that is reached closes the doors.
        for arrival in arrivals:
            if arrival.episodes is not None:
                self._count(arrival.episodes)

    def skip(self, peer: Peer) -> None:
        """A message was refused for good: others fill its place."""

    def release(self, index: int) -> None:
        """A slot is empty again."""
        self._idle.append(self._slots[index])

    def note_version(self, update: int) -> None:
        """A version is published: nothing waits for it."""

    def report(self) -> dict[str, object]:
        """Tell depth and capacity. Nobody waits for a slot: without one there is no credit."""
        return {
            "queue/idle_depth_quantiles": self._idle_depth.quantiles,
            "queue/idle_capacity": len(self._slots),
        }

    def _take_idle(self) -> Slot:
        """The slot that has been empty for longest."""
        self._idle_depth.push(len(self._idle))
        return self._idle.popleft()

    def _send_on(self, slot: Slot) -> None:
        """A batch is complete."""
        self._num_batches += 1
        slot.batch = self._num_batches
        self._submit(slot)

    @property
    def _left_in_filling(self) -> int:
        return 0 if self._filling is None else self.batch_columns - self._num_filled

    def _open_slot(self) -> Slot:
        self._filling = self._take_idle()
        self._num_filled = self._num_received = 0
        return self._filling

    def _write(self, arrival: Arrival, first: int) -> int:
        """As many of its columns as the filling slot has room for, from the first of these on."""
        slot = self._filling or self._open_slot()
        num_columns = min(arrival.data.columns - first, self._left_in_filling)
        source = slice(first, first + num_columns)
        target = slice(self._num_filled, self._num_filled + num_columns)
        if arrival.slot is not slot or arrival.start != target.start:
            # From the scratch, or down to where columns before it were refused.
            slot.obs[target] = arrival.obs[source]
            slot.small[target] = arrival.small[source]
        slot.updates_B[target] = arrival.data.update
        slot.ranks_B[target] = arrival.peer.rank
        self._num_filled = target.stop
        if self._num_filled == self.batch_columns:
            self._filling, self._num_filled = None, 0
            self._send_on(slot)
        return num_columns
