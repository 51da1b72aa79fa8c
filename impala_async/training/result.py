"""What an update came to, in numbers that the host has read."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """What the updates with a batch did; `stats` are means over them.

    `num_updates` were taken. Not those without a valid row, and not those whose loss or gradient
    was not finite: `is_failed_B` says which columns were in these.
    """

    num_updates: int
    num_valid_rows: int
    is_failed_B: Tensor
    stats: dict[str, float]

    @property
    def applied(self) -> bool:
        return self.num_updates > 0


def mean_stats(stats: list[dict[str, float]]) -> dict[str, float]:
    """Of each name, over all that have it alike."""
    if len(stats) == 1:
        return stats[0]
    return {name: sum(each[name] for each in stats) / len(stats) for name in stats[0]}
