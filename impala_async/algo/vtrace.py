"""V-trace targets and advantages (IMPALA, arXiv 1802.01561, section 4).

Owns the backward recursion over rows and the treatment of masked rows, which GAE and the
losses share.

Shapes: T rows of a trajectory, S = T + 1 with the bootstrap row, B columns.

A masked row is not a transition: it holds an episode's final observation (or padding). Its
value still bootstraps the row before it, and because nothing accumulates on it, no
correction flows from one episode into the one before.
"""

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# exp(20) is about 5e8: far beyond any useful ratio, and still finite when squared in float32.
LOG_RATIO_LIMIT = 20.0


class Returns(NamedTuple):
    """The regression targets of the critic, and the weights of the policy gradient."""

    targets_TB: Tensor
    advantages_TB: Tensor


class Rows(NamedTuple):
    """Checked rows in one precision, with discounts zero where masked so that nothing carries."""

    rewards_TB: Tensor
    discounts_TB: Tensor
    values_SB: Tensor
    mask_TB: Tensor

    def td_errors(self, next_values_TB: Tensor) -> Tensor:
        """One-step errors, zero on masked rows; a discount of 0 hides even a NaN next value."""
        bootstrap_TB = torch.where(self.discounts_TB > 0, self.discounts_TB * next_values_TB, 0.0)
        errors_TB = self.rewards_TB + bootstrap_TB - self.values_SB[:-1]
        return torch.where(self.mask_TB, errors_TB, 0.0)


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
    """
    for name, bar in (("rho_bar", rho_bar), ("c_bar", c_bar), ("pg_rho_bar", pg_rho_bar)):
        if bar is not None and not bar >= 0:
            raise ValueError(f"{name} must be None or at least 0, got {bar}")
    mask_TB = check_rows(
        values_SB,
        mask_TB,
        log_rhos_TB=log_rhos_TB,
        rewards_TB=rewards_TB,
        discounts_TB=discounts_TB,
    )
    dtype = widest_dtype(log_rhos_TB, rewards_TB, discounts_TB, values_SB)
    rows = make_rows(rewards_TB, discounts_TB, values_SB, mask_TB, dtype)
    ratios_TB = clamped_exp(zero_masked(log_rhos_TB, mask_TB, dtype))

    deltas_TB = clip_above(ratios_TB, rho_bar) * rows.td_errors(rows.values_SB[1:])
    cuts_TB = check_lambda(lambda_) * clip_above(ratios_TB, c_bar)
    targets_TB = rows.values_SB[:-1] + accumulate(deltas_TB, rows.discounts_TB * cuts_TB)
    next_targets_TB = torch.cat([targets_TB[1:], rows.values_SB[-1:]])
    advantages_TB = clip_above(ratios_TB, pg_rho_bar) * rows.td_errors(next_targets_TB)
    return Returns(targets_TB, advantages_TB)


def accumulate(deltas_TB: Tensor, carries_TB: Tensor) -> Tensor:
    """acc_t = delta_t + carry_t acc_{t+1} with acc_T = 0; a carry of 0 stops even a NaN."""
    if deltas_TB.device.type != "cpu":
        return scan(deltas_TB, carries_TB)
    # On small rows numpy's calls cost a tenth of torch's.
    deltas, carries = deltas_TB.numpy(), carries_TB.numpy()
    with np.errstate(all="ignore"):
        accs = _accumulate_rows(deltas, carries, [True] * len(deltas))
        if not np.isfinite(accs).all():
            accs = _accumulate_rows(deltas, carries, carries != 0)
    return torch.from_numpy(accs)


def scan(deltas_TB: Tensor, carries_TB: Tensor) -> Tensor:
    """`accumulate` in log2 T steps over all rows at once, where each step costs a launch.

    After the step with reach k, each row holds the sum over the next 2k rows, and carries what is
    behind them.
    """
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


def _accumulate_rows(
    deltas_TB: NDArray[Any], carries_TB: NDArray[Any], are_open: Iterable[Any]
) -> NDArray[Any]:
    """Row by row from the last; where a row is not open, what follows is not even looked at."""
    accs_TB = np.zeros_like(deltas_TB)
    acc_B = np.zeros(deltas_TB.shape[1:], deltas_TB.dtype)
    rows = zip(deltas_TB, carries_TB, are_open, accs_TB, strict=True)
    for delta_B, carry_B, is_open_B, out_B in reversed(list(rows)):
        np.multiply(carry_B, acc_B, out=out_B, where=is_open_B)
        np.add(out_B, delta_B, out=out_B)
        acc_B = out_B
    return accs_TB


def make_rows(
    rewards_TB: Tensor, discounts_TB: Tensor, values_SB: Tensor, mask_TB: Tensor, dtype: torch.dtype
) -> Rows:
    """Rows ready for arithmetic; the td errors drop masked rewards and values by themselves."""
    return Rows(
        rewards_TB.to(dtype),
        zero_masked(discounts_TB, mask_TB, dtype),
        values_SB.to(dtype),
        mask_TB,
    )


def check_rows(values_SB: Tensor, mask_TB: Tensor | None, **tensors_TB: Tensor) -> Tensor:
    """Refuse shapes that would broadcast into nonsense; return the mask, all True by default."""
    if values_SB.ndim != 2 or values_SB.shape[0] < 1:
        raise ValueError(f"values_SB must be [T+1, B], got {list(values_SB.shape)}")
    want = (values_SB.shape[0] - 1, values_SB.shape[1])
    if mask_TB is None:
        mask_TB = torch.ones(want, dtype=torch.bool, device=values_SB.device)
    for name, tensor_TB in (*tensors_TB.items(), ("mask_TB", mask_TB)):
        if tensor_TB.shape != want:
            raise ValueError(
                f"{name} must be [T, B] = {list(want)} to fit values_SB of "
                f"{list(values_SB.shape)}, got {list(tensor_TB.shape)}"
            )
    return mask_TB.bool()


def check_lambda(lambda_: float) -> float:
    if not 0 <= lambda_ <= 1:
        raise ValueError(f"lambda_ must lie between 0 and 1, got {lambda_}")
    return lambda_


def widest_dtype(*tensors: Tensor) -> torch.dtype:
    """The precision to compute in: never below float32, float64 as soon as one input has it."""
    dtypes = (tensor.dtype for tensor in tensors)
    promote: Callable[[torch.dtype, torch.dtype], torch.dtype] = torch.promote_types
    return reduce(promote, dtypes, torch.float32)


def zero_masked(tensor_TB: Tensor, mask_TB: Tensor, dtype: torch.dtype) -> Tensor:
    """Zero where masked. Selecting first keeps NaN out of the gradient as well as the value."""
    return torch.where(mask_TB, tensor_TB.to(dtype), 0.0)


def clamped_exp(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clip_above(ratios_TB: Tensor, bar: float | None) -> Tensor:
    return ratios_TB if bar is None else ratios_TB.clamp(max=bar)
