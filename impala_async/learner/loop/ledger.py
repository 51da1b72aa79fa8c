"""The accounts: where every column went. All of them are kept on the event loop, so a reading
is always of one moment and the identities hold in every one:

    received = admitted + rejected          admitted = trained + dropped + in slots
    passes done + init_short = num_passes * trained + partial

`in slots` is not computed from the others: it is the sum over the batches that are alive.

Runs on: event loop
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from impala_async.errors import CheckpointError
from impala_async.metrics.names import DROP_REASONS
from impala_async.metrics.report import Counters
from impala_async.wire.messages import VERDICTS

GROUPS = {
    "counts": ("received", "admitted", "trained"),
    "rejected": VERDICTS,
    "dropped": DROP_REASONS,
    "passes": ("done", "init_short"),
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
    passes_partial: Mapping[str, int] = MappingProxyType({})
    slot: int | None = None
    """The host slot that is empty by it, if any."""


class Ledger:
    """Counters of columns by what happened to them, and the batches that are under way."""

    def __init__(self) -> None:
        self._of = {group: Counters(names) for group, names in GROUPS.items()}
        self._filling = 0
        self._batches: dict[int, int] = {}

    def reject(self, columns: int, reason: str) -> None:
        """Some were received, and refused."""
        self._of["counts"].add("received", columns)
        self._of["rejected"].add(reason, columns)

    def rejected(self, reason: str) -> int:
        """Columns rejected for one reason so far."""
        return self._of["rejected"][reason]

    def admit(self, columns: int) -> None:
        """Some were received, and lie in the slot that is filling."""
        self._of["counts"].add("received", columns)
        self._of["counts"].add("admitted", columns)
        self._filling += columns

    def submit(self, batch: int, columns: int) -> None:
        """The filling slot is full: as this batch it is under way to the learner."""
        self._filling -= columns
        assert batch not in self._batches, f"batch {batch} is under way twice"
        self._batches[batch] = columns

    def give_up(self, batch: int) -> None:
        """A batch that never reached the learner, at the end of a run."""
        self.settle(Settlement(batch, dropped={"shutdown": self._batches[batch]}))

    def settle(self, settlement: Settlement) -> None:
        """A batch is done with."""
        columns = self._batches.pop(settlement.batch)
        came_out = settlement.trained + sum(settlement.dropped.values())
        assert columns == came_out, f"a batch held {columns} columns and {came_out} came out"
        self._of["counts"].add("trained", settlement.trained)
        self._of["passes"].add("done", settlement.passes_done)
        self._of["passes"].add("init_short", settlement.passes_init_short)
        for reason, count in settlement.dropped.items():
            self._of["dropped"].add(reason, count)
        for reason, count in settlement.passes_partial.items():
            self._of["partial"].add(reason, count)

    def abandon_filling(self) -> None:
        """The run ends before the filling slot is full."""
        self._of["dropped"].add("shutdown", self._filling)
        self._filling = 0

    @property
    def in_slots(self) -> int:
        return self._filling + sum(self._batches.values())

    def report(self) -> dict[str, int]:
        """All counters, under the names of the registry."""
        report = {
            "trajectories/rejected": self._of["rejected"].total,
            "trajectories/dropped": self._of["dropped"].total,
            "trajectories/in_slots": self.in_slots,
            "passes/partial": self._of["partial"].total,
        }
        for group, counters in self._of.items():
            prefix = "trajectories" if group == "counts" else group
            report |= {f"{prefix}/{name}": count for name, count in counters.snapshot().items()}
        return report

    def save(self) -> dict[str, dict[str, int]]:
        """For a checkpoint. A start that resumes from it has lost what is in slots now."""
        saved = {group: counters.snapshot() for group, counters in self._of.items()}
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
