"""Hidden layers by numpy, where one thread of a CPU computes them: torch's tanh is slow there.

N rows, F features in, H features out
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Activation = Literal["tanh", "relu"]
Array = NDArray[np.float32]
Weights = list[tuple[Array, Array]]


def pays(features_NF: Tensor) -> bool:
    """Whether layers would give the same sooner by numpy. Our doors let that have one thread."""
    is_plain = features_NF.dtype == torch.float32 and features_NF.device.type == "cpu"
    return is_plain and torch.get_num_threads() == 1 and not torch.is_autocast_enabled("cpu")


def through(features_NF: Tensor, layers: Iterable[nn.Module], activation: Activation) -> Tensor:
    """Go through linear layers, each of them followed by the activation."""
    tensors = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
    return _Layers.apply(features_NF, activation, *tensors)  # type: ignore[no-any-return, no-untyped-call]


def arrays_of(tensors: Iterable[Tensor]) -> Weights:
    """Matrix and bias of each layer, over the same memory."""
    arrays = [tensor.detach().numpy() for tensor in tensors]
    return list(zip(arrays[::2], arrays[1::2], strict=True))


def rows_behind(rows_NF: Array, weights: Weights, activation: Activation) -> Iterator[Array]:
    """The rows behind each layer."""
    for matrix, bias in weights:
        rows_NF = rows_NF @ matrix.T
        rows_NF += bias
        # In place: a gradient follows from what comes out.
        if activation == "tanh":
            np.tanh(rows_NF, out=rows_NF)
        else:
            np.maximum(rows_NF, 0.0, out=rows_NF)
        yield rows_NF


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features_NF: Tensor, activation: Activation, *tensors: Tensor) -> Tensor:
        first = features_NF.detach().numpy()
        # Numbers that are not finite are noticed in the loss.
        with np.errstate(all="ignore"):
            ctx.rows = [first, *rows_behind(first, arrays_of(tensors), activation)]
        ctx.activation = activation
        ctx.save_for_backward(*tensors)
        return torch.from_numpy(ctx.rows[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, weights = gradients[0].numpy(), arrays_of(ctx.saved_tensors)
        is_input_learned, found = ctx.needs_input_grad[0], list[Tensor]()
        ones = np.ones(len(gradient), np.float32)
        with np.errstate(all="ignore"):
            for number in reversed(range(len(weights))):
                before, after = ctx.rows[number : number + 2]
                if ctx.activation == "tanh":
                    gradient = gradient - gradient * np.square(after)
                else:
                    gradient = gradient * (after > 0)
                # A product with ones is a faster sum over rows.
                for_weights = ones @ gradient, gradient.T @ before
                found += map(torch.from_numpy, for_weights)
                if number or is_input_learned:
                    gradient = gradient @ weights[number][0]
        first = torch.from_numpy(gradient) if is_input_learned else None
        return first, None, *reversed(found)
