"""From a batch, by the loss, to the gradients of all weights, as torch computes them.
Nothing is changed but the gradients that lie with the parameters.

    B columns of a batch or of a part of it, T action rows
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from impala_async.algo.vtrace import Returns
from impala_async.config.algorithm import AlgorithmSection
from impala_async.policy import Policy
from impala_async.training.algorithms import Algorithm, Target, View
from impala_async.training.batch import Batch
from impala_async.training.intrinsic import IntrinsicReward
from impala_async.training.optimizer import global_norm
from impala_async.training.rewards import clip_rewards, sums_of


class Coefficients(NamedTuple):
    """The numbers of a loss that may change between updates. In a graph they are tensors."""

    entropy_cost: float
    reward_factor: float
    kl_coeff: float
    num_valid: float | None = None
    """The valid rows of all ranks; None where there is one, which counts its own."""


class Gradients(NamedTuple):
    """They lie with the parameters; these are the numbers that come with them."""

    numbers: Tensor
    """Loss, norm of the gradient, valid rows, and what `names` says, on their device."""
    names: tuple[str, ...]


class ComputeGradients(Protocol):
    """From the loss of a batch; `with_sums` adds the sums of return targets to the numbers."""

    def __call__(self, batch: Batch, of: Coefficients, *, with_sums: bool) -> Gradients: ...


class TorchGradients:
    """Computes the gradients of `parameters`: of an algorithm's loss, and of a reward of the
    user's own that learns beside it. A target network evaluates the rows as well."""

    def __init__(
        self,
        policy: Policy,
        section: AlgorithmSection,
        algorithm: Algorithm,
        parameters: tuple[nn.Parameter, ...],
        *,
        target: Target | None,
        intrinsic: IntrinsicReward | None,
    ) -> None:
        self._policy, self._section, self._algorithm = policy, section, algorithm
        self._parameters, self._target, self._intrinsic = parameters, target, intrinsic
        # As tensors: made of numbers, they would be made anew in every update.
        self._gamma = torch.tensor(section.gamma, device=policy.device)
        self._end = torch.zeros_like(self._gamma)

    def __call__(self, batch: Batch, of: Coefficients, *, with_sums: bool) -> Gradients:
        view = self.view(batch, of)
        terms = self._algorithm.loss(view, of.entropy_cost)
        own, total = view.intrinsic, terms.total
        if own is not None:
            total = total + own.loss
        with torch.no_grad():
            stats = {
                "loss/policy": terms.policy.detach(),
                "loss/value": terms.value.detach(),
                "loss/entropy": terms.entropy.detach(),
                "policy/entropy": terms.sum_entropy.detach() / view.num_valid.clamp(min=1),
                **self._algorithm.stats(view),
            }
            if own is not None:
                stats["loss/intrinsic"] = own.loss.detach()
                stats["reward/intrinsic"] = view.mean(own.rewards_BT.t())
        # As an optimizer does it, without what that tells a profiler.
        for parameter in self._parameters:
            parameter.grad = None
        total.backward()
        norm = global_norm(self._parameters)
        numbers = [total.detach(), norm, view.num_valid, *stats.values()]
        if with_sums:
            sums = sums_of(terms.targets_TB, view.mask_TB)
            numbers = [number.double() for number in numbers] + list(sums)
        return Gradients(torch.stack(numbers), tuple(stats))

    def view(self, batch: Batch, of: Coefficients) -> View:
        """The batch as losses see it: with what the weights of now make of it."""
        rows = batch.rows_of_obs()
        inputs = (rows, batch.actions, batch.mask_BT, batch.state)
        target = None
        if self._target is not None:
            with torch.no_grad():
                target = self._policy.evaluate(*inputs, self._target.model)
        evaluation = self._policy.evaluate(*inputs)
        transitions, own = self.transitions(batch, of), None
        if self._intrinsic is not None:
            own = self._intrinsic(rows, batch)
            rewards_TB = transitions["rewards_TB"]
            transitions["rewards_TB"] = rewards_TB + own.rewards_BT.t() * of.reward_factor
        known, before_BT = None, batch.before.get("log_probs_BT")
        if batch.known:
            known = Returns(batch.known["targets_BT"].t(), batch.known["advantages_BT"].t())
        return View(
            evaluation,
            **transitions,
            target=target,
            kl_coeff=of.kl_coeff,
            before_log_probs_TB=None if before_BT is None else before_BT.t(),
            intrinsic=own,
            known=known,
        )

    def transitions(self, batch: Batch, of: Coefficients) -> dict[str, Tensor]:
        """The inputs of a loss that are as actors sent them, whatever the weights."""
        # Truncated rows keep gamma: the row after them holds the final observation.
        discounts_BT = torch.where(batch.terminated_BT, self._end, self._gamma)
        rewards_BT = clip_rewards(batch.rewards_BT, self._section.reward_clip)
        return {
            "behaviour_log_probs_TB": batch.log_probs_BT.t(),
            "rewards_TB": (rewards_BT * of.reward_factor).t(),
            "discounts_TB": discounts_BT.t(),
            "mask_TB": batch.mask_BT.t(),
            "num_valid": _count(batch, of),
        }


def _count(batch: Batch, of: Coefficients) -> Tensor:
    """The valid rows by which sums become means: those of all ranks."""
    if of.num_valid is None:
        return batch.mask_BT.sum(dtype=torch.float32)
    return torch.as_tensor(of.num_valid, dtype=torch.float32, device=batch.mask_BT.device)
