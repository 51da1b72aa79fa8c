"""One update: from a batch, through the loss, to an optimizer step that is taken or skipped.

Owns the optimizer. Changes the policy's weights in place, and nothing else.

    B columns of a batch, T action rows, S = T+1 observation rows
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from impala_async.algo.losses import LossTerms, impala_loss
from impala_async.algo.schedules import linear
from impala_async.config import AlgorithmSection
from impala_async.policy import Evaluation, Policy
from impala_async.training.optimizer import (
    build_optimizer,
    clip_gradients,
    global_norm,
    set_learning_rate,
)
from impala_async.trajectory import Columns


@dataclass(frozen=True)
class Batch:
    """The columns of a slot as tensors, column by column as they lie there."""

    obs: dict[str, Tensor]
    actions: dict[str, Tensor]
    state: dict[str, Tensor]
    rewards_BT: Tensor
    log_probs_BT: Tensor
    terminated_BT: Tensor
    truncated_BT: Tensor
    mask_BT: Tensor

    @staticmethod
    def over(columns: Columns) -> "Batch":
        """View the columns' memory; nothing is copied."""
        return Batch(
            obs={name: torch.from_numpy(leaf) for name, leaf in columns.obs.items()},
            actions={name: torch.from_numpy(part) for name, part in columns.actions.items()},
            state={name: torch.from_numpy(part) for name, part in columns.state.items()},
            rewards_BT=torch.from_numpy(columns.rewards_CT),
            log_probs_BT=torch.from_numpy(columns.log_probs_CT),
            terminated_BT=torch.from_numpy(columns.terminated_CT),
            truncated_BT=torch.from_numpy(columns.truncated_CT),
            mask_BT=torch.from_numpy(columns.mask_CT),
        )


@dataclass(frozen=True)
class StepResult:
    """What an update did. Not applied: it had no valid row, or its loss was not finite."""

    applied: bool
    num_valid_rows: int
    stats: dict[str, Tensor | float]

    def floats(self) -> dict[str, float]:
        """The stats as numbers; waits for the device where there is one."""
        return {name: float(value) for name, value in self.stats.items()}


class Rows(NamedTuple):
    """What a loss needs of a batch besides the evaluation, in time-major views.

    Masked rows may hold anything, NaN included: a loss selects before it computes.
    """

    behaviour_log_probs_TB: Tensor
    rewards_TB: Tensor
    discounts_TB: Tensor
    mask_TB: Tensor
    num_valid: Tensor


Loss = Callable[[Evaluation, Rows, float], LossTerms]
"""Of an evaluation, rows and the entropy cost now."""


def _impala(section: AlgorithmSection) -> Loss:
    def loss(evaluation: Evaluation, rows: Rows, entropy_cost: float) -> LossTerms:
        return impala_loss(
            log_probs_TB=evaluation.log_probs_TB,
            entropies_TB=evaluation.entropies_TB,
            values_SB=evaluation.values_SB,
            **rows._asdict(),
            value_cost=section.value_cost,
            entropy_cost=entropy_cost,
            rho_bar=section.rho_bar,
            c_bar=section.c_bar,
            pg_rho_bar=section.pg_rho_bar,
            lambda_=section.lambda_,
            reduction=section.reduction,
        )

    return loss


ALGORITHMS: dict[str, Callable[[AlgorithmSection], Loss]] = {"impala": _impala}


class UpdateStep:
    """The policy's weights, one batch further. Batches lie on `device`, as the policy does."""

    def __init__(
        self, policy: Policy, algorithm: AlgorithmSection, device: torch.device | str
    ) -> None:
        self.policy = policy
        self.parameters = tuple(policy.model.parameters())
        self.optimizer = build_optimizer(self.parameters, algorithm)
        self._section = algorithm
        self._device = torch.device(device)
        self._loss = ALGORITHMS[algorithm.name](algorithm)
        horizon = algorithm.schedule_env_steps
        self._lr = linear(algorithm.lr, algorithm.lr_end, horizon)
        self._entropy_cost = linear(algorithm.entropy_cost, algorithm.entropy_cost_end, horizon)

    def run(self, batch: Batch, alive_B: Tensor, env_steps_trained: int) -> StepResult:
        """Train on the batch's columns that are alive.

        An update without a valid row, or whose loss or gradient is not finite, is skipped:
        weights and optimizer then stay as they are, bit for bit.
        """
        lr, entropy_cost = self._lr(env_steps_trained), self._entropy_cost(env_steps_trained)
        rows = self._rows(batch, alive_B)
        evaluation = self.policy.evaluate(batch.obs, batch.actions, batch.mask_BT, batch.state)
        terms = self._loss(evaluation, rows, entropy_cost)
        self.optimizer.zero_grad()
        terms.total.backward()
        norm = global_norm(self.parameters)
        # The one place where the host waits for the device.
        total, norm_now, num_valid = torch.stack(
            (terms.total.detach(), norm, rows.num_valid)
        ).tolist()
        applied = num_valid > 0 and math.isfinite(total) and math.isfinite(norm_now)
        if applied:
            clip_gradients(self.parameters, norm_now, self._section.grad_clip)
            set_learning_rate(self.optimizer, lr)
            self.optimizer.step()
        stats = _stats(terms, evaluation, rows)
        stats |= {
            "loss/total": total,
            "grad/norm": norm_now,
            "algorithm/lr": lr,
            "algorithm/entropy_cost": entropy_cost,
        }
        return StepResult(applied, int(num_valid), stats)

    def _rows(self, batch: Batch, alive_B: Tensor) -> Rows:
        mask_BT = batch.mask_BT & alive_B.to(self._device).unsqueeze(-1)
        # Truncated rows keep gamma: the row after them holds the final observation.
        discounts_BT = torch.full_like(batch.rewards_BT, self._section.gamma)
        discounts_BT.masked_fill_(batch.terminated_BT, 0.0)
        return Rows(
            behaviour_log_probs_TB=batch.log_probs_BT.t(),
            rewards_TB=(batch.rewards_BT * self._section.reward_scale).t(),
            discounts_TB=discounts_BT.t(),
            mask_TB=mask_BT.t(),
            num_valid=mask_BT.sum(dtype=torch.float32),
        )


def _stats(terms: LossTerms, evaluation: Evaluation, rows: Rows) -> dict[str, Tensor | float]:
    entropies_TB = evaluation.entropies_TB.detach()
    entropy = torch.where(rows.mask_TB, entropies_TB, 0.0).sum() / rows.num_valid.clamp(min=1)
    return {
        "loss/policy": terms.policy.detach(),
        "loss/value": terms.value.detach(),
        "loss/entropy": terms.entropy.detach(),
        "policy/entropy": entropy,
    }
