"""The torso that sees images, with the convolutions of the Nature DQN, of MinAtar and of IMPALA.

Each image leaf goes through convolutions of its own; what comes out, and every leaf that is no
image, goes through hidden layers.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from impala_async.config.model import ModelSection
from impala_async.errors import SpacesError
from impala_async.models.leaves import as_image, image_shape, is_image, vector_size
from impala_async.models.mlp import HIDDEN_GAIN, Hidden, init_orthogonal, joined
from impala_async.schema import ArraySpec, ObsSpec

# A residual branch starts small, or six of them would multiply the signal by eight.
RESIDUAL_GAIN = 0.5


class ImageTorso(nn.Module):
    """Convolutions and hidden layers.

    Args:
        make_body: makes the convolutions for an image with so many channels.
        sizes: those of the hidden layers, where the section names none.
        for_smaller: the torsos for images that are too small for this one.
    """

    def __init__(
        self,
        obs: ObsSpec,
        section: ModelSection,
        *,
        make_body: Callable[[int, ModelSection], nn.Module],
        sizes: Sequence[int],
        for_smaller: str = "impala_resnet or small_cnn",
    ) -> None:
        super().__init__()
        self._name, self._for_smaller = section.name, for_smaller
        self._images = [leaf for leaf in obs.leaves if is_image(leaf)]
        self._vectors = [leaf for leaf in obs.leaves if not is_image(leaf)]
        if not self._images:
            raise SpacesError(
                f"model.name {section.name} wants an image in the observation, of three "
                "dimensions, or a stack of images of bytes, of four: use mlp"
            )
        self._channels_last = [image_shape(leaf)[3] for leaf in self._images]
        self.bodies = nn.ModuleList(
            make_body(image_shape(leaf)[0], section) for leaf in self._images
        )
        num_seen = sum(
            self._num_seen(body, leaf) for body, leaf in zip(self.bodies, self._images, strict=True)
        )
        self.hidden = Hidden(
            num_seen + sum(vector_size(leaf) for leaf in self._vectors),
            section.hidden_sizes or sizes,
            section.activation or "relu",
        )
        self.num_out = self.hidden.num_out

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        parts = [
            body(as_image(obs[leaf.name], is_last)).flatten(1)
            for body, leaf, is_last in zip(
                self.bodies, self._images, self._channels_last, strict=True
            )
        ]
        if self._vectors:
            parts.append(joined(self._vectors, obs))
        return self.hidden.through(parts[0] if len(parts) == 1 else torch.cat(parts, -1))

    def _num_seen(self, body: nn.Module, leaf: ArraySpec) -> int:
        channels, height, width, _ = image_shape(leaf)
        try:
            with torch.no_grad():
                return int(body(torch.zeros(1, channels, height, width)).numel())
        except RuntimeError:
            which = repr(leaf.name) if leaf.name else "the observation"
            raise SpacesError(
                f"model.name {self._name} is for larger images than {which} of {height} x {width}: "
                f"use {self._for_smaller}"
            ) from None


def nature_body(num_channels: int, section: ModelSection) -> nn.Module:
    """That of the Nature DQN (Mnih et al., 2015), for images of about 84 x 84."""
    return nn.Sequential(
        _conv(num_channels, 32, kernel=8, stride=4),
        nn.ReLU(inplace=True),
        _conv(32, 64, kernel=4, stride=2),
        nn.ReLU(inplace=True),
        _conv(64, 64, kernel=3, stride=1),
        nn.ReLU(inplace=True),
    )


def minatar_body(num_channels: int, section: ModelSection) -> nn.Module:
    """That of MinAtar (Young and Tian, 2019), for images of about 10 x 10."""
    return nn.Sequential(_conv(num_channels, 16, kernel=3, stride=1), nn.ReLU(inplace=True))


def resnet_body(num_channels: int, section: ModelSection) -> nn.Module:
    """The deep one of IMPALA (arXiv 1802.01561, figure 3), `model.width` times as wide."""
    stages: list[nn.Module] = []
    for num_out in (16, 32, 32):
        stages.append(_Stage(num_channels, num_out * section.width))
        num_channels = num_out * section.width
    return nn.Sequential(*stages, nn.ReLU(inplace=True))


class _Stage(nn.Module):
    """A convolution, a pooling that halves the image, and two residual blocks."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.enter = nn.Sequential(
            _conv(num_in, num_out, kernel=3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.ReLU(),
                _conv(num_out, num_out, kernel=3, padding=1),
                nn.ReLU(inplace=True),
                _conv(num_out, num_out, kernel=3, padding=1, gain=RESIDUAL_GAIN),
            )
            for _ in range(2)
        )

    def forward(self, image: Tensor) -> Tensor:
        seen: Tensor = self.enter(image)
        for block in self.blocks:
            seen = seen + block(seen)
        return seen


def _conv(
    num_in: int,
    num_out: int,
    *,
    kernel: int,
    stride: int = 1,
    padding: int = 0,
    gain: float = HIDDEN_GAIN,
) -> nn.Conv2d:
    layer = nn.Conv2d(num_in, num_out, kernel, stride, padding)
    init_orthogonal(layer, gain)
    return layer
