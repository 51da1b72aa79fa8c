"""All batch memory: a fixed set of slots, allocated and touched once, and kept.

A slot is one batch: two planes `[batch_columns, bytes]`, and beside them what the learner must
know of each column. Its index is what moves between queues; nothing else ever holds a batch.

Runs on: event loop (filling); the learner thread reads a slot between `full` and its release.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from impala_async.schema import Bytes2D, Schema
from impala_async.trajectory import Columns, columns_over

Allocate = Callable[[int], NDArray[np.uint8]]
Episodes = NDArray[np.void]
"""The episodes that ended in one message."""

# These are options of mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_NEVER = (1 << 31) - 1
# More than this an older glibc refuses.
_LARGE = 32 << 20


def keep_freed_memory() -> None:
    """Keep the C library from giving freed memory back to the kernel between batches.

    By its own rules glibc unmaps a large block as soon as it is freed, and every message and every
    activation is paid for in page faults. Another C library is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    # The top of another thread's arena is never given back, not even by malloc_trim.
    mallopt(_ARENA_MAX, 1)
    # Without the first, the second would only end glibc's own adapting, for the worse.
    if mallopt(_MMAP_THRESHOLD, _NEVER) or mallopt(_MMAP_THRESHOLD, _LARGE):
        mallopt(_TRIM_THRESHOLD, _NEVER)


def give_back_freed_memory() -> None:
    """Give what is free now to the kernel, after a flood that will not come again."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


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
    valid_rows_B: NDArray[np.int64]
    filled_B: NDArray[np.bool_]
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
            ranks_B=np.zeros(batch_columns, np.int64),
            valid_rows_B=np.zeros(batch_columns, np.int64),
            filled_B=np.ones(batch_columns, np.bool_),
        )


def allocate_slots(
    schema: Schema, batch_columns: int, num_slots: int, allocate: Allocate = touched_memory
) -> list[Slot]:
    """The slots of one learner."""
    return [Slot.allocate(i, schema, batch_columns, allocate) for i in range(num_slots)]


class Region(NamedTuple):
    """Where the planes of some columns are received: from column `start` of a slot on.

    Without a slot it is the only one: before there is another, its columns are committed.
    """

    obs: Bytes2D
    small: Bytes2D
    slot: Slot | None = None
    start: int = 0

    @property
    def is_only(self) -> bool:
        return self.slot is None

    @staticmethod
    def within(slot: Slot, start: int, stop: int) -> "Region":
        return Region(slot.obs[start:stop], slot.small[start:stop], slot, start)

    def through(self, last: "Region") -> "Region":
        """All columns from here to the end of a later one in the same slot."""
        assert self.slot is not None
        assert self.slot is last.slot
        return Region.within(self.slot, self.start, last.start + len(last.small))
