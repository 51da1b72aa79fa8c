"""An image torso that only acts, on a CPU, with its weights in the order that oneDNN wants.

Where weights may change between any two calls, each call puts them into that order. Those of an
actor stay the same for many calls, so here it is done once for each version, and a rectifier is
part of the layer before it. Features are those of the torso, to the last bit.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from impala_async.models.entry_conv import WORD, EntryConv
from impala_async.models.leaves import as_pixels
from impala_async.models.torso import ImageTorso

# torch calls these where it compiles for a CPU. They are no promise of its own.
_OPS = torch.ops.mkldnn
_NAMES = (
    *("_is_mkldnn_bf16_supported", "_reorder_convolution_weight", "_reorder_linear_weight"),
    *("_convolution_pointwise", "_linear_pointwise"),
)
_RELU = {"attr": "relu", "scalars": [], "algorithm": ""}
# Weights are laid out for so many rows, however many act, so that sums are always in one order.
ROWS = 16
Layer = Callable[[Tensor], Tensor]


class PackedTorso:
    """Computes what its torso does."""

    def __init__(self, torso: ImageTorso, convs: list[nn.Conv2d]) -> None:
        """Each convolution and linear layer has a rectifier behind it, as `packed` has seen."""
        self._torso, self._convs = torso, convs
        (self._leaf,) = torso.images
        self._weights = tuple(torso.parameters())
        self._layers: list[Layer] = []
        self._packed_at: tuple[int, ...] = ()
        self._sizes: list[torch.Size] = []

    def __call__(self, obs: dict[str, Tensor]) -> Tensor:
        entry = self._convs[0]
        assert isinstance(entry, EntryConv)
        features = entry.squares(as_pixels(self._leaf, obs[self._leaf.name]))
        if features is None:
            return self._torso(obs)  # type: ignore[no-any-return]
        features = features.to(entry.weight.dtype)
        # torch counts what is written into a tensor.
        written = tuple(weight._version for weight in self._weights)
        if written != self._packed_at:
            self._sizes = self._sizes or self._sizes_behind(features)
            self._layers, self._packed_at = self._pack(), written
        for layer in self._layers:
            features = layer(features)
        return features

    def _sizes_behind(self, squares: Tensor) -> list[torch.Size]:
        """The size of what goes into each convolution, where so many rows go into the first."""
        features = squares.new_zeros((ROWS, *squares.shape[1:]))
        sizes = [features.shape]
        for conv in self._convs[:-1]:
            weight, stride = _as_called(conv)
            features = nn.functional.conv2d(features, weight, stride=stride)
            sizes.append(features.shape)
        return sizes

    def _pack(self) -> list[Layer]:
        layers: list[Layer] = []
        for conv, size in zip(self._convs, self._sizes, strict=True):
            weight, stride = _as_called(conv)
            how = {"padding": conv.padding, "stride": stride, "dilation": (1, 1), "groups": 1}
            weight = _OPS._reorder_convolution_weight(weight, **how, input_size=size)
            call = _OPS._convolution_pointwise
            layers.append(partial(call, W=weight, B=conv.bias, **how, **_RELU))
        layers.append(partial(torch.flatten, start_dim=1))
        for linear in self._torso.hidden.layers:
            weight = _OPS._reorder_linear_weight(linear.weight, ROWS)
            layers.append(partial(_OPS._linear_pointwise, W=weight, B=linear.bias, **_RELU))
        return layers


def packed(torso: nn.Module) -> PackedTorso | None:
    """The same torso packed, where it computes in bfloat16 on a CPU that has that, and consists of
    what can be packed: an image of bytes through convolutions without padding, of which the first
    takes squares, and linear layers, all rectified."""
    if type(torso) is not ImageTorso or len(torso.images) > 1 or torso.vectors:
        return None
    (body,), (leaf,) = torso.bodies, torso.images
    layers = list(body.children())
    is_plain = all(type(layer) in (EntryConv, nn.Conv2d, nn.ReLU) for layer in layers)
    if not is_plain or torso.hidden.activate is not torch.relu_ or leaf.dtype != "uint8":
        return None
    convs = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
    weight = convs[0].weight
    if convs[0].stride != (WORD, WORD) or weight.dtype != torch.bfloat16 or not weight.is_cpu:
        return None
    is_there = torch.backends.mkldnn.is_available() and all(hasattr(_OPS, n) for n in _NAMES)
    return PackedTorso(torso, convs) if is_there and _OPS._is_mkldnn_bf16_supported() else None


def _as_called(conv: nn.Conv2d) -> tuple[Tensor, tuple[int, ...]]:
    """Its weight and its stride, the first one's over squares."""
    if isinstance(conv, EntryConv):
        return conv.weight_of_squares(conv.weight.dtype), (1, 1)
    return conv.weight, conv.stride
