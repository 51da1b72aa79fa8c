"""The multi-layer perceptron torso, and the initialisation that every layer here gets.

`by_numpy` is for acting: with few columns torch's calls cost more than the sums.

N rows, C columns, F features in, H features out, P parameters of the action
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from impala_async.config.model import ModelSection
from impala_async.models.leaves import as_vector, vector_size
from impala_async.schema import ArraySpec, ObsSpec

# In place: a linear layer does not need its own output for the backward pass.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh_, "relu": torch.relu_}
_NUMPY_ACTIVATIONS: dict[Callable[..., Any], Callable[[Any], Any]] = {
    torch.tanh_: lambda values: np.tanh(values, out=values),
    torch.relu_: lambda values: np.maximum(values, 0.0, out=values),
}
Net = Callable[[Mapping[str, NDArray[Any]]], NDArray[np.float32]]

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)
HIDDEN_GAIN = math.sqrt(2)


def orthogonal(layer: Layer, gain: float = HIDDEN_GAIN) -> Layer:
    """The layer, with orthogonal weights and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


class Hidden(nn.Module):
    """Linear layers, each followed by the activation; for a torso to have or to be."""

    def __init__(self, num_in: int, sizes: Sequence[int], activation: str) -> None:
        super().__init__()
        widths = (num_in, *sizes)
        self.num_out = widths[-1]
        self.layers = nn.ModuleList(
            orthogonal(nn.Linear(before, after)) for before, after in pairwise(widths)
        )
        self.activate = ACTIVATIONS[activation]

    def through(self, features_NF: Tensor) -> Tensor:
        hidden_NH = features_NF
        for layer in self.layers:
            hidden_NH = self.activate(layer(hidden_NH))
        return hidden_NH


class MLPTorso(Hidden):
    """All leaves, flat and one after the other, through hidden layers."""

    def __init__(self, obs: ObsSpec, section: ModelSection) -> None:
        super().__init__(
            sum(vector_size(leaf) for leaf in obs.leaves),
            section.hidden_sizes or (64, 64),
            section.activation or "tanh",
        )
        self.leaves = obs.leaves

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        return self.through(joined(self.leaves, obs))


def joined(leaves: Sequence[ArraySpec], obs: dict[str, Tensor]) -> Tensor:
    """These leaves as one vector per row."""
    if len(leaves) == 1:
        return as_vector(leaves[0], obs[leaves[0].name])
    return torch.cat([as_vector(leaf, obs[leaf.name]) for leaf in leaves], -1)


def by_numpy(torso: object, head: nn.Linear) -> Net | None:
    """From one leaf of floats to what the head gives, as torch computes it but for rounding.

    It reads the layers' own memory, where newer weights are copied to. None for other torsos.
    """
    if type(torso) is not MLPTorso or [leaf.dtype for leaf in torso.leaves] != ["float32"]:
        return None
    (leaf,), activate = torso.leaves, _NUMPY_ACTIVATIONS[torso.activate]
    *hidden, last = [
        (layer.weight.detach().numpy().T, layer.bias.detach().numpy())
        for layer in (*torso.layers, head)
    ]

    def net(obs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        values = obs[leaf.name]
        features_CF = values.reshape(len(values), -1)
        for weight, bias in hidden:
            features_CF = features_CF @ weight
            features_CF += bias
            activate(features_CF)
        weight, bias = last
        parameters_CP: NDArray[np.float32] = features_CF @ weight
        parameters_CP += bias
        return parameters_CP

    return net
