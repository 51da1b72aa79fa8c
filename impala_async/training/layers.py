"""The layers of an actor-critic of hidden layers over numpy's arrays, forwards and backwards.

N rows, F features, H hidden, P outputs of the policy's head
"""

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from impala_async.models.actor_critic import ActorCritic
from impala_async.models.torso import MLPTorso, joined
from impala_async.training.batch import Batch

Array = NDArray[np.float32]


def row_sums(numbers_NA: Array) -> Array:
    # A product with ones adds columns up in a fraction of the time of a sum.
    return numbers_NA @ np.ones(numbers_NA.shape[1], np.float32)


class Linear:
    """A linear layer over its own memory, and its activation, whose gradient follows from what
    comes out."""

    def __init__(self, layer: nn.Linear, activate: object = None) -> None:
        self._layer, self._activate = layer, activate
        self._weight, self._bias = (x.detach().numpy() for x in (layer.weight, layer.bias))

    def forward(self, inputs_NF: Array) -> Array:
        outputs_NH: Array = inputs_NF @ self._weight.T
        outputs_NH += self._bias
        if self._activate is torch.tanh_:
            np.tanh(outputs_NH, out=outputs_NH)
        elif self._activate is torch.relu_:
            np.maximum(outputs_NH, 0.0, out=outputs_NH)
        self._inputs_NF, self._outputs_NH = inputs_NF, outputs_NH
        return outputs_NH

    def backward(self, gradient_NH: Array) -> None:
        """Set the gradients of the layer; the gradient of its outputs may change."""
        if self._activate is torch.tanh_:
            slopes_NH = np.square(self._outputs_NH)
            gradient_NH *= np.subtract(1.0, slopes_NH, out=slopes_NH)
        elif self._activate is torch.relu_:
            gradient_NH *= self._outputs_NH > 0
        sums_H = np.ones(len(gradient_NH), np.float32) @ gradient_NH
        self._layer.bias.grad = torch.from_numpy(sums_H)
        self._layer.weight.grad = torch.from_numpy(gradient_NH.T @ self._inputs_NF)
        self._gradient_NH = gradient_NH

    def gradient_of_inputs(self) -> Array:
        """That of the last gradient."""
        if len(self._weight) == 1:
            # Here a matrix product takes four times as long.
            return cast(Array, self._gradient_NH * self._weight)
        return cast(Array, self._gradient_NH @ self._weight)


class Net:
    """The layers of an actor-critic; a shared torso stands once."""

    def __init__(self, model: ActorCritic) -> None:
        self._model = model
        torsos = [cast(MLPTorso, t) for t in (model.policy_torso, model.value_torso) if t]
        self._torsos = [
            [Linear(cast(nn.Linear, layer), torso.activate) for layer in torso.layers]
            for torso in torsos
        ]
        self._heads = Linear(model.policy_head), Linear(model.value_head)
        self._leaves = torsos[0].leaves

    def forward(self, batch: Batch) -> tuple[Array, Array]:
        """The policy's outputs `[N, P]` and values `[N, 1]`."""
        obs = {name: leaf.flatten(0, 1) for name, leaf in batch.rows_of_obs().items()}
        features_NF = joined(self._leaves, self._model.normal(obs)).numpy()
        found = []
        for torso in self._torsos:
            hidden_NH = features_NF
            for layer in torso:
                hidden_NH = layer.forward(hidden_NH)
            found.append(hidden_NH)
        policy, value = self._heads
        return policy.forward(found[0]), value.forward(found[-1])

    def backward(self, policy_NP: Array, value_N1: Array) -> None:
        """Set the gradients of all parameters from those of outputs and values."""
        below = []
        for head, gradient in zip(self._heads, (policy_NP, value_N1), strict=True):
            head.backward(gradient)
            below.append(head.gradient_of_inputs())
        if len(self._torsos) == 1:
            below = [below[0] + below[1]]
        for torso, gradient_NH in zip(self._torsos, below, strict=True):
            for number, layer in reversed([*enumerate(torso)]):
                layer.backward(gradient_NH)
                if number:
                    gradient_NH = layer.gradient_of_inputs()
