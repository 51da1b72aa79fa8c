"""Losses that take the data as nearly their own: PPO (arXiv 1707.06347) and A2C (arXiv 1602.01783).

Shapes: T rows of a trajectory, S = T + 1 with the bootstrap row, B columns.

Returns are computed anew with the values of now, and are constants, as in the other losses.
"""

from typing import Literal

import torch
from torch import Tensor

from impala_async.algo.gae import gae
from impala_async.algo.terms import LossTerms, Reduction, ValidRows, clipped_surrogate
from impala_async.algo.vtrace import Returns, clamped_exp, make_rows, vtrace

ReturnsKind = Literal["gae", "vtrace"]


def ppo_loss(
    *,
    log_probs_TB: Tensor,
    behaviour_log_probs_TB: Tensor,
    entropies_TB: Tensor,
    values_SB: Tensor,
    rewards_TB: Tensor,
    discounts_TB: Tensor,
    mask_TB: Tensor | None = None,
    value_cost: float = 0.5,
    entropy_cost: Tensor | float = 0.01,
    clip: float = 0.2,
    returns: ReturnsKind = "gae",
    rho_bar: float | None = 1.0,
    c_bar: float | None = 1.0,
    lambda_: float = 0.95,
    reduction: Reduction = "mean",
    normalize_advantages: bool = True,
    num_valid: Tensor | float | None = None,
) -> LossTerms:
    """The surrogate of the ratio to what acted, clipped around 1; squared value error; entropy.

    The bars are V-trace's: with returns of GAE they do nothing.
    """
    valid = ValidRows(
        values_SB,
        mask_TB,
        reduction,
        num_valid,
        log_probs_TB=log_probs_TB,
        behaviour_log_probs_TB=behaviour_log_probs_TB,
        entropies_TB=entropies_TB,
        rewards_TB=rewards_TB,
        discounts_TB=discounts_TB,
    )
    log_ratios_TB = valid.take(log_probs_TB) - valid.take(behaviour_log_probs_TB).detach()
    targets_TB, advantages_TB = ppo_returns(
        log_rhos_TB=log_ratios_TB,
        rewards_TB=rewards_TB,
        discounts_TB=discounts_TB,
        values_SB=values_SB,
        mask_TB=valid.mask_TB,
        kind=returns,
        rho_bar=rho_bar,
        c_bar=c_bar,
        lambda_=lambda_,
    )
    if normalize_advantages:
        advantages_TB = valid.normalize(advantages_TB)
    policy_TB = clipped_surrogate(clamped_exp(log_ratios_TB), advantages_TB, clip)
    return valid.terms(policy_TB, targets_TB, values_SB, entropies_TB, value_cost, entropy_cost)


@torch.no_grad()
def ppo_returns(
    *,
    log_rhos_TB: Tensor,
    rewards_TB: Tensor,
    discounts_TB: Tensor,
    values_SB: Tensor,
    mask_TB: Tensor,
    kind: ReturnsKind,
    rho_bar: float | None,
    c_bar: float | None,
    lambda_: float,
) -> Returns:
    """GAE's, or V-trace's with advantages that carry no ratio: the surrogate has it already."""
    if kind == "gae":
        return gae(
            rewards_TB=rewards_TB,
            discounts_TB=discounts_TB,
            values_SB=values_SB,
            mask_TB=mask_TB,
            lambda_=lambda_,
        )
    targets_TB = vtrace(
        log_rhos_TB=log_rhos_TB,
        rewards_TB=rewards_TB,
        discounts_TB=discounts_TB,
        values_SB=values_SB,
        mask_TB=mask_TB,
        rho_bar=rho_bar,
        c_bar=c_bar,
        lambda_=lambda_,
    ).targets_TB
    rows = make_rows(rewards_TB, discounts_TB, values_SB, mask_TB, targets_TB.dtype)
    next_targets_TB = torch.cat([targets_TB[1:], rows.values_SB[-1:]])
    return Returns(targets_TB, rows.td_errors(next_targets_TB))


def a2c_loss(
    *,
    log_probs_TB: Tensor,
    entropies_TB: Tensor,
    values_SB: Tensor,
    rewards_TB: Tensor,
    discounts_TB: Tensor,
    mask_TB: Tensor | None = None,
    value_cost: float = 0.5,
    entropy_cost: Tensor | float = 0.01,
    lambda_: float = 0.95,
    reduction: Reduction = "mean",
    normalize_advantages: bool = True,
    num_valid: Tensor | float | None = None,
) -> LossTerms:
    """Policy gradient on GAE's advantages, as if the weights of now had acted."""
    valid = ValidRows(
        values_SB,
        mask_TB,
        reduction,
        num_valid,
        log_probs_TB=log_probs_TB,
        entropies_TB=entropies_TB,
        rewards_TB=rewards_TB,
        discounts_TB=discounts_TB,
    )
    targets_TB, advantages_TB = gae(
        rewards_TB=rewards_TB,
        discounts_TB=discounts_TB,
        values_SB=values_SB,
        mask_TB=valid.mask_TB,
        lambda_=lambda_,
    )
    if normalize_advantages:
        advantages_TB = valid.normalize(advantages_TB)
    policy_TB = -valid.take(log_probs_TB) * advantages_TB
    return valid.terms(policy_TB, targets_TB, values_SB, entropies_TB, value_cost, entropy_cost)
