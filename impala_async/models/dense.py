"""Hidden layers by numpy, for one thread of a CPU: its tanh takes a tenth of the time of torch's.

N rows, F features in, H features out
"""

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Activation = Literal["tanh", "relu"]
# Numbers that are not finite are noticed in the loss.
SILENT = np.errstate(all="ignore")


def pays(features_NF: Tensor) -> bool:
    """Whether layers would give the same sooner by numpy, which has one thread of its own."""
    is_plain = features_NF.dtype == torch.float32 and features_NF.device.type == "cpu"
    return is_plain and torch.get_num_threads() == 1 and not torch.is_autocast_enabled("cpu")


def through(features_NF: Tensor, layers: Iterable[nn.Module], activation: Activation) -> Tensor:
    """Go through linear layers, each of them followed by the activation."""
    weights = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
    return _Layers.apply(features_NF, activation, *weights)  # type: ignore[no-any-return, no-untyped-call]


class _Layers(torch.autograd.Function):
    @staticmethod
    @SILENT
    def forward(ctx: Any, features_NF: Tensor, activation: Activation, *weights: Tensor) -> Tensor:
        hidden = features_NF.detach().numpy()
        ctx.activation, ctx.rows = activation, [hidden]
        ctx.save_for_backward(*weights)
        for matrix, bias in zip(weights[::2], weights[1::2], strict=True):
            hidden = hidden @ matrix.detach().numpy().T
            hidden += bias.detach().numpy()
            # In place: the gradient follows from what comes out.
            if activation == "tanh":
                np.tanh(hidden, out=hidden)
            else:
                np.maximum(hidden, 0.0, out=hidden)
            ctx.rows.append(hidden)
        return torch.from_numpy(hidden)

    @staticmethod
    @once_differentiable
    @SILENT
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].numpy()
        matrices = [matrix.detach().numpy() for matrix in ctx.saved_tensors[::2]]
        found: list[Tensor] = []
        for number in reversed(range(len(matrices))):
            before, after = ctx.rows[number : number + 2]
            if ctx.activation == "tanh":
                # g (1 - tanh^2)
                gradient = gradient - np.multiply(gradient, np.square(after))
            else:
                gradient = gradient * (after > 0)
            # A product with ones adds rows up in a fifth of the time of a sum.
            sums = np.ones(len(gradient), np.float32) @ gradient
            found += [torch.from_numpy(sums), torch.from_numpy(gradient.T @ before)]
            if number or ctx.needs_input_grad[0]:
                gradient = gradient @ matrices[number]
        first = torch.from_numpy(gradient) if ctx.needs_input_grad[0] else None
        return first, None, *reversed(found)
