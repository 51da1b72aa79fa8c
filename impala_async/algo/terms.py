"""The common parts of all losses: which rows count, and the weighted terms made of them.

Shapes: T rows of a trajectory, S = T + 1 with the bootstrap row, B columns.

Every input is zeroed on masked rows before any arithmetic touches it, since a `where` after
an operation still lets NaN into the gradient.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from impala_async.algo.vtrace import check_rows, widest_dtype, zero_masked

Reduction = Literal["mean", "sum"]

# Keeps advantages that are all equal, whose deviation is 0, at 0.
DEVIATION_EPS = 1e-8


class LossTerms(NamedTuple):
    """`policy`, `value` and `entropy` carry their weights; `kl` does not, so that it can be
    compared with a target. `total` = policy + value + entropy + kl_coeff * kl. `sum_entropy` is of
    all valid rows, without a weight. `targets_TB` is what values regress to; on masked rows nothing
    does.
    """

    policy: Tensor
    value: Tensor
    entropy: Tensor
    kl: Tensor
    total: Tensor
    sum_entropy: Tensor
    targets_TB: Tensor


class ValidRows:
    """The valid rows of one batch: what is taken from a tensor, and what a sum is divided by."""

    def __init__(
        self,
        values_SB: Tensor,
        mask_TB: Tensor | None,
        reduction: Reduction,
        num_valid: Tensor | float | None,
        **tensors_TB: Tensor,
    ) -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
        self.mask_TB = check_rows(values_SB, mask_TB, **tensors_TB)
        self.dtype = widest_dtype(values_SB, *tensors_TB.values())
        self._divisor: Tensor | float = 1.0
        if reduction == "mean":
            count = self.mask_TB.sum() if num_valid is None else num_valid
            self._divisor = (
                count.to(self.dtype).clamp(min=1) if isinstance(count, Tensor) else max(count, 1.0)
            )

    def take(self, tensor_TB: Tensor) -> Tensor:
        return zero_masked(tensor_TB, self.mask_TB, self.dtype)

    def reduce(self, losses_TB: Tensor) -> Tensor:
        return losses_TB.sum() / self._divisor

    def differences(self, numbers_TB: Tensor, others_TB: Tensor) -> Tensor:
        """One minus the other. Selected once, behind a sum, which hands on a gradient of 0 as 0."""
        return torch.where(self.mask_TB, numbers_TB - others_TB, 0.0)

    def normalize(self, advantages_TB: Tensor) -> Tensor:
        """Mean 0 and deviation 1 over these valid rows; 0 elsewhere.

        In float64, in which the mean of equal numbers is that number: what rounding would leave
        of them must not be blown up to a deviation of 1.
        """
        count = self.mask_TB.sum().clamp(min=1)
        wide_TB = zero_masked(advantages_TB, self.mask_TB, torch.float64)
        gaps_TB = torch.where(self.mask_TB, wide_TB - wide_TB.sum() / count, 0.0)
        deviation = (gaps_TB.square().sum() / count).sqrt()
        return (gaps_TB / (deviation + DEVIATION_EPS)).to(self.dtype)

    def terms(
        self,
        policy_TB: Tensor,
        targets_TB: Tensor,
        values_SB: Tensor,
        entropies_TB: Tensor,
        value_cost: float,
        entropy_cost: Tensor | float,
        kl_TB: Tensor | None = None,
        kl_coeff: float = 0.0,
    ) -> LossTerms:
        errors_TB = self.differences(targets_TB, values_SB[:-1])
        sum_entropy = self.take(entropies_TB).sum()
        policy = self.reduce(policy_TB)
        value = 0.5 * value_cost * self.reduce(errors_TB.square())
        entropy = -entropy_cost * (sum_entropy / self._divisor)
        kl = policy.new_zeros(()) if kl_TB is None else self.reduce(self.take(kl_TB))
        total = policy + value + entropy
        # A KL may be infinite, and 0 times that would not be 0.
        total = total + kl_coeff * kl if kl_coeff else total
        return LossTerms(policy, value, entropy, kl, total, sum_entropy, targets_TB)


def clipped_surrogate(ratios_TB: Tensor, advantages_TB: Tensor, clip: float) -> Tensor:
    """-min(ratio A, clip(ratio, 1 - clip, 1 + clip) A) (PPO, arXiv 1707.06347, eq. 7)."""
    if not clip >= 0:
        raise ValueError(f"clip must be at least 0, got {clip}")
    clipped_TB = ratios_TB.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratios_TB * advantages_TB, clipped_TB * advantages_TB)
