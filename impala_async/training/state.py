"""All that an update step needs to go on as if it had never stopped."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from impala_async.errors import CheckpointError

Entry = TypeVar("Entry")
Tensors = Mapping[str, Mapping[str, Tensor]]
"""Groups of named tensors; a group is a file."""


@dataclass(frozen=True)
class TrainingState:
    """Tensors by group, and what else there is to remember. It shares no memory with a step."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    optimizer_options: Mapping[str, Any]
    target: Mapping[str, Tensor]
    """The tensors of the target network; empty where the algorithm has none."""
    algorithm: Mapping[str, Any]
    """Everything else that the update step remembers."""
    origin: str = "the checkpoint"
    """The name of this state in errors."""

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
        """A block that puts it back: what it finds not to fit is a CheckpointError."""
        try:
            yield
        except NotFitting as error:
            raise CheckpointError(f"{self.origin} does not fit this run: {error}") from None


class NotFitting(Exception):
    """Something that was saved is not what the run that is to go on from it has in its place."""


def entry(saved: Mapping[str, Any], key: str, kind: type[Entry]) -> Entry:
    """Return the value saved under a key, as it was read from JSON, or raise NotFitting."""
    if key not in saved:
        raise NotFitting(f"it has no {key!r}")
    # JSON knows one kind of numbers.
    if not isinstance(saved[key], int | float if kind is float else kind):
        raise NotFitting(f"its {key!r} is a {type(saved[key]).__name__}, not a {kind.__name__}")
    return cast(Entry, saved[key])


def check_alike(saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise NotFitting for other names, shapes or dtypes, which torch itself would round."""
    for name in [*wanted, *saved]:
        if name not in saved:
            raise NotFitting(f"it has no {name!r}")
        if name not in wanted:
            raise NotFitting(f"it has {name!r}, and this run has not")
        check_tensor(name, saved[name], wanted[name].dtype, wanted[name].shape)


def check_tensor(name: str, saved: Tensor, dtype: torch.dtype, shape: torch.Size) -> None:
    """Raise NotFitting for another dtype or shape."""
    if saved.dtype != dtype:
        raise NotFitting(f"{name} is {saved.dtype}, not {dtype}")
    if saved.shape != shape:
        raise NotFitting(f"{name} has shape {list(saved.shape)}, not {list(shape)}")


def copies_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the host, contiguous, for a safetensors file knows no other order."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
