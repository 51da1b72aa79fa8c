"""Torsos, from observation leaves to features: those by name, and a user's own (docs/models.md).

Rows come flat: they may be the columns of an actor or all rows of a batch.

N rows, C columns, F features in, H features out, P parameters of the action
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from impala_async.config.model import ModelSection
from impala_async.errors import ConfigError, SpacesError
from impala_async.models.entry_conv import EntryConv
from impala_async.models.leaves import (
    as_pixels,
    as_vector,
    image_shape,
    images_of,
    is_image,
    vector_size,
)
from impala_async.schema import ArraySpec, ObsSpec
from impala_async.user_code import UserCode, import_callable

# In place: a linear layer does not need its own output for the backward pass.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh_, "relu": torch.relu_}
Net = Callable[[Mapping[str, NDArray[Any]]], NDArray[np.float32]]
Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)
# A residual branch starts small, or six of them would multiply the signal by eight.
RESIDUAL_GAIN = 0.5
# To build the network of one takes 5 ms, and an actor that nobody knows may ask for a thousand.
MOST_IMAGES = 64
# For these bfloat16 halves the work of a device that has it; smaller ones gain nothing there.
LARGE_MODELS = frozenset({"nature_cnn", "impala_resnet"})
# With these the features of a row hang on chance, or on the rows that happen to be beside it.
UNSOUND = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
# /proc/cpuinfo lists bfloat16 under these names: `bf16` on Arm, the others on AMD and Intel.
CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def orthogonal(layer: Layer, gain: float = math.sqrt(2)) -> Layer:
    """The layer, with orthogonal weights and zero biases."""
    draw_orthogonal(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


def draw_orthogonal(weight: Tensor, gain: float = 1.0) -> None:
    """Fill it, unless it has no memory, for which torch 2.11 would load its compiler."""
    if not weight.is_meta:
        nn.init.orthogonal_(weight, gain)


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
    if len(leaves) == 1:
        return as_vector(leaves[0], obs[leaves[0].name])
    return torch.cat([as_vector(leaf, obs[leaf.name]) for leaf in leaves], -1)


class ImageTorso(nn.Module):
    """Convolutions for each image, then hidden layers for what they give and all other leaves.

    The name of the section says which leaves are images. `make_body` makes the convolutions for one
    with so many channels, to be rectified. `sizes` are those of the hidden layers where the section
    names none.
    """

    def __init__(
        self,
        obs: ObsSpec,
        section: ModelSection,
        *,
        make_body: Callable[[int, ModelSection], nn.Module],
        sizes: Sequence[int],
    ) -> None:
        super().__init__()
        self.images = images_of(section.name, obs)
        if not self.images:
            raise SpacesError(f"model.name {section.name} {_wants(section.name, obs)}")
        if (num_images := len(self.images)) > MOST_IMAGES:
            raise SpacesError(
                f"model.name {section.name}: the observation has {num_images} images, each with "
                f"convolutions of its own: wants {MOST_IMAGES} at most"
            )
        self.vectors = [leaf for leaf in obs.leaves if leaf not in self.images]
        self.bodies = nn.ModuleList()
        num_seen = sum(vector_size(leaf) for leaf in self.vectors)
        for leaf in self.images:
            channels, height, width, _ = image_shape(leaf)
            self.bodies.append(make_body(channels, section))
            with torch.no_grad():
                num_seen += self.bodies[-1](torch.zeros(1, channels, height, width)).numel()
        self.hidden = Hidden(num_seen, section.hidden_sizes or sizes, section.activation or "relu")
        self.num_out = self.hidden.num_out

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        parts = [
            # Behind `flatten` the gradient of a rectifier lies in memory as its features do, and
            # takes an eighteenth of the time.
            torch.relu_(body(as_pixels(leaf, obs[leaf.name])).flatten(1))
            for body, leaf in zip(self.bodies, self.images, strict=True)
        ]
        if self.vectors:
            parts.append(joined(self.vectors, obs))
        return self.hidden.through(parts[0] if len(parts) == 1 else torch.cat(parts, -1))


def _wants(name: str, obs: ObsSpec) -> str:
    """The images that a torso of this name lacks, in words."""
    if (leaf := next(filter(is_image, obs.leaves), None)) is not None:
        _, height, width, _ = image_shape(leaf)
        which = repr(leaf.name) if leaf.name else "the observation"
        instead = "mlp" if name == "small_cnn" else "impala_resnet or small_cnn"
        return f"is for larger images than {which} of {height} x {width}: use {instead}"
    return (
        "wants an image in the observation, of three dimensions, or a stack of images of bytes, of "
        "four: use mlp"
    )


def nature_body(num_channels: int, section: ModelSection) -> nn.Module:
    """That of the Nature DQN (Mnih et al., 2015), for images of about 84 x 84."""
    return nn.Sequential(
        orthogonal(EntryConv(num_channels, 32, 8, stride=4)),
        nn.ReLU(inplace=True),
        orthogonal(nn.Conv2d(32, 64, 4, stride=2)),
        nn.ReLU(inplace=True),
        orthogonal(nn.Conv2d(64, 64, 3)),
    )


def minatar_body(num_channels: int, section: ModelSection) -> nn.Module:
    """That of MinAtar (Young and Tian, 2019), for images of about 10 x 10."""
    return nn.Sequential(orthogonal(EntryConv(num_channels, 16, 3)))


def resnet_body(num_channels: int, section: ModelSection) -> nn.Module:
    """The deep one of IMPALA (arXiv 1802.01561, figure 3), `model.width` times as wide."""
    stages: list[nn.Module] = []
    for num_out in (16, 32, 32):
        make_first = nn.Conv2d if stages else EntryConv
        first = orthogonal(make_first(num_channels, num_out * section.width, 3, padding=1))
        stages.append(_Stage(first, num_out * section.width))
        num_channels = num_out * section.width
    return nn.Sequential(*stages)


class _Stage(nn.Module):
    """A convolution, a pooling that halves the image, and two residual blocks."""

    def __init__(self, first: nn.Conv2d, num: int) -> None:
        super().__init__()
        self.enter = nn.Sequential(first, nn.MaxPool2d(3, stride=2, padding=1))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.ReLU(),
                orthogonal(nn.Conv2d(num, num, 3, padding=1)),
                nn.ReLU(inplace=True),
                orthogonal(nn.Conv2d(num, num, 3, padding=1), RESIDUAL_GAIN),
            )
            for _ in range(2)
        )

    def forward(self, image: Tensor) -> Tensor:
        seen: Tensor = self.enter(image)
        for block in self.blocks:
            seen = seen + block(seen)
        return seen


TORSOS: dict[str, Callable[[ObsSpec, ModelSection], nn.Module]] = {
    "mlp": MLPTorso,
    "nature_cnn": partial(ImageTorso, make_body=nature_body, sizes=(512,)),
    "small_cnn": partial(ImageTorso, make_body=minatar_body, sizes=(128,)),
    "impala_resnet": partial(ImageTorso, make_body=resnet_body, sizes=(256,)),
}


def choose_torso(section: ModelSection, obs: ObsSpec) -> ModelSection:
    """The section with the torso that `auto` is for these observations."""
    if section.name != "auto":
        return section
    images = images_of("small_cnn", obs)
    with_images = "nature_cnn" if images == images_of("nature_cnn", obs) else "small_cnn"
    return section.model_copy(update={"name": with_images if images else "mlp"})


def make_torso(section: ModelSection, obs: ObsSpec) -> nn.Module:
    """One of the kind that `model.name` says; raises SpacesError if there is none.

    A user's own is shown two rows of zeros: what does not fit would fail later, and say less.
    """
    if section.name in TORSOS:
        return TORSOS[section.name](obs, section)
    what = f"model.name: {section.name}"
    make = import_callable(what, section.name, SpacesError)
    with UserCode(what, "when it was made", SpacesError):
        torso = make(obs, section)
    num_out = getattr(torso, "num_out", None)
    if not isinstance(torso, nn.Module) or not isinstance(num_out, int):
        raise SpacesError(f"{what} must make an nn.Module with a whole number num_out")
    for name, module in torso.named_modules():
        if isinstance(module, UNSOUND) and getattr(module, "p", True):
            raise SpacesError(
                f"{what} must give the same features for a row each time, and {name} is "
                f"{type(module).__name__}: leave it out, or use layer normalisation"
            )
    rows = {
        leaf.name: torch.zeros(2, *leaf.shape, dtype=getattr(torch, leaf.dtype))
        for leaf in obs.leaves
    }
    with UserCode(what, f"on two rows of zeros of the leaves {[*rows]}", SpacesError):
        features = torso(dict(rows))
    beside = {leaf.name: _after_ones(leaf, rows[leaf.name]) for leaf in obs.leaves}
    with UserCode(what, "on a row of ones and one of zeros", SpacesError):
        again = torso(beside)
    changed = [leaf for leaf, row in rows.items() if row._version]
    if changed:
        raise SpacesError(f"{what} must not change {changed} in place: it is the batch's memory")
    if not isinstance(features, Tensor):
        raise SpacesError(f"{what} must give a tensor, not {type(features).__name__}")
    if features.shape != (2, num_out) or features.dtype != torch.float32:
        found = f"{features.dtype} of {list(features.shape)} for two rows"
        raise SpacesError(f"{what} must give float32 of [N, {num_out}], its num_out, not {found}")
    is_like = isinstance(again, Tensor) and again.shape == features.shape
    if is_like and not (features.is_meta or (features[0].isfinite() | again[0].isfinite()).any()):
        raise SpacesError(f"{what} gives no finite number, for a row of zeros nor for one of ones")
    if not is_like or not (
        features.is_meta or torch.allclose(features[1], again[1], equal_nan=True)
    ):
        raise SpacesError(
            f"{what} must give the same features for a row each time, whatever is beside it, and "
            "does not: leave out dropout, noise, layers that are made in forward, and what looks "
            "at other rows, as an nn.LSTM over them or the mean of a batch does"
        )
    own, used = {id(w) for w in torso.parameters() if w.requires_grad}, _weights_behind(features)
    if not used <= own:
        raise SpacesError(
            f"{what} has weights that its nn.Module does not know, so nothing would train them: "
            "put layers into nn.ModuleList, not into a list, and make all of them in __init__"
        )
    if own and not used:
        raise SpacesError(
            f"{what}: no gradient comes from its features to its weights: drop no_grad, detach or "
            "numpy, or say that they stay as they are, by requires_grad_(False)"
        )
    return torso


def _after_ones(leaf: ArraySpec, rows: Tensor) -> Tensor:
    """The second of two rows, behind one of ones if there is such a category."""
    first = rows[:1] if 1 in leaf.choices else torch.ones_like(rows[:1])
    return torch.cat([first, rows[1:]])


def _weights_behind(features: Tensor) -> set[int]:
    """The ids of all weights that a gradient would come to."""
    nodes: list[Any] = [features.grad_fn]
    seen: set[Any] = {None}
    while nodes:
        if (node := nodes.pop()) not in seen:
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
    return {id(node.variable) for node in seen if hasattr(node, "variable")}


def by_numpy(
    torso: object, head: nn.Linear, normalize: Callable[[Any], NDArray[np.float32]] | None
) -> Net | None:
    """The net in numpy over the layers' own memory, if one leaf of floats goes in; else None."""
    if type(torso) is not MLPTorso or [leaf.dtype for leaf in torso.leaves] != ["float32"]:
        return None
    (leaf,), is_tanh = torso.leaves, torso.activate is torch.tanh_
    activate: Callable[..., Any] = np.tanh if is_tanh else partial(np.maximum, 0.0)
    *hidden, last = [
        (layer.weight.detach().numpy().T, layer.bias.detach().numpy())
        for layer in (*torso.layers, head)
    ]

    def net(obs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        values = obs[leaf.name]
        features_CF = values.reshape(len(values), -1)
        if normalize is not None:
            features_CF = normalize(features_CF)
        for weight, bias in hidden:
            features_CF = features_CF @ weight
            features_CF += bias
            activate(features_CF, out=features_CF)
        weight, bias = last
        parameters_CP: NDArray[np.float32] = features_CF @ weight
        parameters_CP += bias
        return parameters_CP

    return net


def device_of(name: str) -> torch.device:
    """The device of that name; `auto` is a GPU if there is one."""
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(usual if name == "auto" else name)


def pick_precision(
    name: Literal["auto", "float32", "bfloat16"], model_name: str, device: torch.device
) -> torch.dtype:
    """The precision of torsos on a device; `auto` is bfloat16 where that is real, and pays."""
    if device.type == "cpu":
        is_real = bool(CPU_FLAGS & _cpu_flags())
    else:
        is_real = torch.cuda.get_device_capability(device) >= (8, 0)
        if name == "bfloat16" and not is_real:
            gpu = torch.cuda.get_device_name(device)
            raise ConfigError(f"model.precision: {gpu} has no bfloat16; wants float32 or auto")
    is_coarse = name == "bfloat16" or (name == "auto" and is_real and model_name in LARGE_MODELS)
    return torch.bfloat16 if is_coarse else torch.float32


@lru_cache
def _cpu_flags() -> frozenset[str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    return frozenset()
