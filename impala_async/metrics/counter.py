"""Monotonic counters, one per reason, under names that are fixed when they are made.

Owns a handful of integers that only grow: columns rejected as stale, messages of an unknown
type. Used by one thread; `snapshot` is what it hands to the reporter and to a checkpoint, and
`restore` is how a resumed run goes on with the same numbers.

    rejected = Counters(["stale", "duplicate"], prefix="rejected/")
    rejected.add("stale", num_columns)
    rejected.snapshot()        # {"rejected/stale": 4, "rejected/duplicate": 0}

A name that was not given at the start is a bug of ours, not bad input, and so is a negative
step: both fail at once instead of making a series that no table of metrics knows.
"""

from collections.abc import Iterable, Mapping


class Counters:
    """A fixed set of counters, all zero at first; `prefix` stands before each exported name."""

    def __init__(self, names: Iterable[str], *, prefix: str = "") -> None:
        given = list(names)
        self._prefix = prefix
        self._counts = dict.fromkeys(given, 0)
        assert len(self._counts) == len(given), f"a counter named twice in {given}"

    def add(self, name: str, k: int = 1) -> None:
        """Count `k` more of `name`; an unknown name is a KeyError."""
        assert k >= 0, f"counter {name} cannot fall by {-k}"
        self._counts[name] += k

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    @property
    def total(self) -> int:
        """The sum over all reasons, as the identities of the accounts need it."""
        return sum(self._counts.values())

    def snapshot(self) -> dict[str, int]:
        """Every counter under its exported name, zeros included: a series never starts late."""
        return {self._prefix + name: count for name, count in self._counts.items()}

    def restore(self, snapshot: Mapping[str, int]) -> None:
        """Go on from a snapshot.

        A counter that the snapshot lacks starts at zero and a name that only the snapshot has
        is passed over, so a checkpoint of another version of the program can be resumed.
        """
        for name in self._counts:
            self._counts[name] = int(snapshot.get(self._prefix + name, 0))
