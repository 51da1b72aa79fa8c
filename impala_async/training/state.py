"""All that an update step needs to go on as if it had never stopped."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from impala_async.errors import CheckpointError
from impala_async.user_code import one_line

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

    @contextmanager
    def must_fit(self) -> Iterator[None]:
        """A block that puts it back; raises CheckpointError where the state of another run fails.

        The block raises whatever torch, JSON or an optimizer make of a value that does not fit.
        """
        try:
            yield
        except KeyError as error:
            raise CheckpointError(
                f"{self.origin} does not fit this run: it has no {error}"
            ) from error
        except (RuntimeError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
            raise CheckpointError(
                f"{self.origin} does not fit this run: {one_line(error)}"
            ) from error


def copies_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the host, contiguous, for a safetensors file knows no other order."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def check_dtypes(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise ValueError for another dtype: torch itself would round, and say nothing."""
    for name in tensors.keys() & wanted.keys():
        if tensors[name].dtype != wanted[name].dtype:
            raise ValueError(f"{name} is {tensors[name].dtype}, not {wanted[name].dtype}")
