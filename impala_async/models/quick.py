"""The acting side of a plain network by numpy: for few columns torch's calls cost more than sums.

Computes what the torch modules compute, from the same memory and the same random numbers, equally
but for rounding. What it does not know goes through torch.

C columns, F numbers of an observation, P parameters of the action, A choices
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from impala_async.models.actor_critic import ActorCritic
from impala_async.models.mlp import MLPTorso

Floats = NDArray[np.float32]

_ACTIVATIONS: dict[Callable[..., Any], Callable[[Floats], Any]] = {
    torch.tanh_: lambda values: np.tanh(values, out=values),
    torch.relu_: lambda values: np.maximum(values, 0.0, out=values),
}


class QuickNet:
    """From one leaf of floats to the parameters of the action: hidden layers and a policy head."""

    def __init__(self, torso: MLPTorso, head: nn.Linear) -> None:
        (self._leaf,) = torso.leaves
        self._activate = _ACTIVATIONS[torso.activate]
        *self._hidden, self._head = (_shared(layer) for layer in (*torso.layers, head))

    @staticmethod
    def of(model: ActorCritic) -> "QuickNet | None":
        """None for a network that has more to it."""
        torso, head = model.policy_torso, model.policy_head
        is_plain = model.core is None and not len(model.normalizers) and not len(head.log_stds)
        if type(torso) is not MLPTorso or not is_plain or len(torso.leaves) > 1:
            return None
        return QuickNet(torso, head) if torso.leaves[0].dtype == "float32" else None

    def __call__(self, obs: Mapping[str, NDArray[Any]]) -> Floats:
        values = obs[self._leaf.name]
        features_CF: Floats = values.reshape(len(values), -1)
        for weight, bias in self._hidden:
            features_CF = features_CF @ weight
            features_CF += bias
            self._activate(features_CF)
        weight, bias = self._head
        parameters_CP: Floats = features_CF @ weight
        parameters_CP += bias
        return parameters_CP


def sample(logits_CA: Floats, generator: torch.Generator) -> tuple[NDArray[np.int64], Floats]:
    """As `Categorical` samples, and the log-probabilities. Changes the logits."""
    logits_CA -= logits_CA.max(-1, keepdims=True)
    rates_CA = np.exp(logits_CA)
    logits_CA -= np.log(rates_CA.sum(-1, keepdims=True))
    # The race does not ask for rates that add up to 1.
    rates_CA /= torch.empty(rates_CA.shape).exponential_(generator=generator).numpy()
    actions_C = rates_CA.argmax(-1)
    return actions_C, logits_CA[np.arange(len(actions_C)), actions_C]


def _shared(layer: nn.Module) -> tuple[Floats, Floats]:
    """Weight and bias in the layer's own memory, where newer weights are copied to."""
    assert isinstance(layer, nn.Linear)
    return layer.weight.detach().numpy().T, layer.bias.detach().numpy()
