"""All that an update step needs to go on as if it had never stopped."""

from collections.abc import Mapping
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
    """It shares no memory with a step."""

    tensors: Tensors
    """The groups model, optimizer, and target where the algorithm has a target network."""
    state: Mapping[str, Any]
    """The entries optimizer and algorithm of `state.json`, maybe among others."""
    origin: str = "the checkpoint"
    """The name of this state in errors."""


def entry(saved: Mapping[str, Any], key: str, kind: type[Entry]) -> Entry:
    """Return what is saved under a key; raises CheckpointError for nothing, or another kind."""
    if key not in saved:
        raise CheckpointError(f"it has no {key!r}")
    # JSON knows one kind of numbers.
    if not isinstance(saved[key], int | float if kind is float else kind):
        found = type(saved[key]).__name__
        raise CheckpointError(f"its {key!r} is a {found}, not a {kind.__name__}")
    return cast(Entry, saved[key])


def check_alike(saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError for other names, shapes or dtypes, which torch itself would round."""
    for name in [*wanted, *saved]:
        if name not in saved:
            raise CheckpointError(f"it has no {name!r}")
        if name not in wanted:
            raise CheckpointError(f"it has {name!r}, and this run has not")
        check_tensor(name, saved[name], wanted[name].dtype, wanted[name].shape)


def check_tensor(name: str, saved: Tensor, dtype: torch.dtype, shape: torch.Size) -> None:
    """Raise CheckpointError for another dtype or shape."""
    if (saved.dtype, saved.shape) != (dtype, shape):
        found = f"{saved.dtype} of shape {list(saved.shape)}"
        raise CheckpointError(f"{name} is {found}, not {dtype} of shape {list(shape)}")


def copies_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the host, contiguous, for a safetensors file knows no other order."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
