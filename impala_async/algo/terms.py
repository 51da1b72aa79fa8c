"""The parts that returns and losses share: which rows count, and the weighted terms made of them.

Shapes: T rows of a trajectory, S = T + 1 with the bootstrap row, B columns.

A masked row is not a transition: it holds an episode's final observation (or padding). It is
zeroed before any arithmetic touches it, since a `where` after an operation still lets NaN into
the gradient.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Reduction = Literal["mean", "sum"]

# Keeps advantages that are all equal, whose deviation is 0, at 0.
DEVIATION_EPS = 1e-8


class LossTerms(NamedTuple):
    """`policy`, `value` and `entropy` carry their weights; `kl` and `sum_entropy`, which is of all
    valid rows, do not. `total` = policy + value + entropy + kl_coeff * kl. Values regress to
    `targets_TB`, but on masked rows.
    """

    policy: Tensor
    value: Tensor
    entropy: Tensor
    kl: Tensor
    total: Tensor
    sum_entropy: Tensor
    targets_TB: Tensor


class ValidRows:
    """The valid rows of one batch: what is taken from a tensor, and what a sum is divided by.

    Args:
        values_SB: V(x), the bootstrap row's at the end; the shape of all else follows from it.
        mask_TB: False on rows that are no transitions; None: all are.
        reduction: "mean" over valid rows, or "sum".
        num_valid: what "mean" divides by, where these are a part of a larger batch.
    """

    def __init__(
        self,
        values_SB: Tensor,
        mask_TB: Tensor | None,
        reduction: Reduction = "mean",
        num_valid: Tensor | None = None,
    ) -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
        if values_SB.ndim != 2 or not len(values_SB):
            raise ValueError(f"values_SB must be [T+1, B], got {list(values_SB.shape)}")
        self.values_SB = _at_least_float32(values_SB)
        if mask_TB is None:
            mask_TB = torch.ones_like(values_SB[1:], dtype=torch.bool)
        self._shape = torch.Size((len(values_SB) - 1, values_SB.shape[1]))
        self.mask_TB = self.check(mask_TB).bool()
        self._reduction, self._num_valid = reduction, num_valid

    def check(self, tensor_TB: Tensor) -> Tensor:
        """The tensor; ValueError if it would be broadcast."""
        if tensor_TB.shape != self._shape:
            raise ValueError(
                f"tensors must be [T, B] = {list(self._shape)} to fit values_SB of "
                f"{list(self.values_SB.shape)}, got {list(tensor_TB.shape)}"
            )
        return tensor_TB

    def take(self, tensor_TB: Tensor) -> Tensor:
        """Zero where masked, and in float32 at least.

        Taken are leaves, or a sum of leaves, which hands on a gradient of 0 as 0.
        """
        return torch.where(self.mask_TB, _at_least_float32(self.check(tensor_TB)), 0.0)

    def td_errors(self, rewards_TB: Tensor, discounts_TB: Tensor, next_values_TB: Tensor) -> Tensor:
        """One-step errors of the values; a discount of 0 hides even a NaN next value."""
        bootstrap_TB = torch.where(discounts_TB > 0, discounts_TB * next_values_TB, 0.0)
        return self.take(self.check(rewards_TB) + bootstrap_TB - self.values_SB[:-1])

    def normalize(self, advantages_TB: Tensor) -> Tensor:
        """Mean 0 and deviation 1 over these valid rows; 0 elsewhere.

        In float64, in which the mean of equal numbers is that number: what rounding would leave
        of them must not be blown up to a deviation of 1.
        """
        count = self.mask_TB.sum().clamp(min=1)
        wide_TB = self.take(advantages_TB.double())
        gaps_TB = self.take(wide_TB - wide_TB.sum() / count)
        deviation = (gaps_TB.square().sum() / count).sqrt()
        return (gaps_TB / (deviation + DEVIATION_EPS)).to(advantages_TB.dtype)

    def terms(
        self,
        policy_TB: Tensor,
        targets_TB: Tensor,
        entropies_TB: Tensor,
        value_cost: float,
        entropy_cost: float,
        kl_TB: Tensor | None = None,
        kl_coeff: float = 0.0,
    ) -> LossTerms:
        """The loss of these rows, with its parts: `policy_TB` is 0 where masked."""
        divisor: Tensor | float = 1.0
        if self._reduction == "mean":
            count = self.mask_TB.sum() if self._num_valid is None else self._num_valid
            divisor = count.clamp(min=1)
        errors_TB = self.take(targets_TB - self.values_SB[:-1])
        sum_entropy = self.take(entropies_TB).sum()
        policy = policy_TB.sum() / divisor
        value = 0.5 * value_cost * (errors_TB.square().sum() / divisor)
        entropy = -entropy_cost * (sum_entropy / divisor)
        kl = policy.new_zeros(()) if kl_TB is None else self.take(kl_TB).sum() / divisor
        total = policy + value + entropy
        # A KL may be infinite, and 0 times that would not be 0.
        total = total + kl_coeff * kl if kl_coeff else total
        return LossTerms(policy, value, entropy, kl, total, sum_entropy, targets_TB)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)
