"""What an update came to, in numbers that the host has read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from impala_async.training.batch import Part
from impala_async.training.rewards import Moments


@dataclass(frozen=True)
class StepResult:
    """What the updates with a batch did; `stats` are means over them.

    `num_updates` were taken. Not those without a valid row, and not those whose loss, gradient or
    weights were not finite: `is_failed_B` says which columns were in these, `not_finite` what it
    was, and `num_failed_in_a_row` how many there were since the last one that was taken.
    """

    num_updates: int
    num_valid_rows: int
    is_failed_B: Tensor
    stats: dict[str, float]
    num_failed_in_a_row: int = 0
    not_finite: tuple[str, ...] = ()

    @property
    def applied(self) -> bool:
        return self.num_updates > 0


class Outcome(NamedTuple):
    """What became of a part. `moments` are those of its return targets, if they were asked for."""

    part: Part
    is_applied: bool
    num_valid: int
    moments: Moments
    stats: dict[str, float]

    @property
    def is_failed(self) -> bool:
        """Something was not finite."""
        return self.num_valid > 0 and not self.is_applied


def names_not_finite(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """What failed in these: a number of theirs, or else what a step would have come to."""
    names: dict[str, None] = {}
    for outcome in outcomes:
        if outcome.is_failed:
            bad = [name for name, value in outcome.stats.items() if not math.isfinite(value)]
            names |= dict.fromkeys(bad or ["weights"])
    return tuple(names)


def mean_stats(stats: list[dict[str, float]]) -> dict[str, float]:
    """Of each name, over all that have it alike."""
    if len(stats) == 1:
        return stats[0]
    return {name: sum(each[name] for each in stats) / len(stats) for name in stats[0]}
