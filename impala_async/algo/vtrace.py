"""V-trace targets and advantages (IMPALA, arXiv 1802.01561, section 4), and the rows that count.

    T rows of a trajectory, S = T + 1 with the bootstrap row, B columns

The value of a masked row still bootstraps the row before it, and because nothing accumulates on
it, no correction flows from one episode into the one before.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# exp(20) is about 5e8: far beyond any useful ratio, and still finite when squared in float32.
LOG_RATIO_LIMIT = 20.0
# Keeps advantages that are all equal, whose deviation is 0, at 0.
DEVIATION_EPS = 1e-8


Normalize = bool | Callable[[Tensor], Tensor]
"""Whether to normalise; a function adds sums of others, who have more rows, to ours."""


class ValidRows:
    """The rows of a batch that are transitions: what is taken of a tensor, and what is not.

    A masked row holds an episode's final observation, or padding. It is zeroed before any
    arithmetic touches it, since a `where` after an operation still lets NaN into the gradient.
    `vtrace` explains the arguments; the shape of all else follows from that of the values.
    """

    def __init__(self, values_SB: Tensor, mask_TB: Tensor | None) -> None:
        if values_SB.ndim != 2 or not len(values_SB):
            raise ValueError(f"values_SB must be [T+1, B], got {list(values_SB.shape)}")
        self.values_SB = _at_least_float32(values_SB)
        if mask_TB is None:
            mask_TB = torch.ones_like(values_SB[1:], dtype=torch.bool)
        self.mask_TB = self.check(mask_TB).bool()

    def check(self, tensor_TB: Tensor) -> Tensor:
        """The tensor; ValueError if it would be broadcast."""
        num_rows, num_columns = self.values_SB.shape
        if tensor_TB.shape != (num_rows - 1, num_columns):
            raise ValueError(
                f"tensors must be [T, B] = {[num_rows - 1, num_columns]} to fit values_SB of "
                f"{[num_rows, num_columns]}, got {list(tensor_TB.shape)}"
            )
        return tensor_TB

    def take(self, tensor_TB: Tensor) -> Tensor:
        """Zero where masked, and in float32 at least."""
        # Leaves, or a sum of them, hand a gradient of 0 on as 0.
        return torch.where(self.mask_TB, _at_least_float32(self.check(tensor_TB)), 0.0)

    def td_errors(self, rewards_TB: Tensor, discounts_TB: Tensor, next_values_TB: Tensor) -> Tensor:
        """One-step errors of the values; a discount of 0 hides even a NaN next value."""
        bootstrap_TB = torch.where(discounts_TB > 0, discounts_TB * next_values_TB, 0.0)
        return self.take(self.check(rewards_TB) + bootstrap_TB - self.values_SB[:-1])

    def normalize(self, advantages_TB: Tensor, how: Normalize = True) -> Tensor:
        """Mean 0 and deviation 1 over these rows, and those of others; 0 elsewhere."""

        def sum_up(shares: Tensor) -> Tensor:
            return how(shares) if callable(how) else shares

        # In float64, or what rounding leaves of equal numbers would get a deviation of 1.
        wide_TB = self.take(advantages_TB.double())
        count, total = sum_up(torch.stack((self.mask_TB.sum().double(), wide_TB.sum())))
        count = count.clamp(min=1)
        gaps_TB = self.take(wide_TB - total / count)
        deviation = (sum_up(gaps_TB.square().sum()) / count).sqrt()
        normal_TB: Tensor = gaps_TB / (deviation + DEVIATION_EPS)
        return normal_TB.to(advantages_TB.dtype)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


class Returns(NamedTuple):
    """The regression targets of the critic, and the weights of the policy gradient."""

    targets_TB: Tensor
    advantages_TB: Tensor


@torch.no_grad()
def vtrace(
    *,
    log_rhos_TB: Tensor,
    rewards_TB: Tensor,
    discounts_TB: Tensor,
    values_SB: Tensor,
    mask_TB: Tensor | None = None,
    rho_bar: float | None = 1.0,
    c_bar: float | None = 1.0,
    pg_rho_bar: float | None = 1.0,
    lambda_: float = 1.0,
    has_pg_ratio: bool = True,
) -> Returns:
    """Off-policy corrected targets and advantages. On a masked row they are the value and 0.

    Args:
        log_rhos_TB: log pi(a|x) - log mu(a|x), of the policy that learns and the one that acted.
        rewards_TB: r_t.
        discounts_TB: gamma, and 0 where the episode terminated.
        values_SB: V(x), the bootstrap row's at the end.
        mask_TB: False on rows that are no transitions; None: all are.
        rho_bar: clips pi / mu where it weighs a TD error, so it decides which policy's values the
            targets are; None clips nothing, here and below.
        c_bar: clips pi / mu where it carries later TD errors back: how far, and with how much
            variance, but not to which values.
        pg_rho_bar: clips pi / mu where it weighs the advantages, in the policy gradient.
        lambda_: times the clipped c, as in GAE: 1 carries back all, 0 nothing.
        has_pg_ratio: False leaves pi / mu out of the advantages, for a surrogate that has it.
    """
    bars = [math.inf if bar is None else bar for bar in (rho_bar, c_bar, pg_rho_bar)]
    if not all(bar >= 0 for bar in bars):
        raise ValueError(f"rho_bar, c_bar and pg_rho_bar must be None or at least 0, got {bars}")
    rows = ValidRows(values_SB, mask_TB)
    discounts_TB = rows.take(discounts_TB)
    ratios_TB = clamped_exp(rows.take(log_rhos_TB))
    rhos_TB, cs_TB, pg_rhos_TB = (ratios_TB.clamp(max=bar) for bar in bars)

    errors_TB = rows.td_errors(rewards_TB, discounts_TB, rows.values_SB[1:])
    carries_TB = discounts_TB * (check_lambda(lambda_) * cs_TB)
    targets_TB = rows.values_SB[:-1] + accumulate(rhos_TB * errors_TB, carries_TB)
    next_targets_TB = torch.cat([targets_TB[1:], rows.values_SB[-1:]])
    advantages_TB = rows.td_errors(rewards_TB, discounts_TB, next_targets_TB)
    return Returns(targets_TB, pg_rhos_TB * advantages_TB if has_pg_ratio else advantages_TB)


def accumulate(deltas_TB: Tensor, carries_TB: Tensor) -> Tensor:
    """acc_t = delta_t + carry_t acc_{t+1} with acc_T = 0; a carry of 0 stops even a NaN."""
    if deltas_TB.device.type == "cpu":
        # On small rows numpy's calls cost a tenth of torch's.
        deltas, carries = deltas_TB.numpy(), carries_TB.numpy()
        accs = np.empty_like(deltas)
        acc_B = np.zeros(deltas.shape[1:], deltas.dtype)
        with np.errstate(all="ignore"):
            for row in reversed(range(len(deltas))):
                np.multiply(carries[row], acc_B, out=accs[row])
                acc_B = np.add(accs[row], deltas[row], out=accs[row])
        if np.isfinite(accs).all():
            return torch.from_numpy(accs)
    return scan(deltas_TB, carries_TB)


def scan(deltas_TB: Tensor, carries_TB: Tensor) -> Tensor:
    """`accumulate` in log2 T steps over all rows at once, where each step costs a launch."""
    # After the step with reach k, a row holds the sum over the next 2k, and carries what follows.
    reach, num_rows = 1, len(deltas_TB)
    while reach < num_rows:
        near_TB, is_open_TB = carries_TB[:-reach], carries_TB[:-reach] != 0
        sums_TB = torch.addcmul(deltas_TB[:-reach], near_TB, deltas_TB[reach:])
        sums_TB = torch.where(is_open_TB, sums_TB, deltas_TB[:-reach])
        deltas_TB = torch.cat([sums_TB, deltas_TB[-reach:]])
        both_TB = torch.where(is_open_TB, near_TB * carries_TB[reach:], 0.0)
        carries_TB = torch.cat([both_TB, carries_TB[-reach:]])
        reach *= 2
    return deltas_TB


def check_lambda(lambda_: float) -> float:
    if not 0 <= lambda_ <= 1:
        raise ValueError(f"lambda_ must lie between 0 and 1, got {lambda_}")
    return lambda_


def clamped_exp(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
