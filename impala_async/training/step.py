"""One update: from a batch, through the loss, to an optimizer step that is taken or skipped.

Owns the optimizer and all that learning remembers besides the weights: the target network, the
scale of returns, and how many updates there were. Changes the policy's weights and its statistics
of observations in place, and nothing else.

    B columns of a batch, T action rows, S = T+1 observation rows, N rows of any kind
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from impala_async.algo.schedules import linear
from impala_async.algo.terms import LossTerms
from impala_async.config.algorithm import AlgorithmSection
from impala_async.policy import Policy
from impala_async.training.algorithms import View, is_own, make_algorithm
from impala_async.training.batch import (
    GOOD_LOSS,
    GOOD_NORM,
    Batch,
    Part,
    find_culprits,
    living_mask,
    part_with,
    parts_of,
)
from impala_async.training.optimizer import (
    build_optimizer,
    can_skip,
    clip_gradients,
    clip_unseen,
    flatten_optimizer,
    global_norm,
    norm_limit,
    restore_optimizer,
    set_learning_rate,
    step_unless,
    take_step,
)
from impala_async.training.rewards import ReturnScale, clip_rewards, scale_of, sums_of
from impala_async.training.state import TrainingState, check_alike, copies_of, entry
from impala_async.training.target import Target


@dataclass(frozen=True)
class StepResult:
    """The result of the updates with a batch; `stats` are means over them.

    `num_updates` counts the updates taken. An update without a valid row is not taken, nor is one
    that fails because its loss, gradient or weights are not finite: `is_failed_B` says which
    columns were in failed updates, `not_finite` what was not finite, and `num_failed_in_a_row`
    counts the failed updates since the last one that was taken.
    """

    num_updates: int
    is_failed_B: Tensor
    stats: dict[str, float]
    num_failed_in_a_row: int = 0
    not_finite: tuple[str, ...] = ()

    @property
    def applied(self) -> bool:
        return self.num_updates > 0


class _Outcome(NamedTuple):
    """The result of a part, which is neither taken nor failed if it has no valid row."""

    is_in_B: Tensor
    is_applied: bool
    is_failed: bool
    stats: dict[str, float]
    target_sums: list[float]
    """Those of its return targets, if they were asked for."""


class _Pass(NamedTuple):
    """The values that all parts of a batch have in common."""

    batch: Batch
    alive_B: Tensor
    is_first: bool
    lr: float
    entropy_cost: float
    scale: float


class UpdateStep:
    """The policy's weights, one batch further. Batches lie on `device`, as the policy does."""

    def __init__(
        self,
        policy: Policy,
        algorithm: AlgorithmSection,
        device: torch.device | str,
        *,
        seed: int = 0,
    ) -> None:
        self.policy = policy
        self.parameters = tuple(policy.model.parameters())
        self.optimizer = build_optimizer(self.parameters, algorithm)
        self._algorithm = make_algorithm(algorithm)
        self.target = Target(policy, algorithm) if self._algorithm.has_target else None
        self.return_scale = ReturnScale() if algorithm.normalize_returns else None
        self._section = algorithm
        self._seed = seed
        self.num_updates = 0
        self._num_failed_in_a_row = 0
        self._device = torch.device(device)
        self._norm_limit = norm_limit(algorithm.grad_clip)
        # On a GPU the host looks at an update when all of it is launched.
        self.is_decided_there = self._device.type == "cuda" and can_skip(self.optimizer)
        # As tensors: made of numbers, they would be made anew in every update.
        self._gamma = torch.tensor(algorithm.gamma, device=self._device)
        self._end = torch.zeros_like(self._gamma)
        horizon = algorithm.schedule_env_steps
        self._lr = linear(algorithm.lr, algorithm.lr_end, horizon)
        self._entropy_cost = linear(algorithm.entropy_cost, algorithm.entropy_cost_end, horizon)

    def prepare(self, batch: Batch) -> None:
        """Try an algorithm of the user's own, by an update of a batch without a valid row.

        That changes nothing, nor does what a network of the user's own draws in it.
        """
        if is_own(self._section):
            devices = [self._device] if self._device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                alive_B = torch.ones(len(batch.mask_BT), dtype=torch.bool)
                self.run(batch, alive_B, 0, is_first_pass=False)

    def run(
        self, batch: Batch, alive_B: Tensor, env_steps_trained: int, *, is_first_pass: bool = True
    ) -> StepResult:
        """Make the updates with a batch.

        An update without a valid row, or whose loss, gradient or weights are not finite, is
        skipped: weights, optimizer and all else then stay as they are, bit for bit.

        Args:
            batch: on the device of the policy.
            alive_B: the columns to train on, a tensor on the CPU.
            env_steps_trained: where the schedules of learning rate and entropy cost are.
            is_first_pass: statistics of returns and observations take in a batch once.
        """
        this = _Pass(
            batch,
            alive_B,
            is_first_pass,
            self._lr(env_steps_trained),
            self._entropy_cost(env_steps_trained),
            self._scale(batch, alive_B),
        )
        # By the updates taken, so that one that is skipped leaves no trace here either.
        seeds = self._seed, self.num_updates
        parts = parts_of(batch, alive_B, self._section.num_minibatches, seeds)
        outcomes = [outcome for part in parts for outcome in self._learn_from(part, this)]
        return self._conclude(outcomes, this)

    def capture(self) -> TrainingState:
        """Copy its state, on the thread that trains, for another thread to write."""
        optimizer, options = flatten_optimizer(self.optimizer)
        tensors = {"model": self.policy.named_tensors(), "optimizer": optimizer}
        algorithm: dict[str, Any] = {"num_updates": self.num_updates}
        if self.target is not None:
            tensors["target"] = self.target.tensors()
            algorithm["target"] = self.target.state()
        if self.return_scale is not None:
            algorithm["return_scale"] = self.return_scale.state()
        return TrainingState(
            {group: copies_of(members) for group, members in tensors.items()},
            {"optimizer": options, "algorithm": algorithm},
        )

    def restore(self, state: TrainingState) -> None:
        """Put a captured state into a fresh step; raises CheckpointError if it does not fit."""
        model, optimizer = (entry(state.tensors, name, dict) for name in ("model", "optimizer"))
        algorithm = entry(state.state, "algorithm", dict)
        check_alike(model, self.policy.named_tensors())
        self.policy.load_tensors(model)
        restore_optimizer(self.optimizer, optimizer, entry(state.state, "optimizer", dict))
        self.num_updates = int(entry(algorithm, "num_updates", float))
        if self.target is not None:
            target = entry(state.tensors, "target", dict)
            check_alike(target, self.target.tensors())
            self.target.restore(target, entry(algorithm, "target", dict))
        if self.return_scale is not None:
            self.return_scale.restore(entry(algorithm, "return_scale", dict))

    def _learn_from(self, part: Part, this: _Pass) -> list[_Outcome]:
        """Return the outcome of a part, or two.

        If something was not finite, the part is tried again without the columns at fault.
        """
        outcome = self._update(part, this)
        if not outcome.is_failed:
            return [outcome]
        found_N = find_culprits(
            part.is_in_B.nonzero().flatten(),
            lambda tried_N: self._is_good(part_with(this.batch, tried_N), this),
        )
        is_found_B = torch.zeros_like(part.is_in_B).index_fill(0, found_N, True)
        good_N = (part.is_in_B & ~is_found_B).nonzero().flatten()
        if not len(good_N):
            return [outcome]
        again = self._update(part_with(this.batch, good_N), this)
        return [outcome._replace(is_in_B=is_found_B, is_failed=len(found_N) > 0), again]

    def _is_good(self, part: Part, this: _Pass) -> bool:
        """Whether its loss and gradient stay finite beside those of others as good."""
        terms, _ = self._backward(self._view(part.batch, part.mask_BT, this.scale), this)
        norm = float(global_norm(self.parameters))
        return abs(float(terms.total.detach())) < GOOD_LOSS and norm < min(
            GOOD_NORM, self._norm_limit
        )

    def _update(self, part: Part, this: _Pass) -> _Outcome:
        """A step, if loss and gradient are finite and there is a valid row."""
        set_learning_rate(self.optimizer, this.lr)
        names, numbers = self._launch(part, this)
        # The one place where the host waits for the device.
        total, norm, num_valid, *more = numbers.tolist()
        stats = dict(zip(names, more, strict=False))
        is_applied = num_valid > 0 and math.isfinite(total) and norm < self._norm_limit
        if is_applied and not self.is_decided_there:
            clip_gradients(self.parameters, norm, self._section.grad_clip)
            take_step(self.optimizer)
        if is_applied and self.target is not None:
            self.target.note_update(self.policy, stats["policy/kl"])
        stats |= {"loss/total": total, "grad/norm": norm}
        is_failed = num_valid > 0 and not is_applied
        return _Outcome(part.is_in_B, is_applied, is_failed, stats, more[len(names) :])

    def _launch(self, part: Part, this: _Pass) -> tuple[list[str], Tensor]:
        """All of an update that needs no look at it; names of statistics, and all numbers to see.

        They are loss, norm of the gradient, valid rows, statistics, and sums of targets if wanted.
        """
        view = self._view(part.batch, part.mask_BT, this.scale)
        terms, stats = self._backward(view, this)
        total, norm = terms.total.detach(), global_norm(self.parameters)
        if self.is_decided_there:
            clip_unseen(self.parameters, norm, self._section.grad_clip)
            is_good = total.isfinite() & (norm < self._norm_limit) & (view.num_valid > 0)
            step_unless(self.optimizer, ~is_good)
        numbers = [total, norm, view.num_valid, *stats.values()]
        # Each batch counts once, however many passes it has.
        if self.return_scale is not None and this.is_first:
            sums = sums_of(terms.targets_TB, view.mask_TB)
            numbers = [number.double() for number in numbers] + list(sums)
        return list(stats), torch.stack(numbers)

    def _backward(self, view: View, this: _Pass) -> tuple[LossTerms, dict[str, Tensor]]:
        """Leave the gradients of the loss in the parameters; return it, and its statistics."""
        terms = self._algorithm.loss(view, this.entropy_cost)
        with torch.no_grad():
            stats = {
                "loss/policy": terms.policy.detach(),
                "loss/value": terms.value.detach(),
                "loss/entropy": terms.entropy.detach(),
                "policy/entropy": terms.sum_entropy.detach() / view.num_valid.clamp(min=1),
                **self._algorithm.stats(view),
            }
        # As an optimizer does it, without what that tells a profiler.
        for parameter in self.parameters:
            parameter.grad = None
        terms.total.backward()
        return terms, stats

    def _view(self, batch: Batch, mask_BT: Tensor, scale: float) -> View:
        """One forward over all rows, and one of the target network, if there is any."""
        inputs = (batch.rows_of_obs(), batch.actions, batch.mask_BT, batch.state)
        target = None
        if self.target is not None:
            with torch.no_grad():
                target = self.target.policy.evaluate(*inputs)
        # Truncated rows keep gamma: the row after them holds the final observation.
        discounts_BT = torch.where(batch.terminated_BT, self._end, self._gamma)
        rewards_BT = clip_rewards(batch.rewards_BT, self._section.reward_clip)
        return View(
            evaluation=self.policy.evaluate(*inputs),
            behaviour_log_probs_TB=batch.log_probs_BT.t(),
            rewards_TB=(rewards_BT * (self._section.reward_scale / scale)).t(),
            discounts_TB=discounts_BT.t(),
            mask_TB=mask_BT.t(),
            num_valid=mask_BT.sum(dtype=torch.float32),
            target=target,
            kl_coeff=0.0 if self.target is None else self.target.kl_coeff,
        )

    def _scale(self, batch: Batch, alive_B: Tensor) -> float:
        """The divisor of rewards; for the very first batch it is the scale of its own returns."""
        if self.return_scale is None:
            return 1.0
        if not self.return_scale.is_empty:
            return self.return_scale.scale
        with torch.no_grad():
            view = self._view(batch, living_mask(batch, alive_B), 1.0)
            targets_TB = self._algorithm.loss(view, 0.0).targets_TB
        is_target_TB = view.mask_TB & targets_TB.isfinite()
        return scale_of(sums_of(targets_TB, is_target_TB).tolist())

    def _conclude(self, outcomes: list[_Outcome], this: _Pass) -> StepResult:
        """Return the result of all parts together."""
        applied = [outcome for outcome in outcomes if outcome.is_applied]
        is_failed_B = torch.zeros_like(this.alive_B)
        names: list[str] = []
        for outcome in outcomes:
            if outcome.is_applied:
                self._num_failed_in_a_row = 0
            elif outcome.is_failed:
                self._num_failed_in_a_row += 1
                is_failed_B |= outcome.is_in_B
                # Where they all are finite, the weights that a step would have given are not.
                bad = [name for name, value in outcome.stats.items() if not math.isfinite(value)]
                names += bad or ["weights"]
        self.num_updates += len(applied)
        if this.is_first:
            self._update_statistics(this, applied, is_failed_B)
        if self.target is not None:
            self.target.end_batch(self.policy)
        return StepResult(
            len(applied),
            is_failed_B,
            means_of([outcome.stats for outcome in applied or outcomes]) | self._knobs(this),
            self._num_failed_in_a_row,
            tuple(dict.fromkeys(names)),
        )

    def _knobs(self, this: _Pass) -> dict[str, float]:
        """Those that adapt are as they are now."""
        knobs = {"algorithm/lr": this.lr, "algorithm/entropy_cost": this.entropy_cost}
        if self.target is not None:
            knobs["algorithm/kl_coeff"] = self.target.kl_coeff
        if self.return_scale is not None:
            knobs["algorithm/return_scale"] = self.return_scale.scale
        return knobs

    def _update_statistics(self, this: _Pass, applied: list[_Outcome], is_failed_B: Tensor) -> None:
        """Each batch counts once, however many passes it has."""
        batch = this.batch
        if self.return_scale is not None:
            self.return_scale.add([outcome.target_sums for outcome in applied], this.scale)
            self.return_scale.look(batch.rewards_BT, batch.mask_BT)
        model = self.policy.model
        if applied and len(model.normalizers):
            # A living column that did not fail was learned from, or has no valid row.
            is_learned_B = this.alive_B & ~is_failed_B
            is_valid_BT = batch.mask_BT & is_learned_B.to(self._device).unsqueeze(-1)
            # Others, images among them, are not normalised.
            leaves = {name: leaf for name, leaf in batch.obs.items() if leaf.is_floating_point()}
            rows = {name: leaf[:, :-1].flatten(0, 1) for name, leaf in leaves.items()}
            model.update_statistics(rows, is_valid_BT.flatten())


def means_of(stats: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the unweighted mean under each name. A single dict is returned as it is."""
    if len(stats) == 1:
        return stats[0]
    return {name: sum(each[name] for each in stats) / len(stats) for name in stats[0]}
