"""Results: what became of each part of a batch, and of all its updates, in numbers of the host.

B columns of a batch
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from impala_async.files import write_whole
from impala_async.training.batch import Batch
from impala_async.training.rewards import Moments


class Outcome(NamedTuple):
    """The result of a part. `moments` are those of its return targets, if they were asked for."""

    is_in_B: Tensor
    """Which of the living columns it had."""
    is_applied: bool
    num_valid: int
    moments: Moments
    stats: dict[str, float]

    @property
    def is_failed(self) -> bool:
        """Something was not finite."""
        return self.num_valid > 0 and not self.is_applied


@dataclass(frozen=True)
class StepResult:
    """The result of the updates with a batch; `stats` are means over them.

    `num_updates` counts the updates taken. An update without a valid row is not taken, nor is one
    that fails because its loss, gradient or weights are not finite: `is_failed_B` says which
    columns were in failed updates, `not_finite` what was not finite, and `num_failed_in_a_row`
    counts the failed updates since the last one that was taken.
    """

    num_updates: int
    num_valid_rows: int
    is_failed_B: Tensor
    stats: dict[str, float]
    num_failed_in_a_row: int = 0
    not_finite: tuple[str, ...] = ()

    @staticmethod
    def of(
        outcomes: Sequence[Outcome], num_failed_before: int, knobs: dict[str, float]
    ) -> "StepResult":
        """Return the result of all parts of a batch together.

        Args:
            outcomes: of its parts, in their order; there is at least one.
            num_failed_before: failed updates in a row before the first of them.
            knobs: stats that are the same for all parts.
        """
        applied = [outcome for outcome in outcomes if outcome.is_applied]
        num_failed = num_failed_before
        for outcome in outcomes:
            num_failed = 0 if outcome.is_applied else num_failed + outcome.is_failed
        return StepResult(
            num_updates=len(applied),
            num_valid_rows=sum(outcome.num_valid for outcome in outcomes),
            is_failed_B=_failed_columns(outcomes),
            stats=_means([outcome.stats for outcome in applied or outcomes]) | knobs,
            num_failed_in_a_row=num_failed,
            not_finite=_names_not_finite(outcomes),
        )

    @staticmethod
    def joined(results: Sequence["StepResult"], is_failed_B: Tensor) -> "StepResult":
        """Return the joint result of the members of a team, any of which may be missing.

        Stats are means over the members that were updated, or over all if none was.
        """
        told = [result for result in results if result.applied] or results
        names = dict.fromkeys(name for result in results for name in result.not_finite)
        return StepResult(
            num_updates=max((result.num_updates for result in results), default=0),
            num_valid_rows=sum(result.num_valid_rows for result in results),
            is_failed_B=is_failed_B,
            stats=_means([result.stats for result in told]) if told else {},
            num_failed_in_a_row=max((result.num_failed_in_a_row for result in results), default=0),
            not_finite=tuple(names),
        )

    @property
    def applied(self) -> bool:
        return self.num_updates > 0

    def keep_batch(self, path: Path, batch: Batch) -> str:
        """Write the batch that made updates fail, for a look at it.

        `safetensors.torch.load_file` reads it. The names are those of `Batch`; metadata says what
        was not finite. Returns, in words, where it is, or why it is nowhere.
        """
        found: dict[str, Tensor] = {"is_failed_B": self.is_failed_B}
        for item in fields(batch):
            part = getattr(batch, item.name)
            leaves = {"": part} if isinstance(part, Tensor) else {f"/{k}": part[k] for k in part}
            found |= {f"{item.name}{name}": leaf for name, leaf in leaves.items()}
        whole = {
            name: leaf.to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, leaf in found.items()
        }
        about = {"not_finite": ", ".join(self.not_finite), "stats": str(self.stats)}
        try:
            write_whole(path, save(whole, about))
        except OSError as error:
            return f"the last batch cannot be kept in {path}: {error.strerror}"
        return f"the last batch is kept in {path}"


def _failed_columns(outcomes: Sequence[Outcome]) -> Tensor:
    """[B]: the columns of the parts that failed."""
    is_failed_B = torch.zeros_like(outcomes[0].is_in_B)
    for outcome in outcomes:
        if outcome.is_failed:
            is_failed_B |= outcome.is_in_B
    return is_failed_B


def _names_not_finite(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Name what was not finite: statistics, or else the weights that a step would have given."""
    names: dict[str, None] = {}
    for outcome in outcomes:
        if outcome.is_failed:
            bad = [name for name, value in outcome.stats.items() if not math.isfinite(value)]
            names |= dict.fromkeys(bad or ["weights"])
    return tuple(names)


def _means(stats: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the unweighted mean under each name. A single dict is returned as it is."""
    if len(stats) == 1:
        return stats[0]
    return {name: sum(each[name] for each in stats) / len(stats) for name in stats[0]}
