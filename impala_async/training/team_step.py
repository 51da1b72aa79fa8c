"""One update of a team: each trained member is updated with the rows that it played.

A batch is restricted to a member's rows by its mask, and to the columns that hold any; the rows of
others then are as those of a reset, so a recurrent state begins anew behind them, which is where
the member's episode began.

    B columns of a batch, T action rows, N columns of a member
"""

import logging
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from impala_async.config.algorithm import AlgorithmSection
from impala_async.config.policies import PoliciesSection
from impala_async.metrics.names import of_policy
from impala_async.policy import AnyPolicy, member_seed_of, split_off
from impala_async.schema import POLICY
from impala_async.training.batch import Batch
from impala_async.training.checkpoint import TrainingState, check_alike, copies_of, entry
from impala_async.training.ranks import Ranks
from impala_async.training.step import StepResult, UpdateStep, means_of

logger = logging.getLogger(__name__)

# By then every trained member has played, unless nobody lets it.
WARN_AT_BATCH = 100


@dataclass(eq=False)
class TeamStep:
    """The team's weights, one batch further: what `UpdateStep` is to a single policy.

    `num_updates` of a result are those of the member that took most. So a version is as old,
    counted in updates, as any member's weights in it can be.
    """

    policy: AnyPolicy
    section: AlgorithmSection
    policies: PoliciesSection
    _: KW_ONLY
    seed: int
    ranks: Ranks = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        seeds = [member_seed_of(self.seed, number) for number in range(len(self.policies.names))]
        self.steps = {
            name: UpdateStep(self.policy.members[name], self.section, seed=seed, ranks=self.ranks)
            for name, seed in zip(self.policies.names, seeds, strict=True)
            if name in self.policies.trained
        }
        self._num_batches = 0
        self._num_failed_in_a_row = 0

    def begin(self, batch: Batch) -> Batch:
        """Each member looks at the rows that it played."""
        before: dict[str, Tensor] = {}
        for name, step in self.steps.items():
            is_own_BT = self._own_rows(batch, name)
            for what, found_BT in step.begin(replace(batch, mask_BT=is_own_BT)).before.items():
                before[what] = torch.where(is_own_BT, found_BT, before.get(what, 0.0))
        return replace(batch, before=before)

    def _own_rows(self, batch: Batch, name: str) -> Tensor:
        return batch.mask_BT & (batch.obs[POLICY][:, :-1] == self.policies.names.index(name))

    def run(
        self,
        batch: Batch,
        alive_B: Tensor,
        env_steps_trained: int,
        *,
        is_first_pass: bool = True,
        num_rows: int | None = None,
    ) -> StepResult:
        """Train each member on its rows; a column fails with any of its members. Which of the
        valid rows of all ranks are whose is not known."""
        is_failed_B = torch.zeros_like(alive_B)
        results: dict[str, StepResult] = {}
        for name, step in self.steps.items():
            is_own_BT = self._own_rows(batch, name)
            # Where there is a device, the host waits for it here.
            has_own_B = is_own_BT.any(-1).cpu() & alive_B
            own = replace(batch, mask_BT=is_own_BT)
            if self.ranks.are_many:  # another one may have rows of it
                columns_N, alive_N = torch.arange(len(alive_B)), has_own_B
            elif has_own_B.any():
                columns_N = has_own_B.nonzero().flatten()
                own = own.take(columns_N)
                alive_N = torch.ones_like(columns_N, dtype=torch.bool)
            else:
                continue
            num_before = step.num_updates
            result = step.run(own, alive_N, env_steps_trained, is_first_pass=is_first_pass)
            is_failed_B[columns_N] |= result.is_failed_B
            every, members = self.policies.copy_every_updates, self.policy.members
            is_due = every is not None and num_before // every != step.num_updates // every
            for copied, source in self.policies.copies.items() if is_due else ():
                if source == name:
                    members[copied].load_tensors(members[name].named_tensors())
            results[name] = result
        self._num_batches += 1
        idle = [name for name, step in self.steps.items() if not step.num_updates]
        if idle and self._num_batches == WARN_AT_BATCH:
            logger.warning(
                "policies.train: %s learned nothing from %d batches: does policies.mapping ever "
                "let it play?",
                ", ".join(idle),
                self._num_batches,
            )
        return self._join(results, is_failed_B)

    def _join(self, results: Mapping[str, StepResult], is_failed_B: Tensor) -> StepResult:
        """The result of the team; its statistics are those of each member, and means over them."""
        of_all = results.values()
        told = {name: each for name, each in results.items() if each.num_updates} or results
        stats = means_of([result.stats for result in told.values()])
        num_updates_of = dict[str, int]()
        for member, result in told.items():
            own = {of_policy(member, name): value for name, value in result.stats.items()}
            stats |= own
            num_updates_of |= dict.fromkeys(own, result.num_updates)
        has_failed = any(result.not_finite for result in of_all)
        # The team learns as long as one of them does.
        is_taken = any(result.num_updates for result in of_all)
        self._num_failed_in_a_row = 0 if is_taken else self._num_failed_in_a_row + has_failed
        return StepResult(
            max((result.num_updates for result in of_all), default=0),
            is_failed_B,
            stats,
            self._num_failed_in_a_row,
            tuple(dict.fromkeys(name for result in of_all for name in result.not_finite)),
            num_updates_of,
        )

    def prepare(self, batch: Batch) -> None:
        for step in self.steps.values():
            step.prepare(batch)

    def capture(self) -> TrainingState:
        """The states of its members, under names that begin with theirs; of copies the weights."""
        tensors: dict[str, dict[str, Tensor]] = {}
        state: dict[str, dict[str, Any]] = {}
        for member, step in self.steps.items():
            captured = step.capture()
            for group, found in captured.tensors.items():
                tensors.setdefault(group, {}).update({f"{member}/{k}": found[k] for k in found})
            for part, value in captured.state.items():
                state.setdefault(part, {})[member] = value
        copied = self.policy.named_tensors().items()
        trained = tensors["model"]
        trained |= copies_of({name: each for name, each in copied if name not in trained})
        return TrainingState(tensors, state)

    def restore(self, state: TrainingState) -> None:
        model = entry(state.tensors, "model", dict)
        check_alike(model, self.policy.named_tensors())
        self.policy.load_tensors(model)
        for member, step in self.steps.items():
            parts = ("optimizer", "algorithm")
            step.restore(
                TrainingState(
                    {group: split_off(each, member) for group, each in state.tensors.items()},
                    {part: entry(entry(state.state, part, dict), member, dict) for part in parts},
                )
            )
