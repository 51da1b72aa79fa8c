"""What an update step needs to go on as if it had never stopped: captured, and put back.

The state of a team is that of its members, under names that begin with a member's, in the same
groups of tensors. Copies are in the weights, and have nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from impala_async.errors import CheckpointError
from impala_async.foreign import one_line
from impala_async.team import split_off
from impala_async.training.optimizer import flatten_optimizer, restore_optimizer
from impala_async.training.step import UpdateStep
from impala_async.training.team_step import TeamStep

Tensors = Mapping[str, Mapping[str, Tensor]]
"""Groups of named tensors; a group is a file."""


@dataclass(frozen=True)
class TrainingState:
    """Tensors by group, and what else there is to remember. It shares no memory with a step."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    optimizer_options: Mapping[str, Any]
    target: Mapping[str, Tensor]
    """Of the target network; empty where the algorithm has none."""
    algorithm: Mapping[str, Any]
    """What the update step remembers besides."""
    origin: str = "the checkpoint"
    """What an error calls it."""

    def tensors(self) -> Tensors:
        tensors = {"model": self.model, "optimizer": self.optimizer}
        return tensors | ({"target": self.target} if self.target else {})

    def state(self) -> dict[str, Any]:
        """Its share of `state.json`."""
        return {"optimizer": dict(self.optimizer_options), "algorithm": dict(self.algorithm)}

    @staticmethod
    def of(
        tensors: Tensors, state: Mapping[str, Any], origin: str = "the checkpoint"
    ) -> "TrainingState":
        """Undo `tensors` and `state`, which may hold more than this."""
        try:
            return TrainingState(
                model=tensors["model"],
                optimizer=tensors["optimizer"],
                optimizer_options=state["optimizer"],
                target=tensors.get("target", {}),
                algorithm=state["algorithm"],
                origin=origin,
            )
        except KeyError as error:
            raise CheckpointError(f"{origin} has no {error}") from None


def capture(step: UpdateStep | TeamStep) -> TrainingState:
    """Copy the step's state now, on the thread that trains, for another thread to write."""
    if isinstance(step, UpdateStep):
        return _capture_one(step)
    members = {name: _capture_one(one) for name, one in step.steps.items()}
    untrained = {
        name: _copies(policy.named_tensors())
        for name, policy in step.policy.members.items()
        if name not in members
    }
    return TrainingState(
        model=_joined({name: one.model for name, one in members.items()} | untrained),
        optimizer=_joined({name: one.optimizer for name, one in members.items()}),
        optimizer_options={name: one.optimizer_options for name, one in members.items()},
        target=_joined({name: one.target for name, one in members.items()}),
        algorithm={name: one.algorithm for name, one in members.items()},
    )


def restore(step: UpdateStep | TeamStep, state: TrainingState) -> None:
    """Put a captured state into a freshly built step; raises CheckpointError where none fits."""
    try:
        if isinstance(step, UpdateStep):
            _restore_one(step, state)
            return
        step.policy.load_tensors(state.model)
        for name, one in step.steps.items():
            _restore_one(one, _share_of(state, name))
    except KeyError as error:
        raise CheckpointError(f"{state.origin} does not fit this run: it has no {error}") from error
    except (RuntimeError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{state.origin} does not fit this run: {one_line(error)}") from error


def _capture_one(step: UpdateStep) -> TrainingState:
    optimizer, options = flatten_optimizer(step.optimizer)
    return TrainingState(
        model=_copies(step.policy.named_tensors()),
        optimizer=_copies(optimizer),
        optimizer_options=options,
        target={} if step.target is None else _copies(step.target.tensors()),
        algorithm=step.state(),
    )


def _restore_one(step: UpdateStep, state: TrainingState) -> None:
    _check_dtypes(state.model, step.policy.named_tensors())
    _check_dtypes(state.target, {} if step.target is None else step.target.tensors())
    step.policy.load_tensors(state.model)
    restore_optimizer(step.optimizer, state.optimizer, state.optimizer_options)
    step.restore(state.target, state.algorithm)


def _check_dtypes(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """torch itself would round to what is wanted, and say nothing."""
    for name in tensors.keys() & wanted.keys():
        if tensors[name].dtype != wanted[name].dtype:
            raise ValueError(f"{name} is {tensors[name].dtype}, not {wanted[name].dtype}")


def _share_of(state: TrainingState, member: str) -> TrainingState:
    return TrainingState(
        model=split_off(state.model, member),
        optimizer=split_off(state.optimizer, member),
        optimizer_options=state.optimizer_options[member],
        target=split_off(state.target, member),
        algorithm=state.algorithm[member],
    )


def _joined(groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Undo `split_off` for all members."""
    return {
        f"{member}/{name}": tensor
        for member, tensors in groups.items()
        for name, tensor in tensors.items()
    }


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # Contiguous, for a safetensors file knows no other order.
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
