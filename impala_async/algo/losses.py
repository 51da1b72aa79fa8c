"""Losses of the learner: IMPALA (arXiv 1802.01561) and APPO, which is IMPACT (arXiv 1912.00167).

Shapes: T rows of a trajectory, S = T + 1 with the bootstrap row, B columns.

Both correct for data that older weights acted for. The returns are constants: no gradient flows
into them, nor through the value of the bootstrap row.
"""

import math

from torch import Tensor

from impala_async.algo.terms import LossTerms, Reduction, ValidRows, clipped_surrogate
from impala_async.algo.vtrace import clamped_exp, vtrace


def impala_loss(
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
    rho_bar: float | None = 1.0,
    c_bar: float | None = 1.0,
    pg_rho_bar: float | None = 1.0,
    lambda_: float = 1.0,
    reduction: Reduction = "mean",
    normalize_advantages: bool = False,
    num_valid: Tensor | float | None = None,
) -> LossTerms:
    """Policy gradient on V-trace advantages, squared value error and entropy bonus.

    "mean" divides by the valid rows, "sum" is the paper's. `num_valid` replaces the count of
    this batch by the one over all ranks, whose losses then sum to the global mean.
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
    returns = vtrace(
        log_rhos_TB=log_probs_TB.detach().to(valid.dtype) - behaviour_log_probs_TB.detach(),
        rewards_TB=rewards_TB,
        discounts_TB=discounts_TB,
        values_SB=values_SB,
        mask_TB=valid.mask_TB,
        rho_bar=rho_bar,
        c_bar=c_bar,
        pg_rho_bar=pg_rho_bar,
        lambda_=lambda_,
    )
    advantages_TB = returns.advantages_TB
    if normalize_advantages:
        advantages_TB = valid.normalize(advantages_TB)
    policy_TB = -valid.take(log_probs_TB) * advantages_TB
    return valid.terms(
        policy_TB, returns.targets_TB, values_SB, entropies_TB, value_cost, entropy_cost
    )


def appo_loss(
    *,
    log_probs_TB: Tensor,
    behaviour_log_probs_TB: Tensor,
    target_log_probs_TB: Tensor,
    entropies_TB: Tensor,
    values_SB: Tensor,
    rewards_TB: Tensor,
    discounts_TB: Tensor,
    mask_TB: Tensor | None = None,
    value_cost: float = 0.5,
    entropy_cost: Tensor | float = 0.01,
    rho_bar: float | None = 1.0,
    c_bar: float | None = 1.0,
    pg_rho_bar: float | None = 1.0,
    lambda_: float = 1.0,
    reduction: Reduction = "mean",
    clip: float = 0.2,
    is_clip: float = 2.0,
    kl_TB: Tensor | None = None,
    kl_coeff: float = 0.0,
    normalize_advantages: bool = False,
    num_valid: Tensor | float | None = None,
) -> LossTerms:
    """Clipped surrogate around a slowly moving target network.

    V-trace corrects from the behaviour to the target network, with the current network's
    values; the surrogate moves the current policy. `kl_TB` is KL(pi_target || pi) per row.
    """
    if kl_TB is None and kl_coeff != 0:
        raise ValueError(f"kl_coeff is {kl_coeff}, so kl_TB is needed")
    valid = ValidRows(
        values_SB,
        mask_TB,
        reduction,
        num_valid,
        log_probs_TB=log_probs_TB,
        behaviour_log_probs_TB=behaviour_log_probs_TB,
        target_log_probs_TB=target_log_probs_TB,
        entropies_TB=entropies_TB,
        rewards_TB=rewards_TB,
        discounts_TB=discounts_TB,
        **({} if kl_TB is None else {"kl_TB": kl_TB}),
    )
    behaviour_TB = valid.take(behaviour_log_probs_TB).detach()
    target_TB = valid.take(target_log_probs_TB).detach()
    returns = vtrace(
        log_rhos_TB=target_TB - behaviour_TB,
        rewards_TB=rewards_TB,
        discounts_TB=discounts_TB,
        values_SB=values_SB,
        mask_TB=valid.mask_TB,
        rho_bar=rho_bar,
        c_bar=c_bar,
        pg_rho_bar=pg_rho_bar,
        lambda_=lambda_,
    )
    ratios_TB = impact_ratios(valid.take(log_probs_TB), behaviour_TB, target_TB, is_clip)
    advantages_TB = returns.advantages_TB
    if normalize_advantages:
        advantages_TB = valid.normalize(advantages_TB)
    policy_TB = clipped_surrogate(ratios_TB, advantages_TB, clip)
    return valid.terms(
        policy_TB,
        returns.targets_TB,
        values_SB,
        entropies_TB,
        value_cost,
        entropy_cost,
        kl_TB,
        kl_coeff,
    )


def impact_ratios(
    log_probs_TB: Tensor, behaviour_TB: Tensor, target_TB: Tensor, is_clip: float
) -> Tensor:
    """clip(mu / pi_target, 0, is_clip) * pi / mu.

    Multiplied as logarithms, so that two extreme factors whose product is ordinary keep their
    product, and its gradient, instead of each running into its own clamp.
    """
    if not is_clip > 0:
        raise ValueError(f"is_clip must be above 0, got {is_clip}")
    log_weights_TB = (behaviour_TB - target_TB).clamp(max=math.log(is_clip))
    return clamped_exp(log_weights_TB + (log_probs_TB - behaviour_TB))
