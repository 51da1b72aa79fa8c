"""An image torso that only acts, on a CPU, with its weights in the order that oneDNN wants.

Where weights may change between any two calls, each call puts them into that order. Those of an
actor are the same until it loads others, so here it is done once for each version, and rectifiers
are part of the layer before them. Features are those of the torso to the last bit.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from impala_async.models.entry_conv import EntryConv
from impala_async.models.leaves import as_pixels
from impala_async.models.torso import ImageTorso

# Weights are laid out for so many rows, however many act: one order sums in one way.
ROWS = 16
# torch calls these where it compiles for a CPU.
_OPS = torch.ops.mkldnn
_RELU = {"attr": "relu", "scalars": [], "algorithm": ""}
Layer = Callable[[Tensor], Tensor]


class PackedTorso:
    """Computes as a torso did at the first call, or at the first one since `forget`."""

    def __init__(self, torso: ImageTorso, convs: list[nn.Conv2d]) -> None:
        """Each convolution and linear layer has a rectifier behind it, which may be packed."""
        self._torso, self._convs = torso, convs
        (self._leaf,) = torso.images
        self._layers: list[Layer] = []

    def forget(self) -> None:
        """The torso has other weights now."""
        self._layers = []

    def __call__(self, obs: dict[str, Tensor]) -> Tensor:
        entry = self._convs[0]
        assert isinstance(entry, EntryConv)
        squares = entry.squares(as_pixels(self._leaf, obs[self._leaf.name]))
        if squares is None:
            features: Tensor = self._torso(obs)
            return features
        squares = squares.to(entry.weight.dtype)
        if not self._layers:
            self._layers = self._pack(squares.new_zeros((ROWS, *squares.shape[1:])))
        for layer in self._layers:
            squares = layer(squares)
        return squares

    def _pack(self, image: Tensor) -> list[Layer]:
        """All layers, for as many images as these."""
        layers: list[Layer] = []
        for conv in self._convs:
            how = {"padding": conv.padding, "dilation": conv.dilation, "groups": conv.groups}
            if isinstance(conv, EntryConv):
                weight, how["stride"] = conv.weight_of_squares(conv.weight.dtype), (1, 1)
            else:
                weight, how["stride"] = conv.weight, conv.stride
            packed = _OPS._reorder_convolution_weight(weight, **how, input_size=image.shape)
            call = _OPS._convolution_pointwise
            layers.append(partial(call, W=packed, B=conv.bias, **how, **_RELU))
            image = layers[-1](image)
        layers.append(partial(torch.flatten, start_dim=1))
        for linear in self._torso.hidden.layers:
            packed = _OPS._reorder_linear_weight(linear.weight, len(image))
            layers.append(partial(_OPS._linear_pointwise, W=packed, B=linear.bias, **_RELU))
        return layers


def packed(torso: nn.Module) -> PackedTorso | None:
    """The same torso packed, where it computes in bfloat16 on a CPU that has that, and consists of
    what can be packed: images through convolutions and linear layers, all rectified."""
    if type(torso) is not ImageTorso or len(torso.images) > 1 or torso.vectors:
        return None
    (body,) = torso.bodies
    is_plain = all(type(layer) in (EntryConv, nn.Conv2d, nn.ReLU) for layer in body.children())
    if not is_plain or torso.hidden.activate is not torch.relu_:
        return None
    convs = [layer for layer in body.children() if isinstance(layer, nn.Conv2d)]
    weight = convs[0].weight
    is_there = torch.backends.mkldnn.is_available() and weight.device.type == "cpu"
    if not is_there or weight.dtype != torch.bfloat16 or not _OPS._is_mkldnn_bf16_supported():
        return None
    return PackedTorso(torso, convs)
