"""The losses of the algorithms.

    IMPALA  arXiv 1802.01561            PPO  arXiv 1707.06347
    APPO    arXiv 1912.00167 (IMPACT)   A2C  arXiv 1602.01783, by `ppo_loss`

Returns are computed anew on every pass, with the values of now, unless they are `known`. They are
constants: no gradient flows into them, nor through the value of the bootstrap row. Arguments that
all losses have:

    log_probs_TB            log pi(a|x) of the actions taken, of the weights of now, with gradient
    behaviour_log_probs_TB  log mu(a|x), the actor's own number from when it acted
    entropies_TB, values_SB of the weights of now, with gradient
    rewards_TB, mask_TB     a mask is False on rows that are no transitions; None: on none
    discounts_TB            gamma, and 0 where the episode terminated
    value_cost, entropy_cost  weights of half the squared value error and of the entropy bonus
    reduction               "mean" over valid rows, or "sum" as in the IMPALA paper
    normalize_advantages    give those of valid rows mean 0 and deviation 1; where others have more
                            rows of a batch, this is a function that adds sums of theirs to ours
    rho_bar, c_bar, pg_rho_bar, lambda_  V-trace's, as `vtrace` explains them
    num_valid               what "mean" divides by instead of the valid rows of this batch: a part
                            of a larger one gives the count of all, and the losses sum to its mean
    known                   returns that were computed before, where rows lie in any order; on
                            masked rows advantages are 0

    T rows of a trajectory, S = T + 1 with the bootstrap row, B columns
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from impala_async.algo.gae import gae
from impala_async.algo.vtrace import Normalize, Returns, ValidRows, clamped_exp, vtrace

Reduction = Literal["mean", "sum"]


class LossTerms(NamedTuple):
    """`policy`, `value` and `entropy` carry their weights; `kl` and `sum_entropy`, which is of all
    valid rows, do not. `total` = policy + value + entropy + kl_coeff * kl. Values regress to
    `targets_TB`, but on masked rows."""

    policy: Tensor
    value: Tensor
    entropy: Tensor
    kl: Tensor
    total: Tensor
    sum_entropy: Tensor
    targets_TB: Tensor


def loss_terms(
    rows: ValidRows,
    policy_TB: Tensor,
    targets_TB: Tensor,
    entropies_TB: Tensor,
    value_cost: float,
    entropy_cost: float,
    reduction: Reduction = "mean",
    num_valid: Tensor | None = None,
    kl_TB: Tensor | None = None,
    kl_coeff: float = 0.0,
) -> LossTerms:
    """The loss of these rows, with its parts: `policy_TB` is 0 where masked."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    divisor: Tensor | float = 1.0
    if reduction == "mean":
        divisor = (rows.mask_TB.sum() if num_valid is None else num_valid).clamp(min=1)
    errors_TB = rows.take(targets_TB - rows.values_SB[:-1])
    sum_entropy = rows.take(entropies_TB).sum()
    policy = policy_TB.sum() / divisor
    value = 0.5 * value_cost * (errors_TB.square().sum() / divisor)
    entropy = -entropy_cost * (sum_entropy / divisor)
    kl = policy.new_zeros(()) if kl_TB is None else rows.take(kl_TB).sum() / divisor
    total = policy + value + entropy
    # A KL may be infinite, and 0 times that would not be 0. A tensor is not looked at: it is not 0.
    total = total + kl_coeff * kl if isinstance(kl_coeff, Tensor) or kl_coeff else total
    return LossTerms(policy, value, entropy, kl, total, sum_entropy, targets_TB)


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
    entropy_cost: float = 0.01,
    rho_bar: float | None = 1.0,
    c_bar: float | None = 1.0,
    pg_rho_bar: float | None = 1.0,
    lambda_: float = 1.0,
    reduction: Reduction = "mean",
    normalize_advantages: Normalize = False,
    num_valid: Tensor | None = None,
    known: Returns | None = None,
) -> LossTerms:
    """Policy gradient on V-trace advantages, squared value error and entropy bonus."""
    rows = ValidRows(values_SB, mask_TB)
    log_probs_TB = rows.take(log_probs_TB)
    targets_TB, advantages_TB = known or vtrace(
        log_rhos_TB=log_probs_TB.detach() - rows.check(behaviour_log_probs_TB),
        rewards_TB=rewards_TB,
        discounts_TB=discounts_TB,
        values_SB=values_SB,
        mask_TB=mask_TB,
        rho_bar=rho_bar,
        c_bar=c_bar,
        pg_rho_bar=pg_rho_bar,
        lambda_=lambda_,
    )
    if normalize_advantages:
        advantages_TB = rows.normalize(advantages_TB, normalize_advantages)
    policy_TB = -log_probs_TB * advantages_TB
    return loss_terms(
        rows, policy_TB, targets_TB, entropies_TB, value_cost, entropy_cost, reduction, num_valid
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
    entropy_cost: float = 0.01,
    rho_bar: float | None = 1.0,
    c_bar: float | None = 1.0,
    pg_rho_bar: float | None = 1.0,
    lambda_: float = 1.0,
    reduction: Reduction = "mean",
    clip: float = 0.2,
    is_clip: float = 2.0,
    kl_TB: Tensor | None = None,
    kl_coeff: float = 0.0,
    normalize_advantages: Normalize = False,
    num_valid: Tensor | None = None,
    known: Returns | None = None,
) -> LossTerms:
    """Clipped surrogate around a slowly moving target network, to which V-trace corrects.

    Args:
        target_log_probs_TB: log pi_target(a|x), of the target network.
        clip: epsilon, how far from 1 the surrogate follows the ratio.
        is_clip: rho, the bar on mu / pi_target in the ratio.
        kl_TB: KL(pi_target || pi) of each row, with gradient.
        kl_coeff: its weight; where it is 0, no KL is needed.
    """
    if kl_TB is None and kl_coeff != 0:
        raise ValueError(f"kl_coeff is {kl_coeff}, so kl_TB is needed")
    rows = ValidRows(values_SB, mask_TB)
    behaviour_TB = rows.take(behaviour_log_probs_TB).detach()
    target_TB = rows.take(target_log_probs_TB).detach()
    targets_TB, advantages_TB = known or vtrace(
        log_rhos_TB=target_TB - behaviour_TB,
        rewards_TB=rewards_TB,
        discounts_TB=discounts_TB,
        values_SB=values_SB,
        mask_TB=mask_TB,
        rho_bar=rho_bar,
        c_bar=c_bar,
        pg_rho_bar=pg_rho_bar,
        lambda_=lambda_,
    )
    ratios_TB = impact_ratios(rows.take(log_probs_TB), behaviour_TB, target_TB, is_clip)
    if normalize_advantages:
        advantages_TB = rows.normalize(advantages_TB, normalize_advantages)
    policy_TB = clipped_surrogate(ratios_TB, advantages_TB, clip)
    costs = value_cost, entropy_cost
    return loss_terms(
        rows, policy_TB, targets_TB, entropies_TB, *costs, reduction, num_valid, kl_TB, kl_coeff
    )


def impact_ratios(
    log_probs_TB: Tensor, behaviour_TB: Tensor, target_TB: Tensor, is_clip: float
) -> Tensor:
    """clip(mu / pi_target, 0, is_clip) * pi / mu."""
    # As logarithms: two extreme factors whose product is ordinary keep it, and its gradient.
    log_weights_TB = (behaviour_TB - target_TB).clamp(max=math.log(is_clip))
    return clamped_exp(log_weights_TB + (log_probs_TB - behaviour_TB))


def clipped_surrogate(ratios_TB: Tensor, advantages_TB: Tensor, clip: float) -> Tensor:
    """-min(ratio A, clip(ratio, 1 - clip, 1 + clip) A) (PPO, arXiv 1707.06347, eq. 7)."""
    if not clip >= 0:
        raise ValueError(f"clip must be at least 0, got {clip}")
    clipped_TB = ratios_TB.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratios_TB * advantages_TB, clipped_TB * advantages_TB)


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
    entropy_cost: float = 0.01,
    clip: float | None = 0.2,
    returns: Literal["gae", "vtrace"] = "gae",
    before_log_probs_TB: Tensor | None = None,
    rho_bar: float | None = 1.0,
    c_bar: float | None = 1.0,
    lambda_: float = 0.95,
    reduction: Reduction = "mean",
    normalize_advantages: Normalize = True,
    num_valid: Tensor | None = None,
    known: Returns | None = None,
) -> LossTerms:
    """The surrogate of the ratio to what acted, clipped around 1; squared value error; entropy.

    Args:
        clip: epsilon, how far from 1 the surrogate follows the ratio; None, as A2C has it: plain
            policy gradient, as if the weights of now had acted.
        returns: "gae", or "vtrace" for data that older weights acted for.
        before_log_probs_TB: log pi(a|x) of the policy from before the batch, to which V-trace then
            corrects; else to that of now, which takes what was chance in the batch for merit.
    """
    rows = ValidRows(values_SB, mask_TB)
    log_probs_TB = rows.take(log_probs_TB)
    behaviour_TB = rows.take(behaviour_log_probs_TB).detach()
    log_ratios_TB = log_probs_TB - behaviour_TB
    batch: dict[str, Any] = {
        "rewards_TB": rewards_TB,
        "discounts_TB": discounts_TB,
        "values_SB": values_SB,
        "mask_TB": mask_TB,
        "lambda_": lambda_,
    }
    if known is None and returns == "gae":
        known = gae(**batch)
    elif known is None:
        log_rhos_TB = log_ratios_TB
        if before_log_probs_TB is not None:
            log_rhos_TB = rows.take(before_log_probs_TB).detach() - behaviour_TB
        batch |= {"log_rhos_TB": log_rhos_TB, "rho_bar": rho_bar, "c_bar": c_bar}
        known = vtrace(**batch, has_pg_ratio=False)
    targets_TB, advantages_TB = known
    if normalize_advantages:
        advantages_TB = rows.normalize(advantages_TB, normalize_advantages)
    if clip is None:
        policy_TB = -log_probs_TB * advantages_TB
    else:
        policy_TB = clipped_surrogate(clamped_exp(log_ratios_TB), advantages_TB, clip)
    return loss_terms(
        rows, policy_TB, targets_TB, entropies_TB, value_cost, entropy_cost, reduction, num_valid
    )
