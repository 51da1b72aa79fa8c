"""All batch memory, how columns fill it in the order of their arrival (for lockstep see
`loop/lockstep.py`), and the accounts of where every column went.

Runs on: event loop; the learner thread reads a slot between `full` and its release.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from impala_async.errors import CheckpointError
from impala_async.metrics.names import DROP_REASONS
from impala_async.metrics.report import Counters
from impala_async.metrics.window import WindowStat
from impala_async.schema import Bytes2D, Schema
from impala_async.trajectory import Columns, columns_over
from impala_async.weights import Version
from impala_async.wire.messages import VERDICTS, Data, Spec
from impala_async.wire.peer import Peer
from impala_async.wire.session import SessionTable

Allocate = Callable[[int], NDArray[np.uint8]]
Episodes = NDArray[np.void]
"""The episodes that ended in one message."""


def touched_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Memory whose pages are there already: a first touch costs three times a copy."""
    return np.full(num_bytes, 0, np.uint8)


@dataclass(slots=True, eq=False)
class Slot:
    """Room for one batch of B columns: two planes, and what must be known of each column.

    Only its index moves between queues. `batch` numbers the batches that it has held.
    """

    index: int
    obs: Bytes2D
    small: Bytes2D
    columns: Columns
    updates_B: NDArray[np.int64]
    actors_B: NDArray[np.int64]
    filled_B: NDArray[np.bool_]
    batch: int = 0
    returns: Sequence[float] = ()
    """In lockstep, those of the episodes that came with its columns, in the order of actors."""


def allocate_slots(
    schema: Schema, batch_columns: int, num_slots: int, allocate: Allocate = touched_memory
) -> list[Slot]:
    slots = []
    for index in range(num_slots):
        obs, small = (
            allocate(batch_columns * column_bytes).reshape(batch_columns, -1)
            for column_bytes in (schema.layout.obs_bytes, schema.layout.small_bytes)
        )
        updates_B, actors_B = np.zeros((2, batch_columns), np.int64)
        filled_B = np.ones(batch_columns, np.bool_)
        columns = columns_over(schema, obs, small)
        slots.append(Slot(index, obs, small, columns, updates_B, actors_B, filled_B))
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


GROUPS = {
    "counts": ("received", "admitted", "trained"),
    "rejected": VERDICTS,
    "dropped": DROP_REASONS,
    "passes": ("done", "init_short", "ended_early"),
    "partial": DROP_REASONS,
}
"""The counters, by the names that they have in a checkpoint."""


class Settlement(NamedTuple):
    """The learner thread's last word on one batch: what became of it, in columns."""

    batch: int
    trained: int = 0
    dropped: Mapping[str, int] = MappingProxyType({})
    passes_done: int = 0
    passes_init_short: int = 0
    passes_ended_early: int = 0
    passes_partial: Mapping[str, int] = MappingProxyType({})
    slot: int | None = None
    """The host slot that is empty by it, if any."""


class Ledger:
    """Counts columns by what became of them. It is kept on the event loop alone, so a reading is
    of one moment, and in every one

        received = admitted + rejected          admitted = trained + dropped + in slots
        passes done + init_short + ended early = num_passes * trained + partial
    """

    def __init__(self) -> None:
        self._of = {group: Counters(names) for group, names in GROUPS.items()}
        self._filling = 0
        self._batches: dict[int, int] = {}

    def reject(self, columns: int, reason: str) -> None:
        self._of["counts"].add("received", columns)
        self._of["rejected"].add(reason, columns)

    def admit(self, columns: int) -> None:
        """They lie in the slot that is filling."""
        self._of["counts"].add("received", columns)
        self._of["counts"].add("admitted", columns)
        self._filling += columns

    def submit(self, batch: int, columns: int) -> None:
        """The filling slot is full: as this batch it is under way to the learner."""
        self._filling -= columns
        assert batch not in self._batches, f"batch {batch} is under way twice"
        self._batches[batch] = columns

    def settle(self, settlement: Settlement) -> None:
        columns = self._batches.pop(settlement.batch)
        came_out = settlement.trained + sum(settlement.dropped.values())
        assert columns == came_out, f"a batch held {columns} columns and {came_out} came out"
        self._of["counts"].add("trained", settlement.trained)
        self._of["passes"].add("done", settlement.passes_done)
        self._of["passes"].add("init_short", settlement.passes_init_short)
        self._of["passes"].add("ended_early", settlement.passes_ended_early)
        for reason, count in settlement.dropped.items():
            self._of["dropped"].add(reason, count)
        for reason, count in settlement.passes_partial.items():
            self._of["partial"].add(reason, count)

    def abandon(self, *batches: int) -> None:
        """Count these and the filling one as dropped: the run is over before they were trained."""
        self._of["dropped"].add("shutdown", self._filling)
        self._filling = 0
        for batch in batches:
            self.settle(Settlement(batch, dropped={"shutdown": self._batches[batch]}))

    @property
    def in_slots(self) -> int:
        """The sum over what is there: from the other numbers nobody would see that some is lost."""
        return self._filling + sum(self._batches.values())

    def report(self) -> dict[str, int]:
        report = {
            "trajectories/rejected": sum(self._of["rejected"].values()),
            "trajectories/dropped": sum(self._of["dropped"].values()),
            "trajectories/in_slots": self.in_slots,
            "passes/partial": sum(self._of["partial"].values()),
        }
        for group, counters in self._of.items():
            prefix = "trajectories" if group == "counts" else group
            report |= {f"{prefix}/{name}": count for name, count in counters.items()}
        return report

    def save(self) -> dict[str, dict[str, int]]:
        """The counts for a checkpoint. A resumed start has lost what is in slots now."""
        saved = {group: dict(counters) for group, counters in self._of.items()}
        saved["dropped"]["shutdown"] += self.in_slots
        return saved

    def restore(self, saved: dict[str, dict[str, int]]) -> None:
        """Continue those of a checkpoint; raises CheckpointError where they do not add up."""
        counts = saved["counts"]
        admitted = counts["trained"] + sum(saved["dropped"].values())
        received = counts["admitted"] + sum(saved["rejected"].values())
        if (counts["received"], counts["admitted"]) != (received, admitted):
            raise CheckpointError("its accounts of trajectories do not add up")
        for group, counters in self._of.items():
            counters.restore(saved[group])


@dataclass(eq=False)
class SlotFiller:
    """Puts columns into slots in the order of their arrival; one slot at a time is filling.

    Messages that fit into what is left of the filling slot are received in place, one behind the
    other, and stay where they are if all of them are committed. One that does not fit goes through
    the scratch and is split over two slots.
    """

    count: Callable[[Episodes], None]
    """Takes the episodes of what is committed."""
    is_lockstep: ClassVar = False

    def __post_init__(self) -> None:
        self.ledger = Ledger()
        self.batch_columns = 0
        self._slots: list[Slot] = []
        self._idle: deque[Slot] = deque()
        self._idle_depth = WindowStat("depth")
        self._filling: Slot | None = None
        self._num_filled = 0
        # This counts those that are not committed, too.
        self._num_received = 0
        self._num_batches = 0

    def open(self, slots: list[Slot], submit: Callable[[int], None]) -> None:
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
        # This comes last, as a goal that is reached ends the run.
        for arrival in arrivals:
            if arrival.episodes is not None:
                self.count(arrival.episodes)

    def skip(self, peer: Peer) -> None:
        """A message was refused for good: others fill its place."""

    def late_for(self, update: int) -> list[Peer]:
        """Who is missing in the batch that is trained after this update: nobody is waited for."""
        return []

    def release(self, index: int) -> None:
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
        self._idle_depth.push(len(self._idle))
        return self._idle.popleft()

    def _send_on(self, slot: Slot) -> None:
        self._num_batches += 1
        slot.batch = self._num_batches
        self.ledger.submit(slot.batch, int(slot.filled_B.sum()))
        self._submit(slot.index)

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
        slot.actors_B[target] = arrival.peer.number
        self._num_filled = target.stop
        if self._num_filled == self.batch_columns:
            self._filling, self._num_filled = None, 0
            self._send_on(slot)
        return num_columns
