"""Torsos, from observation leaves to features: those by name, and a user's own.

`model.name = "package.module:MyTorso"` picks one's own; docs/models.md says what it has to be. Rows
come flat: they may be the columns of an actor or all rows of a batch.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from impala_async.config.model import ModelSection
from impala_async.errors import ConfigError, SpacesError
from impala_async.models.leaves import as_image, image_shape, is_image, vector_size
from impala_async.models.mlp import Hidden, MLPTorso, joined, orthogonal
from impala_async.schema import ObsSpec
from impala_async.user_code import UserCode, import_callable

# A residual branch starts small, or six of them would multiply the signal by eight.
RESIDUAL_GAIN = 0.5
# For these bfloat16 halves the work of a CPU that has it; smaller ones gain nothing there.
LARGE_MODELS = frozenset({"nature_cnn", "impala_resnet"})
# /proc/cpuinfo lists bfloat16 under these names: `bf16` on Arm, the others on AMD and Intel.
CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


class ImageTorso(nn.Module):
    """Convolutions for each image, then hidden layers for what they give and all other leaves.

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
        self._images = [leaf for leaf in obs.leaves if is_image(leaf)]
        self._vectors = [leaf for leaf in obs.leaves if not is_image(leaf)]
        if not self._images:
            raise SpacesError(
                f"model.name {section.name} wants an image in the observation, of three "
                "dimensions, or a stack of images of bytes, of four: use mlp"
            )
        self.bodies = nn.ModuleList()
        num_seen = sum(vector_size(leaf) for leaf in self._vectors)
        for leaf in self._images:
            channels, height, width, _ = image_shape(leaf)
            self.bodies.append(make_body(channels, section))
            try:
                with torch.no_grad():
                    num_seen += self.bodies[-1](torch.zeros(1, channels, height, width)).numel()
            except RuntimeError:
                which = repr(leaf.name) if leaf.name else "the observation"
                raise SpacesError(
                    f"model.name {section.name} is for larger images than {which} of {height} x "
                    f"{width}: use {for_smaller}"
                ) from None
        self.hidden = Hidden(
            num_seen,
            section.hidden_sizes or sizes,
            section.activation or "relu",
        )
        self.num_out = self.hidden.num_out

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        parts = [
            body(as_image(leaf, obs[leaf.name])).flatten(1)
            for body, leaf in zip(self.bodies, self._images, strict=True)
        ]
        if self._vectors:
            parts.append(joined(self._vectors, obs))
        return self.hidden.through(parts[0] if len(parts) == 1 else torch.cat(parts, -1))


def nature_body(num_channels: int, section: ModelSection) -> nn.Module:
    """That of the Nature DQN (Mnih et al., 2015), for images of about 84 x 84."""
    return nn.Sequential(
        orthogonal(nn.Conv2d(num_channels, 32, 8, stride=4)),
        nn.ReLU(inplace=True),
        orthogonal(nn.Conv2d(32, 64, 4, stride=2)),
        nn.ReLU(inplace=True),
        orthogonal(nn.Conv2d(64, 64, 3)),
        nn.ReLU(inplace=True),
    )


def minatar_body(num_channels: int, section: ModelSection) -> nn.Module:
    """That of MinAtar (Young and Tian, 2019), for images of about 10 x 10."""
    return nn.Sequential(orthogonal(nn.Conv2d(num_channels, 16, 3)), nn.ReLU(inplace=True))


def resnet_body(num_channels: int, section: ModelSection) -> nn.Module:
    """The deep one of IMPALA (arXiv 1802.01561, figure 3), `model.width` times as wide."""
    stages: list[nn.Module] = []
    for num_out in (16, 32, 32):
        stages.append(_Stage(num_channels, num_out * section.width))
        num_channels = num_out * section.width
    return nn.Sequential(*stages, nn.ReLU(inplace=True))


class _Stage(nn.Module):
    """A convolution, a pooling that halves the image, and two residual blocks."""

    def __init__(self, num_in: int, num: int) -> None:
        super().__init__()
        self.enter = nn.Sequential(
            orthogonal(nn.Conv2d(num_in, num, 3, padding=1)), nn.MaxPool2d(3, stride=2, padding=1)
        )
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
    "small_cnn": partial(ImageTorso, make_body=minatar_body, sizes=(128,), for_smaller="mlp"),
    "impala_resnet": partial(ImageTorso, make_body=resnet_body, sizes=(256,)),
}


def torso_maker(section: ModelSection, obs: ObsSpec) -> Callable[[], nn.Module]:
    """Makes torsos of the kind that `model.name` says; raises SpacesError if there is none."""
    name = section.name
    if name in TORSOS:
        return partial(TORSOS[name], obs, section)
    imported = import_callable(f"model.name: {name}", name, SpacesError)

    def make_own() -> nn.Module:
        with UserCode(f"model.name: {name}", "when it was made", SpacesError):
            torso = imported(obs, section)
        _check_own(name, torso, obs)
        return torso  # type: ignore[no-any-return]

    return make_own


def pick_precision(
    name: Literal["auto", "float32", "bfloat16"], model_name: str, device: torch.device
) -> torch.dtype:
    """The precision of torsos on a device; `auto` is bfloat16 where that is real, and pays."""
    is_gpu = device.type == "cuda"
    if is_gpu:
        has_it = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        has_it = bool(CPU_FLAGS & _cpu_flags())
    if name == "bfloat16" and is_gpu and not has_it:
        raise ConfigError(
            f"model.precision: {torch.cuda.get_device_name(device)} has no bfloat16; wants "
            "float32 or auto"
        )
    pays = has_it and (is_gpu or model_name in LARGE_MODELS)
    is_coarse = name == "bfloat16" or (name == "auto" and pays)
    return torch.bfloat16 if is_coarse else torch.float32


def _check_own(name: str, torso: Any, obs: ObsSpec) -> None:
    """Show it two rows of zeros: what does not fit would fail later, and say less."""
    wants = f"model.name: {name} must"
    num_out = getattr(torso, "num_out", None)
    if not isinstance(torso, nn.Module) or not isinstance(num_out, int):
        raise SpacesError(f"{wants} make an nn.Module with a whole number num_out")
    rows = {
        leaf.name: torch.zeros(2, *leaf.shape, dtype=getattr(torch, leaf.dtype))
        for leaf in obs.leaves
    }
    with torch.no_grad(), UserCode(f"model.name: {name}", "on two rows of zeros", SpacesError):
        features = torso(dict(rows))
    changed = [leaf for leaf, row in rows.items() if row._version]
    if changed:
        raise SpacesError(f"{wants} not change {changed} in place: it is the batch's own memory")
    if not isinstance(features, Tensor):
        raise SpacesError(f"{wants} give a tensor, not {type(features).__name__}")
    if features.shape != (2, num_out) or features.dtype != torch.float32:
        found = f"{features.dtype} of {list(features.shape)} for two rows"
        raise SpacesError(f"{wants} give float32 of [N, {num_out}], its num_out, not {found}")


@lru_cache
def _cpu_flags() -> frozenset[str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    return frozenset()
