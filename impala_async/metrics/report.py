"""One report line: counters, snapshots merged under declared names, and mean returns for people.

Two owners of one key, a key outside `metrics.names` and a value that JSON cannot hold are bugs of
ours and fail at once. A number that is not finite is none of these: a diverged loss is news, and
reaches the sinks as null.
"""

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real

from impala_async.metrics.names import REGISTRY, Value, undeclared
from impala_async.metrics.verdict import judge

RETURN_EPISODES = 100
# Whole numbers are written out up to here, and decimals down to there.
_MAX_EXPONENT, _MIN_EXPONENT = 9, -5


class Counters:
    """Counts that only grow, one for each reason; `prefix` stands before each exported name.

    One thread owns them. A name that was not given at the start is a bug of ours, and so is a
    negative step.
    """

    def __init__(self, names: Iterable[str], *, prefix: str = "") -> None:
        self._prefix = prefix
        self._counts = dict.fromkeys(names, 0)

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
        """Go on from a snapshot, which may be that of a program with other counters."""
        for name in self._counts:
            self._counts[name] = int(snapshot.get(self._prefix + name, 0))


def merge(*snapshots: Mapping[str, object]) -> dict[str, Value]:
    """All snapshots as one report, in their order, every value clean for strict JSON."""
    report: dict[str, Value] = {}
    for snapshot in snapshots:
        unknown = undeclared(snapshot)
        assert not unknown, f"metrics that metrics/names.py does not declare: {sorted(unknown)}"
        twice = report.keys() & snapshot.keys()
        assert not twice, f"metrics with two owners: {sorted(twice)}"
        report.update((name, clean(value)) for name, value in snapshot.items())
    return report


def assemble(*snapshots: Mapping[str, object]) -> dict[str, Value]:
    """The whole report line: the merged snapshots and the verdict that follows from them.

    A line holds every declared name: what nobody has measured yet is null.
    """
    report = merge(*snapshots)
    verdict = judge(report)
    report["bottleneck"], report["advice"] = str(verdict), verdict.advice
    return dict.fromkeys(REGISTRY) | report


def clean(value: object) -> Value:
    """A value as plain Python, numpy's scalars included; what is not finite becomes None."""
    if isinstance(value, list | tuple):
        return [_clean_number(element) for element in value]
    return value if isinstance(value, str) else _clean_number(value)


def _clean_number(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, Integral):
        return int(value)
    assert isinstance(value, Real), f"a report cannot hold {value!r}"
    number = float(value)
    return number if math.isfinite(number) else None


def format_return(value: float | None, goal: float | None = None) -> str:
    """A return, with as many digits more as it takes to tell one below the goal from the goal."""
    if value is None:
        return "-"
    num_digits = 3
    while goal is not None and value < goal <= float(_format(value, num_digits)):
        num_digits += 1
    return _format(value, num_digits)


def format_mean_return(value: float | None, num_episodes: object, goal: float | None = None) -> str:
    """As `format_return`, with the number of episodes while there are few."""
    is_early = isinstance(num_episodes, int) and 0 < num_episodes < RETURN_EPISODES
    few = f" ({num_episodes} episode{'s' * (num_episodes != 1)})" if is_early else ""
    aim = "" if goal is None else f" / {goal:.12g}"
    return f"{format_return(value, goal)}{aim}{few}"


def _format(value: float, num_digits: int) -> str:
    value = value or 0.0  # without the sign of -0.0
    if not math.isfinite(value):
        return str(value)
    scientific = f"{value:.{num_digits - 1}e}"
    exponent = int(scientific.partition("e")[2])
    if not _MIN_EXPONENT <= exponent <= _MAX_EXPONENT:
        return scientific
    return f"{value:.{max(0, num_digits - 1 - exponent)}f}"
