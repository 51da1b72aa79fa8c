"""Generalised advantage estimation (arXiv 1506.02438), masked like V-trace.

T rows of a trajectory, S = T + 1 with the bootstrap row, B columns
"""

import torch
from torch import Tensor

from impala_async.algo.vtrace import Returns, ValidRows, accumulate, check_lambda


@torch.no_grad()
def gae(
    *,
    rewards_TB: Tensor,
    discounts_TB: Tensor,
    values_SB: Tensor,
    mask_TB: Tensor | None = None,
    lambda_: float = 0.95,
) -> Returns:
    """On-policy advantages, and targets = advantages + values. On a masked row they are 0 and V.

    `vtrace` explains the arguments.
    """
    rows = ValidRows(values_SB, mask_TB)
    discounts_TB = rows.take(discounts_TB)
    deltas_TB = rows.td_errors(rewards_TB, discounts_TB, rows.values_SB[1:])
    advantages_TB = accumulate(deltas_TB, check_lambda(lambda_) * discounts_TB)
    return Returns(rows.values_SB[:-1] + advantages_TB, advantages_TB)
