"""The gradients of a loss for hidden layers and an action of one part, written out for numpy: of
IMPALA's, and of PPO's.

On a CPU an update of a small network is hundreds of small operations, of which torch needs longer
to dispatch each than it computes; and each gives the interpreter's lock away and takes it back,
against the event loop. This has a quarter of them. It comes to what torch does but for rounding.

    B columns, T action rows, S = T+1 observation rows, N = B * S, A choices, D numbers,
    P outputs of the policy's head: A or D
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from impala_async.algo.distributions import HALF_LOG_2PI, LOG_STD_RANGE
from impala_async.algo.vtrace import DEVIATION_EPS, LOG_RATIO_LIMIT, accumulate
from impala_async.config.algorithm import AlgorithmSection
from impala_async.models.torso import MLPTorso
from impala_async.policy import Policy
from impala_async.training.batch import Batch
from impala_async.training.gradients import Coefficients, Gradients
from impala_async.training.layers import Array, Net, row_sums
from impala_async.training.ranks import Ranks
from impala_async.training.rewards import sums_of

LOWEST = np.finfo(np.float32).min
NAMES = ("loss/policy", "loss/value", "loss/entropy", "policy/entropy")
NAMES_OF_PPO = ("policy/kl", "policy/clip_fraction")


def is_plain(policy: Policy, section: AlgorithmSection) -> bool:
    """Whether `ByHand` covers these, and is faster: numpy has one thread, so only where torch has
    one too."""
    model = policy.model
    # A torso of the user's own may freeze layers, or use them in any other way.
    is_mlp = policy.is_torso_ours and type(model.policy_torso) is MLPTorso and model.core is None
    is_float32 = policy.device.type == "cpu" and model.precision == torch.float32
    is_covered = _acting(policy) is not None and section.name in ("ppo", "impala")
    is_covered = is_covered and section.intrinsic_reward is None
    return is_mlp and is_float32 and is_covered and torch.get_num_threads() == 1


@dataclass(eq=False)
class ByHand:
    """Computes gradients as `TorchGradients` does, whose `transitions` it has for its inputs."""

    policy: Policy
    section: AlgorithmSection
    transitions_of: Callable[[Batch, Coefficients], dict[str, Any]]
    ranks: Ranks

    def __post_init__(self) -> None:
        acting = _acting(self.policy)
        assert acting is not None, "is_plain comes first"
        self._net, self._acting = Net(self.policy.model), acting
        self._parameters = tuple(self.policy.model.parameters())
        self._is_ppo = self.section.name == "ppo"

    @torch.no_grad()
    @np.errstate(all="ignore")  # what is not finite is seen in the loss
    def __call__(self, batch: Batch, of: Coefficients, *, with_sums: bool) -> Gradients:
        outputs_NP, values_N1 = self._net.forward(batch)
        values_BS = values_N1.reshape(len(batch.mask_BT), -1)
        valid_BS = np.zeros(values_BS.shape, np.bool_)
        valid_BT = valid_BS[:, :-1]
        valid_BT[:] = batch.mask_BT.numpy()
        log_probs_BT, entropies_N = self._acting.look(outputs_NP, batch, valid_BS)

        inputs = self.transitions_of(batch, of)
        log_mu_BT = inputs["behaviour_log_probs_TB"].numpy().T
        log_ratios_BT = np.where(valid_BT, log_probs_BT - log_mu_BT, np.float32(0))
        bounded_BT = _bounded(log_ratios_BT)
        ratios_BT = np.exp(bounded_BT)
        if batch.known:
            targets_BT, advantages_BT = (
                batch.known[name].numpy() for name in ("targets_BT", "advantages_BT")
            )
        else:
            return_ratios_BT = ratios_BT
            if batch.before:
                lags_BT = batch.before["log_probs_BT"].numpy() - log_mu_BT
                return_ratios_BT = np.exp(_bounded(np.where(valid_BT, lags_BT, np.float32(0))))
            targets_BT, advantages_BT = self._returns(return_ratios_BT, values_BS, valid_BT, inputs)
        if self.section.has_normal_advantages:
            advantages_BT = _normal(advantages_BT, valid_BT, self.ranks)
        num_valid = float(inputs["num_valid"])
        scale = 1.0 / max(num_valid, 1.0) if self.section.reduction == "mean" else 1.0
        weights_BS, errors_BS = np.zeros((2, *values_BS.shape), np.float32)
        # Both are 0 where masked.
        np.multiply(advantages_BT, np.float32(scale), out=weights_BS[:, :-1])
        errors_BS[:, :-1] = np.where(valid_BT, targets_BT - values_BS[:, :-1], 0)
        names: tuple[str, ...] = NAMES
        stats: list[float] = []
        if self._is_ppo:
            names = NAMES + NAMES_OF_PPO
            # There is no gradient through a bound of the ratio.
            is_free_BT = bounded_BT == log_ratios_BT
            policy, num_beyond = self._clip(weights_BS[:, :-1], ratios_BT, is_free_BT)
            kl = float((ratios_BT - 1 - log_ratios_BT).sum())
            stats = [number / max(num_valid, 1.0) for number in (kl, num_beyond)]
        else:
            policy = -float(np.vdot(log_probs_BT, weights_BS[:, :-1]))

        cost = of.entropy_cost * scale
        gradient_NP = self._acting.gradient(weights_BS, np.float32(cost))
        value_scale = self.section.value_cost * scale
        self._net.backward(gradient_NP, errors_BS.reshape(-1, 1) * np.float32(-value_scale))

        sum_entropy = float(entropies_N[valid_BS.reshape(-1)].sum())
        value = 0.5 * value_scale * float(np.vdot(errors_BS, errors_BS))
        entropy = -cost * sum_entropy
        norm = math.nan if self.ranks.are_many else self._norm()  # else: of the sum of all
        numbers = [policy + value + entropy, norm, num_valid, policy, value, entropy]
        numbers += [sum_entropy / max(num_valid, 1.0), *stats]
        if with_sums:
            targets_TB = torch.from_numpy(np.ascontiguousarray(targets_BT)).t()
            numbers += sums_of(targets_TB, inputs["mask_TB"]).tolist()
        return Gradients(torch.tensor(numbers, dtype=torch.float64), names)

    def _clip(
        self, weights_BT: Array, ratios_BT: Array, is_free_BT: NDArray[np.bool_]
    ) -> tuple[float, float]:
        """Make weighted advantages the weights of PPO's gradient; return its policy loss, and how
        many ratios are beyond the clip. All are 0 where masked."""
        clip = self.section.clip
        surrogates_BT = ratios_BT * weights_BT
        clipped_BT = np.minimum(np.maximum(ratios_BT, 1 - clip), 1 + clip) * weights_BT
        loss = -float(np.minimum(surrogates_BT, clipped_BT).sum())
        beyond_BT = np.abs(ratios_BT - 1) > clip
        # There is none where the clip holds, either.
        is_free_BT &= ~(beyond_BT & (clipped_BT <= surrogates_BT))
        weights_BT[:] = np.where(is_free_BT, surrogates_BT, np.float32(0))
        return loss, float(np.count_nonzero(beyond_BT))

    def _returns(
        self,
        ratios_BT: Array,
        values_BS: Array,
        valid_BT: NDArray[np.bool_],
        inputs: dict[str, Any],
    ) -> tuple[Array, Array]:
        """Targets and advantages, as `vtrace` and `gae` have them: on so few rows their calls cost
        more."""
        section, zero = self.section, np.float32(0)
        decay = np.float32(section.trace_decay)
        rewards_BT = inputs["rewards_TB"].numpy().T
        discounts_BT = np.where(valid_BT, inputs["discounts_TB"].numpy().T, zero)

        def td_errors(next_BT: Array) -> Array:
            bootstrap_BT = np.where(discounts_BT > 0, discounts_BT * next_BT, zero)
            return np.where(valid_BT, rewards_BT + bootstrap_BT - values_BS[:, :-1], zero)

        errors_BT = td_errors(values_BS[:, 1:])
        if section.returns_kind == "gae":
            advantages_BT = _accumulate(errors_BT, discounts_BT * decay)
            return values_BS[:, :-1] + advantages_BT, advantages_BT
        rhos_BT, cs_BT = (_at_most(ratios_BT, bar) for bar in (section.rho_bar, section.c_bar))
        targets_BS = values_BS.copy()
        targets_BS[:, :-1] += _accumulate(rhos_BT * errors_BT, discounts_BT * (decay * cs_BT))
        advantages_BT = td_errors(targets_BS[:, 1:])
        if not self._is_ppo:
            advantages_BT *= _at_most(ratios_BT, section.pg_rho_bar)
        return targets_BS[:, :-1], advantages_BT

    def _norm(self) -> float:
        """As `global_norm` has it, in a third of its time: small updates would notice."""
        gradients = (p.grad.numpy() for p in self._parameters if p.grad is not None)
        return math.sqrt(sum(float(np.vdot(each, each)) for each in gradients))


def _accumulate(deltas_BT: Array, carries_BT: Array) -> Array:
    accs: Array = accumulate(*(torch.from_numpy(x).t() for x in (deltas_BT, carries_BT))).numpy().T
    return accs


def _bounded(log_ratios_BT: Array) -> Array:
    return np.minimum(np.maximum(log_ratios_BT, -LOG_RATIO_LIMIT), LOG_RATIO_LIMIT)


def _at_most(ratios_BT: Array, bar: float | None) -> Array:
    return ratios_BT if bar is None else np.minimum(ratios_BT, np.float32(bar))


def _normal(advantages_BT: Array, valid_BT: NDArray[np.bool_], ranks: Ranks) -> Array:
    """As `ValidRows.normalize` makes them."""
    wide_BT = advantages_BT.astype(np.float64)
    count, total = ranks.totals(int(np.count_nonzero(valid_BT)), float(wide_BT.sum()))
    count = count or 1
    gaps_BT = np.where(valid_BT, wide_BT - total / count, 0.0)
    (spread,) = ranks.totals(float(np.vdot(gaps_BT, gaps_BT)))
    deviation = math.sqrt(spread / count)
    normal: Array = (gaps_BT / (deviation + DEVIATION_EPS)).astype(np.float32)
    return normal


class _Acting(Protocol):
    """The distribution of an action, from the outputs of the policy's head."""

    def look(
        self, outputs_NP: Array, batch: Batch, valid_BS: NDArray[np.bool_]
    ) -> tuple[Array, Array]:
        """Log-probabilities `[B, T]` of the actions, 0 where masked, and entropies `[N]`."""

    def gradient(self, weights_BS: Array, cost: np.float32) -> Array:
        """That of the outputs, of -w log p - cost H over the valid rows of the last look. Weights
        are 0 elsewhere."""


def _acting(policy: Policy) -> _Acting | None:
    part, head = policy.only_part, policy.model.policy_head
    if part is not None and part.kind == "discrete":
        return _Choice(part.name) if part.is_one_choice else None
    if part is not None and part.kind == "continuous" and len(head.log_stds):
        return _Numbers(part.name, head.log_stds[0])
    return None


class _Choice:
    """One of A, by their logits."""

    def __init__(self, name: str) -> None:
        self._name = name

    def look(
        self, outputs_NP: Array, batch: Batch, valid_BS: NDArray[np.bool_]
    ) -> tuple[Array, Array]:
        log_probs_NA = outputs_NP - outputs_NP.max(1, keepdims=True)
        probs_NA = np.exp(log_probs_NA)
        sums_N = row_sums(probs_NA)
        log_probs_NA -= np.log(sums_N)[:, None]
        probs_NA /= sums_N[:, None]
        # Where the choices lie among all.
        first_BS = np.arange(0, outputs_NP.size, outputs_NP.shape[1]).reshape(valid_BS.shape)
        chosen_BT = first_BS[:, :-1] + batch.actions[self._name].numpy()
        chosen = log_probs_NA.reshape(-1)[chosen_BT]
        # Or the 0 * -inf of an impossible choice would be NaN. NaN itself passes through.
        np.maximum(log_probs_NA, LOWEST, out=log_probs_NA)
        entropies_N = -row_sums(probs_NA * log_probs_NA)
        self._seen = probs_NA, log_probs_NA, entropies_N, chosen_BT, valid_BS
        return np.where(valid_BS[:, :-1], chosen, np.float32(0)), entropies_N

    def gradient(self, weights_BS: Array, cost: np.float32) -> Array:
        probs_NA, log_probs_NA, entropies_N, chosen_BT, valid_BS = self._seen
        # H = -sum p log p.
        gradient_NA: Array = probs_NA * (
            weights_BS.reshape(-1, 1) + cost * (log_probs_NA + entropies_N[:, None])
        )
        gradient_NA.reshape(-1)[chosen_BT] -= weights_BS[:, :-1]
        gradient_NA[~valid_BS.reshape(-1)] = 0
        return gradient_NA


class _Numbers:
    """D independent numbers, by their means; the deviations are a parameter of their own."""

    def __init__(self, name: str, log_std: torch.Tensor) -> None:
        self._name, self._log_std = name, log_std

    def look(
        self, outputs_NP: Array, batch: Batch, valid_BS: NDArray[np.bool_]
    ) -> tuple[Array, Array]:
        valid_BT = valid_BS[:, :-1]
        log_std_D = self._log_std.detach().numpy().clip(*LOG_STD_RANGE)
        actions_BTD = batch.actions[self._name].numpy().reshape(*valid_BT.shape, -1)
        means_BTD = outputs_NP.reshape(*valid_BS.shape, -1)[:, :-1]
        per_std_D = np.exp(-log_std_D)
        distances_BTD = (actions_BTD - means_BTD) * per_std_D
        # Nobody looks at a masked row.
        distances_BTD[~valid_BT] = 0
        entropy = (log_std_D + np.float32(0.5 + HALF_LOG_2PI)).sum()
        log_probs_BT = -0.5 * np.square(distances_BTD).sum(-1) - (entropy - 0.5 * len(log_std_D))
        self._seen = distances_BTD, per_std_D, valid_BS
        entropies_N = np.full(valid_BS.size, entropy, np.float32)
        return np.where(valid_BT, log_probs_BT, np.float32(0)), entropies_N

    def gradient(self, weights_BS: Array, cost: np.float32) -> Array:
        distances_BTD, per_std_D, valid_BS = self._seen
        weights_BT1 = weights_BS[:, :-1, None]
        weighted_BTD = weights_BT1 * distances_BTD
        slopes_BTD = weights_BT1 - weighted_BTD * distances_BTD
        slopes_BTD -= cost * valid_BS[:, :-1, None]
        raw_D, (low, high) = self._log_std.detach().numpy(), LOG_STD_RANGE
        # As distributions.py bounds them, row by row: a step goes against the gradient.
        slopes_BTD[(raw_D < low) & (slopes_BTD > 0) | (raw_D > high) & (slopes_BTD < 0)] = 0
        self._log_std.grad = torch.from_numpy(slopes_BTD.sum((0, 1)).reshape(raw_D.shape))
        gradient_BSD = np.zeros((*valid_BS.shape, len(per_std_D)), np.float32)
        np.multiply(weighted_BTD, -per_std_D, out=gradient_BSD[:, :-1])
        return gradient_BSD.reshape(valid_BS.size, -1)
