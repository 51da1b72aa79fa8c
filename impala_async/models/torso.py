"""Torsos, from observation leaves to features: those by name, and what a user's own has to be.

    class MyTorso(nn.Module):
        def __init__(self, obs: ObsSpec, section: ModelSection) -> None:
            super().__init__()
            self.num_out = 64           # how many features come out
            ...

        def forward(self, obs: dict[str, Tensor]) -> Tensor:
            ...                         # leaves of [N, ...] in, [N, num_out] out

`model.name = "package.module:MyTorso"` picks it. Rows come flat: N may be the columns of an actor
or all rows of a batch. docs/models.md says more.

N rows, F features
"""

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from impala_async.config.model import ModelSection
from impala_async.errors import ConfigError, SpacesError
from impala_async.models.cnn import ImageTorso, minatar_body, nature_body, resnet_body
from impala_async.models.mlp import MLPTorso
from impala_async.schema import ObsSpec
from impala_async.user_code import UserCode, import_callable

# For these bfloat16 halves the work of a CPU that has it; smaller ones gain nothing there.
LARGE_MODELS = frozenset({"nature_cnn", "impala_resnet"})
# /proc/cpuinfo lists bfloat16 under these names: `bf16` on Arm, the others on AMD and Intel.
CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


class Torso(Protocol):
    """An nn.Module that is made from an ObsSpec and the `model` section."""

    num_out: int

    def __call__(self, obs: dict[str, Tensor]) -> Tensor:
        """`[N, ...]` leaves to `[N, num_out]` features."""
        ...


TORSOS: dict[str, Callable[[ObsSpec, ModelSection], Torso]] = {
    "mlp": MLPTorso,
    "nature_cnn": partial(ImageTorso, make_body=nature_body, sizes=(512,)),
    "small_cnn": partial(ImageTorso, make_body=minatar_body, sizes=(128,), for_smaller="mlp"),
    "impala_resnet": partial(ImageTorso, make_body=resnet_body, sizes=(256,)),
}


def torso_maker(section: ModelSection, obs: ObsSpec) -> Callable[[], Torso]:
    """Makes torsos of the kind that `model.name` says; raises SpacesError if there is none."""
    make = TORSOS.get(section.name)
    if make is not None:
        return partial(make, obs, section)
    imported = import_callable(f"model.name: {section.name}", section.name, SpacesError)

    def make_own() -> Torso:
        with UserCode(f"model.name: {section.name}", "when it was made", SpacesError):
            torso = imported(obs, section)
        _check_own(section.name, torso, obs)
        return cast(Torso, torso)

    return make_own


def is_own(section: ModelSection) -> bool:
    """Whether the section names a torso of the user's."""
    return section.name not in TORSOS


def blaming(section: ModelSection) -> UserCode:
    """In which an own torso is called, so that what it raises is told as its own."""
    return UserCode(f"model.name: {section.name}", "to make features", SpacesError)


def pick_precision(
    name: Literal["auto", "float32", "bfloat16"], model_name: str, device: torch.device
) -> torch.dtype:
    """The precision of torsos on a device; `auto` is bfloat16 where that is real, and pays."""
    is_gpu = device.type == "cuda"
    if is_gpu:
        has_it = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        has_it = bool(CPU_FLAGS & _cpu_flags())
    if name == "auto":
        pays = has_it and (is_gpu or model_name in LARGE_MODELS)
        return torch.bfloat16 if pays else torch.float32
    if name == "bfloat16" and is_gpu and not has_it:
        raise ConfigError(
            f"model.precision: {torch.cuda.get_device_name(device)} has no bfloat16; wants "
            "float32 or auto"
        )
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _check_own(name: str, torso: Any, obs: ObsSpec) -> None:
    """Show it two rows of zeros: what does not fit would fail later, and say less."""
    num_out = getattr(torso, "num_out", None)
    if not isinstance(torso, nn.Module) or not isinstance(num_out, int):
        raise SpacesError(
            f"model.name: {name} must make an nn.Module with a whole number num_out, as "
            "impala_async/models/torso.py says"
        )
    rows = {
        leaf.name: torch.zeros(2, *leaf.shape, dtype=getattr(torch, leaf.dtype))
        for leaf in obs.leaves
    }
    with torch.no_grad(), UserCode(f"model.name: {name}", "on two rows of zeros", SpacesError):
        features = torso(dict(rows))
    for leaf, row in rows.items():
        if row._version:
            raise SpacesError(
                f"model.name: {name} changes the observation {leaf!r} that it is given, which is "
                "the batch's own memory: it must make a new tensor"
            )
    if features.shape != (2, num_out) or features.dtype != torch.float32:
        raise SpacesError(
            f"model.name: {name} must give float32 of [N, {num_out}], its num_out; for two rows "
            f"it gave {features.dtype} of {list(features.shape)}"
        )


@lru_cache
def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    listed = [line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(" ".join(listed).split())
