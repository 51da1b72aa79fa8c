"""One update: from a batch, through the loss, to an optimizer step that is taken or skipped.

Owns all that learning remembers besides the weights. Changes the policy's weights and its
statistics of observations in place, and nothing else.

    B columns of a batch, T action rows, S = T+1 observation rows, N columns of a part
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from impala_async.config.algorithm import AlgorithmSection
from impala_async.policy import Policy
from impala_async.training.algorithms import MAKERS, Target, make_algorithm, returns_of
from impala_async.training.batch import GOOD_LOSS, GOOD_NORM, Batch
from impala_async.training.by_hand import ByHand, is_plain
from impala_async.training.checkpoint import (
    TrainingState,
    check_alike,
    copies_of,
    count_in,
    entry,
)
from impala_async.training.gradients import Coefficients, ComputeGradients, TorchGradients
from impala_async.training.graphs import Graphs
from impala_async.training.intrinsic import make_intrinsic
from impala_async.training.optimizer import (
    MAX_NORM,
    build_optimizer,
    flatten_optimizer,
    restore_optimizer,
    scheduled,
    take_step,
)
from impala_async.training.parts import Part, find_culprits, make_parts
from impala_async.training.ranks import Ranks
from impala_async.training.rewards import ReturnScale, scale_of, sums_of

logger = logging.getLogger(__name__)

TOO_LARGE = "grad/norm (too large)"


@dataclass(frozen=True)
class StepResult:
    """The result of the updates with a batch; `stats` are means over them."""

    num_updates: int
    """Those taken: with a valid row, and a loss and a gradient that are finite."""
    is_failed_B: Tensor
    """The columns that were in updates that failed."""
    stats: dict[str, float]
    num_failed_in_a_row: int
    """How many updates failed since the last one that was taken, in this batch or before."""
    not_finite: tuple[str, ...]
    num_updates_of: Mapping[str, int] | None = None
    """In a team: the number of updates over which some statistics are means."""


@dataclass
class _Pass:
    """The settings that all updates with a batch have in common, and what came of them so far."""

    is_first: bool
    lr: float
    entropy_cost: float
    scale: float
    is_failed_B: Tensor
    applied: list[dict[str, float]] = field(default_factory=list)
    """The statistics of each update taken."""
    skipped: list[dict[str, float]] = field(default_factory=list)
    target_sums: list[list[float]] = field(default_factory=list)
    """Those of the return targets of each update taken, if they are asked for."""
    not_finite: dict[str, None] = field(default_factory=dict)


@dataclass(eq=False)
class UpdateStep:
    """The policy's weights, one batch further. Batches lie on the device of the policy."""

    policy: Policy
    section: AlgorithmSection
    _: KW_ONLY
    seed: int = 0
    is_graphed: bool = False
    ranks: Ranks = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        policy = self.policy
        self._entropy_cost = self.section.entropy_cost_of(policy.action_spec.num_choices)
        # An algorithm of the user's own reads it there.
        decided = {"entropy_cost": self._entropy_cost}
        algorithm = self.section = self.section.model_copy(update=decided)
        self.intrinsic = make_intrinsic(policy, algorithm, self.seed)
        self._named = [*policy.model.named_parameters()]
        if self.intrinsic is not None:
            self._named += self.intrinsic.module.named_parameters(prefix="intrinsic")
        self.parameters = tuple(weight for _, weight in self._named)
        self.optimizer = build_optimizer(self.parameters, algorithm)
        self._algorithm = make_algorithm(algorithm, self.ranks.sum if self.ranks.are_many else None)
        self.target = Target(policy, algorithm) if self._algorithm.has_target else None
        self.return_scale = ReturnScale() if algorithm.normalize_returns else None
        self.num_updates = 0
        self._num_failed_in_a_row = 0
        # From this norm on a gradient is not for an optimizer, which gets it clipped.
        clip = algorithm.grad_clip
        self._norm_limit = math.inf if clip is not None and clip < MAX_NORM else MAX_NORM
        # Code of the user's own may do more than launch kernels: a graph would leave that out.
        self._is_ours = algorithm.name in MAKERS and self.intrinsic is None
        self._by_torch = TorchGradients(
            policy,
            algorithm,
            self._algorithm,
            self.parameters,
            target=self.target,
            intrinsic=self.intrinsic,
        )
        self._compute: ComputeGradients = self._by_torch
        # A sum over ranks is no part of a graph, which another rank may not have.
        has_sums = self.ranks.are_many and algorithm.has_normal_advantages
        if self.is_graphed and self._is_ours and policy.is_torso_ours and not has_sums:
            self._compute = Graphs(self._by_torch, self.parameters)
        elif is_plain(policy, algorithm):
            self._compute = ByHand(policy, algorithm, self._by_torch.transitions, self.ranks)

    def prepare(self, batch: Batch) -> None:
        """Try an algorithm or reward of the user's own, by an update without a valid row."""
        if not self._is_ours:
            device = self.policy.device
            # A network of the user's own may draw in it.
            with (
                torch.random.fork_rng([device] if device.type == "cuda" else []),
                self.ranks.apart(),
            ):
                alive_B = torch.ones(len(batch.mask_BT), dtype=torch.bool)
                self.run(self.begin(batch), alive_B, 0, is_first_pass=False)
                if self.intrinsic is not None:
                    self.intrinsic.prepare(batch)

    @torch.no_grad()
    def begin(self, batch: Batch) -> Batch:
        """Before the first of several passes: the batch, with what all of them make use of."""
        if not self._algorithm.wants_before_log_probs:
            return batch
        rows = batch.rows_of_obs()
        evaluation = self.policy.evaluate(rows, batch.actions, batch.mask_BT, batch.state)
        return replace(batch, before={"log_probs_BT": evaluation.log_probs_TB.t().contiguous()})

    def run(
        self,
        batch: Batch,
        alive_B: Tensor,
        env_steps_trained: int,
        *,
        is_first_pass: bool = True,
        num_rows: int | None = None,
    ) -> StepResult:
        """Make the updates with the columns that are alive, a tensor on the CPU. One that is not
        taken leaves all as it is, bit for bit. Schedules are where `env_steps_trained` says, and
        statistics of returns and observations take in a batch at its first pass. Where the valid
        rows of all ranks are known, their number need not be asked for."""
        batch, section, at = batch.living(alive_B), self.section, env_steps_trained
        if self.target is not None and is_first_pass:
            self.target.begin_batch(self.policy.model)
        cost, horizon = self._entropy_cost, section.schedule_env_steps
        this = _Pass(
            is_first_pass,
            scheduled(section.lr, section.lr_end, horizon, at),
            scheduled(cost, section.entropy_cost_end, horizon, at),
            self._scale(batch),
            torch.zeros_like(alive_B),
        )
        for part in self._parts(batch, alive_B, num_rows, this):
            self._learn_from(batch, part, this)
        if this.applied and not self.num_updates:
            idle = [name for name, w in self._named if w.requires_grad and w.grad is None]
            if idle:
                fix = "drop no_grad or detach, or freeze it by requires_grad_(False)"
                logger.warning("no gradient came to %s: %s", ", ".join(idle), fix)
        self.num_updates += len(this.applied)
        if is_first_pass and self.return_scale is not None:
            self.return_scale.add(this.target_sums, this.scale)
        if is_first_pass and this.applied:
            # A living column that did not fail was learned from, or has no valid row.
            learned = batch.living(~this.is_failed_B)
            self.policy.model.update_statistics(batch.obs, learned.mask_BT, self.ranks.sum)
        if self.target is not None:
            self.target.end_batch(self.policy.model)
        return StepResult(
            len(this.applied),
            this.is_failed_B,
            means_of(this.applied or this.skipped) | self._settings(this),
            self._num_failed_in_a_row,
            tuple(this.not_finite),
        )

    def capture(self) -> TrainingState:
        """Copy its state, on the thread that trains, for another thread to write."""
        optimizer, options = flatten_optimizer(self.optimizer)
        tensors = {"model": self.policy.named_tensors(), "optimizer": optimizer}
        algorithm: dict[str, Any] = {"num_updates": self.num_updates}
        if self.target is not None:
            tensors["target"] = self.target.model.state_dict()
            algorithm["target"] = self.target.state()
        if self.intrinsic is not None:
            tensors["intrinsic"] = self.intrinsic.module.state_dict()
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
        self.num_updates = count_in(algorithm, "num_updates")
        if self.target is not None:
            tensors = entry(state.tensors, "target", dict)
            self.target.restore(tensors, entry(algorithm, "target", dict))
        if self.intrinsic is not None:
            tensors = entry(state.tensors, "intrinsic", dict)
            check_alike(tensors, self.intrinsic.module.state_dict())
            self.intrinsic.module.load_state_dict(tensors)
        if self.return_scale is not None:
            self.return_scale.restore(entry(algorithm, "return_scale", dict))

    def _parts(
        self, batch: Batch, alive_B: Tensor, num_rows: int | None, this: _Pass
    ) -> Iterator[Part]:
        """Each is learned from in one update."""
        section, source, per_column = self.section, batch, 1
        if section.shuffle_rows and section.num_minibatches > 1:
            known = self._returns(batch, alive_B, this)
            source, per_column = batch.in_one_column(known), batch.mask_BT.shape[1]
            alive_B = alive_B & ~this.is_failed_B
        # By the updates taken, so that one that is skipped leaves no trace here either.
        seeds = self.seed, self.num_updates
        return make_parts(
            source,
            alive_B,
            section.num_minibatches,
            seeds,
            self.ranks,
            per_column=per_column,
            num_rows=num_rows,
        )

    @torch.no_grad()
    def _returns(self, batch: Batch, alive_B: Tensor, this: _Pass) -> dict[str, Tensor]:
        """Those of all rows. A column in which they are not finite fails as a whole."""
        returns = returns_of(self._by_torch.view(batch, self._coefficients(this)), self.section)
        known = {"targets_BT": returns.targets_TB.t(), "advantages_BT": returns.advantages_TB.t()}
        is_finite_BT = known["targets_BT"].isfinite() & known["advantages_BT"].isfinite()
        # Where there is a device, the host waits for it here.
        is_bad_B = (batch.mask_BT & ~is_finite_BT).any(1).cpu() & alive_B
        if is_bad_B.any():
            self._note_failed(is_bad_B.nonzero().flatten(), {"returns": math.nan}, this)
        if self.ranks.are_many and self.ranks.totals(float(is_bad_B.sum()))[0]:
            this.not_finite["returns"] = None
        return known

    def _learn_from(self, batch: Batch, part: Part, this: _Pass) -> None:
        if this.not_finite and part.has_rows:
            # Rows of columns that made an earlier part fail were dealt to this one, too.
            part = part.without(this.is_failed_B.nonzero().flatten(), self.ranks)
        if (failed := self._update(part, this)) is not None:
            self._retry(batch, part, failed, this)

    def _update(self, part: Part, this: _Pass) -> dict[str, float] | None:
        """Take a step, if there is a valid row; return its statistics if that cannot be."""
        for group in self.optimizer.param_groups:
            group["lr"] = this.lr
        with_sums = self.return_scale is not None and this.is_first
        of = self._coefficients(this, part.num_valid)
        numbers, names = self._compute(part.batch(), of, with_sums=with_sums)
        # Here the host waits for the device.
        total, norm, num_valid, *more = self._sum_up(numbers, len(names), part.num_valid)
        told = dict(zip(names, more, strict=False)) | {"loss/total": total, "grad/norm": norm}
        is_applied = num_valid > 0 and math.isfinite(total) and norm < self._norm_limit
        (this.applied if is_applied else this.skipped).append(told)
        if not is_applied:
            return told if num_valid > 0 else None
        take_step(self.optimizer, norm, self.section.grad_clip, self.section.grad_clip_by)
        self._num_failed_in_a_row = 0
        this.target_sums.append(more[len(names) :])
        if self.target is not None:
            self.target.note_update(self.policy.model, told["policy/kl"])
        return None

    def _sum_up(self, numbers: Tensor, num_stats: int, num_valid: int | None) -> list[float]:
        """The numbers of an update, and its gradients, of all ranks together."""
        if num_valid is None:
            return list(numbers.tolist())
        own, sums = numbers[: 3 + num_stats], numbers[3 + num_stats :]
        if len(sums):
            self.ranks.sum(sums)
        shares, has_gradient, norm = self.ranks.sum_gradients(self.parameters, own)
        told: list[float] = torch.cat([shares, sums, has_gradient, norm.view(1)]).tolist()
        total, _, _, *more = told[: len(numbers)]
        for parameter, has in zip(self.parameters, told[len(numbers) : -1], strict=True):
            if not has:  # an optimizer leaves it alone
                parameter.grad = None
        return [total, told[-1], num_valid, *more]

    def _retry(self, batch: Batch, part: Part, failed: dict[str, float], this: _Pass) -> None:
        """Learn from this part without those columns that made its update fail."""
        # Where all parts may have rows of a column, they are all looked for at once.
        looked_at_N = (~this.is_failed_B).nonzero().flatten() if part.has_rows else part.columns
        found_N = self._find_failing(batch, looked_at_N, this)
        if len(found_N):
            self._note_failed(found_N, failed, this)
        rest, again = part.without(found_N, self.ranks), None
        if self.ranks.are_many or len(rest.numbers_N):
            again = self._update(rest, this)
        if self.ranks.are_many:
            # All ranks know of it, also those that had no part in it.
            this.not_finite |= _faults(failed)
        if again is not None:
            self._note_failed(rest.columns, again, this)

    def _find_failing(self, batch: Batch, columns_N: Tensor, this: _Pass) -> Tensor:
        """Each rank looks among its own columns."""
        if not len(columns_N):
            return columns_N
        with self.ranks.apart():
            return find_culprits(
                columns_N, lambda tried_N: self._is_good(batch.take(tried_N), this)
            )

    def _note_failed(self, columns_N: Tensor, stats: dict[str, float], this: _Pass) -> None:
        self._num_failed_in_a_row += 1
        this.is_failed_B[columns_N] = True
        this.not_finite |= _faults(stats)

    def _is_good(self, part: Batch, this: _Pass) -> bool:
        """Whether its loss and gradient stay finite beside those of others as good."""
        numbers, _ = self._by_torch(part, self._coefficients(this), with_sums=False)
        loss, norm, *_ = numbers.tolist()
        return bool(abs(loss) < GOOD_LOSS and norm < min(GOOD_NORM, self._norm_limit))

    def _coefficients(self, this: _Pass, num_valid: int | None = None) -> Coefficients:
        kl_coeff = 0.0 if self.target is None else self.target.kl_coeff
        factor = self.section.reward_scale / this.scale
        return Coefficients(this.entropy_cost, factor, kl_coeff, num_valid)

    def _scale(self, batch: Batch) -> float:
        """The divisor of rewards; for the very first batch it is the scale of its own returns."""
        if self.return_scale is None:
            return 1.0
        if self.return_scale.weight:
            return self.return_scale.scale
        with torch.no_grad():
            view = self._by_torch.view(batch, Coefficients(0.0, self.section.reward_scale, 0.0))
            targets_TB = self._algorithm.loss(view, 0.0).targets_TB
        sums = sums_of(targets_TB, view.mask_TB & targets_TB.isfinite())
        return scale_of(self.ranks.sum(sums).tolist())

    def _settings(self, this: _Pass) -> dict[str, float]:
        """Those that adapt are as they are now."""
        settings = {"algorithm/lr": this.lr, "algorithm/entropy_cost": this.entropy_cost}
        if self.target is not None:
            settings["algorithm/kl_coeff"] = self.target.kl_coeff
        if self.return_scale is not None:
            settings["algorithm/return_scale"] = self.return_scale.scale
        return settings


def _faults(stats: dict[str, float]) -> dict[str, None]:
    # Where they all are finite, the gradient is larger than anything that is learned from.
    names = [name for name, value in stats.items() if not math.isfinite(value)]
    return dict.fromkeys(names or [TOO_LARGE])


def means_of(stats: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each number is a mean over those that have it: a user's own algorithm need not always."""
    found: dict[str, list[float]] = {}
    for each in stats:
        for name, value in each.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}
