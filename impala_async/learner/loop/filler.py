"""How columns fill slots, in the order of their arrival; for lockstep see `lockstep.py`.

Runs on: event loop
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from impala_async.learner.slots import Episodes, Region, Slot
from impala_async.metrics.window import WindowStat
from impala_async.weights import Version
from impala_async.wire.messages import Spec
from impala_async.wire.peer import Peer
from impala_async.wire.session import SessionTable


class Arrival(NamedTuple):
    """A message whose columns are in their place."""

    rank: int
    region: Region
    valid_rows: NDArray[np.int64]
    version: Version
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
        self._scratch = Region(np.zeros_like(slots[0].obs), np.zeros_like(slots[0].small))

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

    def judge(self, rank: int, version: Version) -> str | None:
        """Why a message is refused, beside what the session table knows: for nothing else."""
        return None

    def assign(self, num_columns: int, rank: int) -> Region | None:
        """Set room aside for the next columns, of whatever rank."""
        if self._left_in_filling == 0 and self._idle:
            self._open_slot()
        start, stop = self._num_received, self._num_received + num_columns
        if self._filling is not None and stop <= self.batch_columns:
            self._num_received = stop
            return Region.within(self._filling, start, stop)
        if start > self._num_filled:
            return None
        return Region(self._scratch.obs[:num_columns], self._scratch.small[:num_columns])

    def commit(self, arrivals: Sequence[Arrival]) -> None:
        """Take these in, of all that was given room since the last time; the rest is refused."""
        for arrival in arrivals:
            self._take_in(arrival)
        self._num_received = self._num_filled
        # Only now: a goal that is reached closes the doors.
        for arrival in arrivals:
            if arrival.episodes is not None:
                self._count(arrival.episodes)

    def skip(self, rank: int) -> None:
        """A message of this rank was refused for good: others fill the place."""

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

    def _open_slot(self) -> None:
        self._filling = self._take_idle()
        self._num_filled = self._num_received = 0

    def _take_in(self, arrival: Arrival) -> None:
        num_columns = len(arrival.region.small)
        assert num_columns <= self.free_columns, "columns without a credit came through"
        start = 0
        while start < num_columns:
            if self._left_in_filling == 0:
                self._open_slot()
            stop = min(num_columns, start + self._left_in_filling)
            self._write(arrival, slice(start, stop))
            start = stop

    def _write(self, arrival: Arrival, part: slice) -> None:
        slot = self._filling
        assert slot is not None
        target = slice(self._num_filled, self._num_filled + part.stop - part.start)
        if arrival.region.slot is not slot or arrival.region.start != target.start:
            # From the scratch, or down to where columns before it were refused.
            slot.obs[target] = arrival.region.obs[part]
            slot.small[target] = arrival.region.small[part]
        slot.updates_B[target] = arrival.version.update
        slot.ranks_B[target] = arrival.rank
        slot.valid_rows_B[target] = arrival.valid_rows[part]
        self._num_filled = target.stop
        if self._num_filled == self.batch_columns:
            self._filling, self._num_filled = None, 0
            self._send_on(slot)
