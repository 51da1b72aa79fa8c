"""The gradients of a loss for hidden layers and one choice, written out for numpy: of IMPALA's,
and of PPO's with V-trace.

On a CPU an update of a small network is hundreds of small operations, of which torch needs longer
to dispatch each than it computes; and each gives the interpreter's lock away and takes it back,
against the event loop. This has a quarter of them. It comes to what torch does but for rounding.

    B columns, T action rows, S = T+1 observation rows, N = B * S, A choices, F features, H hidden
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from impala_async.algo.vtrace import LOG_RATIO_LIMIT, ValidRows, vtrace
from impala_async.config.algorithm import AlgorithmSection
from impala_async.models.actor_critic import ActorCritic
from impala_async.models.torso import MLPTorso, joined
from impala_async.policy import Policy
from impala_async.training.batch import Batch
from impala_async.training.graphs import Coefficients, Gradients
from impala_async.training.optimizer import global_norm
from impala_async.training.rewards import sums_of

Array = NDArray[np.float32]
LOWEST = np.finfo(np.float32).min
NAMES = ("loss/policy", "loss/value", "loss/entropy", "policy/entropy")
NAMES_OF_PPO = ("policy/kl", "policy/clip_fraction")


def is_plain(policy: Policy, section: AlgorithmSection) -> bool:
    """Whether it holds for these, and pays: numpy has one thread here."""
    model = policy.model
    # A torso of the user's own may freeze layers, or use them in any other way.
    is_mlp = policy.is_torso_ours and type(model.policy_torso) is MLPTorso and model.core is None
    is_float32 = policy.device.type == "cpu" and model.precision == torch.float32
    is_ppo = section.name == "ppo" and section.returns_kind == "vtrace"
    is_covered = policy.only_choice is not None and (is_ppo or section.name == "impala")
    return is_mlp and is_float32 and is_covered and torch.get_num_threads() == 1


@dataclass(eq=False)
class ByHand:
    """Computes gradients as the update step does, whose `transitions_of` are the loss's inputs."""

    policy: Policy
    section: AlgorithmSection
    transitions_of: Callable[[Batch, Coefficients], dict[str, Any]]

    def __post_init__(self) -> None:
        self._net, self._choice = _Net(self.policy.model), self.policy.only_choice or ""
        self._parameters = tuple(self.policy.model.parameters())
        self._is_ppo = self.section.name == "ppo"

    @torch.no_grad()
    @np.errstate(all="ignore")  # what is not finite is seen in the loss
    def __call__(self, batch: Batch, of: Coefficients, *, with_sums: bool) -> Gradients:
        logits_NA, values_N1 = self._net.forward(batch)
        values_BS = values_N1.reshape(len(batch.mask_BT), -1)
        valid_BS = np.zeros(values_BS.shape, np.bool_)
        valid_BT = valid_BS[:, :-1]
        valid_BT[:] = batch.mask_BT.numpy()
        log_probs_NA = logits_NA - logits_NA.max(1, keepdims=True)
        probs_NA = np.exp(log_probs_NA)
        sums_N = _row_sums(probs_NA)
        log_probs_NA -= np.log(sums_N)[:, None]
        probs_NA /= sums_N[:, None]
        # Where the choices lie among all.
        first_BS = np.arange(0, logits_NA.size, logits_NA.shape[1]).reshape(values_BS.shape)
        chosen_BT = first_BS[:, :-1] + batch.actions[self._choice].numpy()
        chosen_log_probs_BT = np.where(valid_BT, log_probs_NA.reshape(-1)[chosen_BT], np.float32(0))
        # Or the 0 * -inf of an impossible choice would be NaN. NaN itself passes through.
        np.maximum(log_probs_NA, LOWEST, out=log_probs_NA)
        entropies_N = -_row_sums(probs_NA * log_probs_NA)

        inputs = self.transitions_of(batch, of)
        log_mu_BT = inputs["behaviour_log_probs_TB"].numpy().T
        log_ratios_BT = np.where(valid_BT, chosen_log_probs_BT - log_mu_BT, np.float32(0))
        targets_TB, advantages_TB = self._returns(log_ratios_BT, values_BS, inputs)
        num_valid = float(inputs["num_valid"])
        scale = 1.0 / max(num_valid, 1.0) if self.section.reduction == "mean" else 1.0
        weights_BS, errors_BS = np.zeros((2, *values_BS.shape), np.float32)
        # Both are 0 where masked.
        np.multiply(advantages_TB.numpy().T, np.float32(scale), out=weights_BS[:, :-1])
        errors_BS[:, :-1] = np.where(valid_BT, targets_TB.numpy().T - values_BS[:, :-1], 0)
        names: tuple[str, ...] = NAMES
        stats: list[float] = []
        if self._is_ppo:
            names = NAMES + NAMES_OF_PPO
            policy, *stats = self._clip(weights_BS[:, :-1], log_ratios_BT, num_valid)
        else:
            policy = -float(np.vdot(chosen_log_probs_BT, weights_BS[:, :-1]))

        cost = of.entropy_cost * scale
        # d(-w log p_a - cost H) / d logits; H = -sum p log p.
        gradient_NA = probs_NA * (
            weights_BS.reshape(-1, 1) + np.float32(cost) * (log_probs_NA + entropies_N[:, None])
        )
        gradient_NA.reshape(-1)[chosen_BT] -= weights_BS[:, :-1]
        gradient_NA[~valid_BS.reshape(-1)] = 0
        value_scale = self.section.value_cost * scale
        self._net.backward(gradient_NA, errors_BS.reshape(-1, 1) * np.float32(-value_scale))

        sum_entropy = float(entropies_N[valid_BS.reshape(-1)].sum())
        value = 0.5 * value_scale * float(np.vdot(errors_BS, errors_BS))
        entropy = -cost * sum_entropy
        norm = float(global_norm(self._parameters))
        numbers = [policy + value + entropy, norm, num_valid, policy, value, entropy]
        numbers += [sum_entropy / max(num_valid, 1.0), *stats]
        if with_sums:
            numbers += sums_of(targets_TB, inputs["mask_TB"]).tolist()
        return Gradients(torch.tensor(numbers, dtype=torch.float64), names)

    def _clip(
        self, weights_BT: Array, log_ratios_BT: Array, num_valid: float
    ) -> tuple[float, float, float]:
        """Make weighted advantages the weights of PPO's gradient; return its policy loss, and the
        KL and the share of ratios beyond the clip. All are 0 where masked."""
        clip, bounded_BT = self.section.clip, log_ratios_BT.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ratios_BT = np.exp(bounded_BT)
        surrogates_BT = ratios_BT * weights_BT
        clipped_BT = ratios_BT.clip(1 - clip, 1 + clip) * weights_BT
        loss = -float(np.minimum(surrogates_BT, clipped_BT).sum())
        gaps_BT = ratios_BT - 1
        beyond_BT = np.abs(gaps_BT) > clip
        # There is no gradient where the clip holds, and none through a bound of the ratio.
        is_held_BT = (beyond_BT & (clipped_BT <= surrogates_BT)) | (bounded_BT != log_ratios_BT)
        weights_BT[:] = np.where(is_held_BT, np.float32(0), surrogates_BT)
        divisor = max(num_valid, 1.0)
        return loss, float((gaps_BT - log_ratios_BT).sum()) / divisor, beyond_BT.sum() / divisor

    def _returns(
        self, log_ratios_BT: Array, values_BS: Array, inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        section, values_SB = self.section, torch.from_numpy(values_BS).t()
        mask_TB = inputs["mask_TB"]
        targets_TB, advantages_TB = vtrace(
            log_rhos_TB=torch.from_numpy(log_ratios_BT).t(),
            rewards_TB=inputs["rewards_TB"],
            discounts_TB=inputs["discounts_TB"],
            values_SB=values_SB,
            mask_TB=mask_TB,
            rho_bar=section.rho_bar,
            c_bar=section.c_bar,
            pg_rho_bar=section.pg_rho_bar,
            lambda_=section.trace_decay,
            has_pg_ratio=not self._is_ppo,
        )
        if section.has_normal_advantages:
            advantages_TB = ValidRows(values_SB, mask_TB).normalize(advantages_TB)
        return targets_TB, advantages_TB


def _row_sums(numbers_NA: Array) -> Array:
    # A product with ones adds columns up in a fraction of the time of a sum.
    return numbers_NA @ np.ones(numbers_NA.shape[1], np.float32)


class _Linear:
    """A linear layer over its own memory, and its activation, whose gradient follows from what
    comes out."""

    def __init__(self, layer: nn.Linear, activate: object = None) -> None:
        self._layer, self._activate = layer, activate
        self._weight, self._bias = (x.detach().numpy() for x in (layer.weight, layer.bias))

    def forward(self, inputs_NF: Array) -> Array:
        outputs_NH: Array = inputs_NF @ self._weight.T
        outputs_NH += self._bias
        if self._activate is torch.tanh_:
            np.tanh(outputs_NH, out=outputs_NH)
        elif self._activate is torch.relu_:
            np.maximum(outputs_NH, 0.0, out=outputs_NH)
        self._inputs_NF, self._outputs_NH = inputs_NF, outputs_NH
        return outputs_NH

    def backward(self, gradient_NH: Array) -> None:
        """Set the gradients of the layer; the gradient of its outputs may change."""
        if self._activate is torch.tanh_:
            slopes_NH = np.square(self._outputs_NH)
            gradient_NH *= np.subtract(1.0, slopes_NH, out=slopes_NH)
        elif self._activate is torch.relu_:
            gradient_NH *= self._outputs_NH > 0
        sums_H = np.ones(len(gradient_NH), np.float32) @ gradient_NH
        self._layer.bias.grad = torch.from_numpy(sums_H)
        self._layer.weight.grad = torch.from_numpy(gradient_NH.T @ self._inputs_NF)
        self._gradient_NH = gradient_NH

    def gradient_of_inputs(self) -> Array:
        """That of the last gradient."""
        if len(self._weight) == 1:
            # Here a matrix product takes four times as long.
            return cast(Array, self._gradient_NH * self._weight)
        return cast(Array, self._gradient_NH @ self._weight)


class _Net:
    """The layers of an actor-critic; a shared torso stands once."""

    def __init__(self, model: ActorCritic) -> None:
        self._model = model
        torsos = [cast(MLPTorso, t) for t in (model.policy_torso, model.value_torso) if t]
        self._torsos = [
            [_Linear(cast(nn.Linear, layer), torso.activate) for layer in torso.layers]
            for torso in torsos
        ]
        self._heads = _Linear(model.policy_head), _Linear(model.value_head)
        self._leaves = torsos[0].leaves

    def forward(self, batch: Batch) -> tuple[Array, Array]:
        """Logits `[N, A]` and values `[N, 1]`."""
        obs = {name: leaf.flatten(0, 1) for name, leaf in batch.rows_of_obs().items()}
        features_NF = joined(self._leaves, self._model.normal(obs)).numpy()
        found = []
        for torso in self._torsos:
            hidden_NH = features_NF
            for layer in torso:
                hidden_NH = layer.forward(hidden_NH)
            found.append(hidden_NH)
        policy, value = self._heads
        return policy.forward(found[0]), value.forward(found[-1])

    def backward(self, policy_NA: Array, value_N1: Array) -> None:
        """Set the gradients of all parameters from those of logits and values."""
        below = []
        for head, gradient in zip(self._heads, (policy_NA, value_N1), strict=True):
            head.backward(gradient)
            below.append(head.gradient_of_inputs())
        if len(self._torsos) == 1:
            below = [below[0] + below[1]]
        for torso, gradient_NH in zip(self._torsos, below, strict=True):
            for number, layer in reversed([*enumerate(torso)]):
                layer.backward(gradient_NH)
                if number:
                    gradient_NH = layer.gradient_of_inputs()
