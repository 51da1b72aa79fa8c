"""All batch memory: a fixed set of slots, allocated and touched once, and how columns fill them.

A slot is one batch: two planes `[batch_columns, bytes]`, and beside them what the learner must
know of each column. Its index is what moves between queues; nothing else ever holds a batch.

Runs on: event loop (filling); the learner thread reads a slot between `full` and its release.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from impala_async.metrics.window import WindowStat
from impala_async.spec import Bytes2D, Schema
from impala_async.trajectory import Columns, columns_over
from impala_async.weights import Version

Allocate = Callable[[int], NDArray[np.uint8]]


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
    valid_rows_B: NDArray[np.int64]
    batch: int = 0

    @staticmethod
    def allocate(index: int, schema: Schema, batch_columns: int, allocate: Allocate) -> "Slot":
        layout = schema.layout
        obs = allocate(batch_columns * layout.obs_bytes).reshape(batch_columns, -1)
        small = allocate(batch_columns * layout.small_bytes).reshape(batch_columns, -1)
        return Slot(
            index=index,
            obs=obs,
            small=small,
            columns=columns_over(schema, obs, small),
            updates_B=np.zeros(batch_columns, np.int64),
            valid_rows_B=np.zeros(batch_columns, np.int64),
        )


def allocate_slots(
    schema: Schema, batch_columns: int, num_slots: int, allocate: Allocate = touched_memory
) -> list[Slot]:
    """The slots of one learner."""
    return [Slot.allocate(i, schema, batch_columns, allocate) for i in range(num_slots)]


class SlotFiller:
    """Puts columns into slots in the order of their arrival; one slot at a time is filling.

    A message that fits into what is left of the filling slot is received in place. One that
    does not goes through the scratch and is split over two slots.
    """

    def __init__(self, slots: list[Slot], submit: Callable[[Slot], None]) -> None:
        self._slots = slots
        self._submit = submit
        self._idle = deque(slot.index for slot in slots)
        self._filling: Slot | None = None
        self._num_filled = 0
        self._num_batches = 0
        self.batch_columns = len(slots[0].obs)
        self._scratch = np.zeros_like(slots[0].obs)
        self._idle_depth = WindowStat("depth")

    @property
    def free_columns(self) -> int:
        """Columns that can still come in before a slot must be released."""
        return self._left_in_filling + len(self._idle) * self.batch_columns

    def obs_target(self, num_columns: int) -> Bytes2D:
        """Where the observations of the next columns are to be received."""
        if self._left_in_filling == 0:
            self._open_slot()
        if self._filling is not None and num_columns <= self._left_in_filling:
            return self._filling.obs[self._num_filled : self._num_filled + num_columns]
        return self._scratch[:num_columns]

    def commit(
        self, obs: Bytes2D, small: Bytes2D, valid_rows: NDArray[np.int64], version: Version
    ) -> None:
        """Take in columns whose observations are in the `obs_target` asked for just before."""
        assert len(small) <= self.free_columns, "columns without a credit came through"
        start = 0
        while start < len(small):
            if self._left_in_filling == 0:
                self._open_slot()
            stop = min(len(small), start + self._left_in_filling)
            part = slice(start, stop)
            self._write(obs[part], small[part], valid_rows[part], version)
            start = stop

    def release(self, index: int) -> None:
        """A slot is empty again."""
        self._idle.append(index)

    def report(self) -> dict[str, object]:
        """The numbers of the idle queue. Nobody waits for it: without a slot there is no credit."""
        return {
            "queue/idle_put_wait_ms": 0.0,
            "queue/idle_get_wait_ms": 0.0,
            "queue/idle_depth_quantiles": self._idle_depth.summary().quantiles,
            "queue/idle_capacity": len(self._slots),
        }

    @property
    def _left_in_filling(self) -> int:
        return 0 if self._filling is None else self.batch_columns - self._num_filled

    def _open_slot(self) -> None:
        if self._idle:
            self._idle_depth.push(len(self._idle))
            self._filling = self._slots[self._idle.popleft()]
            self._num_filled = 0

    def _write(
        self, obs: Bytes2D, small: Bytes2D, valid_rows: NDArray[np.int64], version: Version
    ) -> None:
        slot = self._filling
        assert slot is not None
        target = slice(self._num_filled, self._num_filled + len(small))
        if not np.may_share_memory(obs, slot.obs):
            slot.obs[target] = obs
        slot.small[target] = small
        slot.updates_B[target] = version.update
        slot.valid_rows_B[target] = valid_rows
        self._num_filled += len(small)
        if self._num_filled == self.batch_columns:
            self._filling, self._num_filled = None, 0
            self._num_batches += 1
            slot.batch = self._num_batches
            self._submit(slot)
