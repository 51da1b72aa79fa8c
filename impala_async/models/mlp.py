"""The multi-layer perceptron torso, and the initialisation that every layer here gets.

N rows, F features in, H features out
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

# In place: a linear layer does not need its own output for the backward pass.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh_, "relu": torch.relu_}

HIDDEN_GAIN = math.sqrt(2)


def orthogonal_linear(num_in: int, num_out: int, gain: float) -> nn.Linear:
    """A linear layer with orthogonal weights and zero biases."""
    layer = nn.Linear(num_in, num_out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class MLPTorso(nn.Module):
    """Linear layers, each followed by the activation."""

    def __init__(self, num_in: int, hidden_sizes: Sequence[int], activation: str) -> None:
        super().__init__()
        widths = (num_in, *hidden_sizes)
        self.num_out = widths[-1]
        self.layers = nn.ModuleList(
            orthogonal_linear(before, after, HIDDEN_GAIN) for before, after in pairwise(widths)
        )
        self._activate = _ACTIVATIONS[activation]

    def forward(self, features_NF: Tensor) -> Tensor:
        hidden_NH = features_NF
        for layer in self.layers:
            hidden_NH = self._activate(layer(hidden_NH))
        return hidden_NH
