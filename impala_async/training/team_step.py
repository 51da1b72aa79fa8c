"""One update of a team: each trained member is updated with the rows that it played.

Owns an update step for each trained member, with an optimizer and a memory of its own, and takes
the copies anew. A batch is restricted to a member's rows by its mask, and to the columns that hold
any; the rows of others then are as those of a reset, so a recurrent state begins anew behind them,
which is where the member's episode began.

    P trained members, B columns of a batch, T action rows, S = T+1 observation rows
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from impala_async.config.algorithm import AlgorithmSection
from impala_async.config.policies import PoliciesSection
from impala_async.policy import AnyPolicy, member_seed_of, split_off
from impala_async.schema import POLICY
from impala_async.training.batch import Batch
from impala_async.training.state import TrainingState, check_alike, copies_of, entry
from impala_async.training.step import StepResult, UpdateStep, means_of

logger = logging.getLogger(__name__)

# By then every trained member has played, unless nobody lets it.
WARN_AT_BATCH = 100


class TeamStep:
    """The team's weights, one batch further: what `UpdateStep` is to a single policy.

    `num_updates` of a result are those of the member that took most: what the members do with one
    batch, they do side by side. So a version is as old, counted in updates, as any member's
    weights in it can be.
    """

    def __init__(
        self,
        policy: AnyPolicy,
        algorithm: AlgorithmSection,
        policies: PoliciesSection,
        device: torch.device | str,
        *,
        seed: int = 0,
    ) -> None:
        self.policy = policy
        self.steps = {
            name: UpdateStep(
                policy.members[name],
                algorithm,
                device,
                seed=member_seed_of(seed, policies.names.index(name)),
            )
            for name in policies.trained
        }
        self._copies = policies.copies
        self._copy_every = policies.copy_every_updates
        self._num_batches = 0
        self._numbers = [policies.names.index(name) for name in self.steps]

    def run(
        self, batch: Batch, alive_B: Tensor, env_steps_trained: int, *, is_first_pass: bool = True
    ) -> StepResult:
        """Train each member on its rows of the columns that are alive.

        A column fails with any of its members: it has no further pass.
        """
        is_own_PBT = torch.stack([self._is_own(batch, number) for number in self._numbers])
        # Where there is a device, the host waits for it here.
        has_rows_PB = is_own_PBT.any(-1).cpu() & alive_B
        is_failed_B = torch.zeros_like(alive_B)
        results = []
        for (name, step), is_own_BT, has_rows_B in zip(
            self.steps.items(), is_own_PBT, has_rows_PB, strict=True
        ):
            columns_N = has_rows_B.nonzero().flatten()
            if not len(columns_N):
                continue
            own = replace(batch, mask_BT=is_own_BT).take(columns_N)
            alive_N = torch.ones_like(columns_N, dtype=torch.bool)
            num_before = step.num_updates
            result = step.run(own, alive_N, env_steps_trained, is_first_pass=is_first_pass)
            is_failed_B[columns_N] |= result.is_failed_B
            self._take_copies(name, num_before, step.num_updates)
            results.append(result)
        self._num_batches += 1
        if self._num_batches == WARN_AT_BATCH:
            self._warn_of_idle()
        told = [result for result in results if result.applied] or results
        names = dict.fromkeys(name for result in results for name in result.not_finite)
        return StepResult(
            max((result.num_updates for result in results), default=0),
            is_failed_B,
            means_of([result.stats for result in told]) if told else {},
            max((result.num_failed_in_a_row for result in results), default=0),
            tuple(names),
        )

    def prepare(self, batch: Batch) -> None:
        for step in self.steps.values():
            step.prepare(batch)

    def capture(self) -> TrainingState:
        """The states of its members, under names that begin with a member's, in the same groups.

        Copies are in the weights, and have nothing else.
        """
        tensors: dict[str, dict[str, Tensor]] = {"model": {}}
        state: dict[str, dict[str, Any]] = {}
        for member, step in self.steps.items():
            captured = step.capture()
            for group, members in captured.tensors.items():
                tensors.setdefault(group, {}).update(_named_after(member, members))
            for part, value in captured.state.items():
                state.setdefault(part, {})[member] = value
        for member, policy in self.policy.members.items():
            if member not in self.steps:
                tensors["model"] |= _named_after(member, copies_of(policy.named_tensors()))
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

    def _is_own(self, batch: Batch, number: int) -> Tensor:
        """[B, T]: the valid rows that the member with this number played."""
        return batch.mask_BT & (batch.obs[POLICY][:, :-1] == number)

    def _warn_of_idle(self) -> None:
        for name, step in self.steps.items():
            if not step.num_updates:
                logger.warning(
                    "policies.train names %r, which has learned nothing from %d batches: does "
                    "policies.mapping ever let it play?",
                    name,
                    self._num_batches,
                )

    def _take_copies(self, source: str, num_before: int, num_updates: int) -> None:
        """When the source has taken so many updates again, its copies become as it is."""
        every = self._copy_every
        if every is None or num_before // every == num_updates // every:
            return
        for name, copied in self._copies.items():
            if copied == source:
                members = self.policy.members
                members[name].load_tensors(members[source].named_tensors())


def _named_after(member: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `split_off`."""
    return {f"{member}/{name}": tensor for name, tensor in tensors.items()}
