"""V-trace targets and advantages (IMPALA, arXiv 1802.01561, section 4).

Shapes: T rows of a trajectory, S = T + 1 with the bootstrap row, B columns.

The value of a masked row still bootstraps the row before it, and because nothing accumulates on
it, no correction flows from one episode into the one before.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from impala_async.algo.terms import ValidRows

# exp(20) is about 5e8: far beyond any useful ratio, and still finite when squared in float32.
LOG_RATIO_LIMIT = 20.0


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


def check_lambda(lambda_: float) -> float:
    if not 0 <= lambda_ <= 1:
        raise ValueError(f"lambda_ must lie between 0 and 1, got {lambda_}")
    return lambda_


def clamped_exp(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
