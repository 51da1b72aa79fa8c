"""In which precision torsos compute on a device: as was asked for, or as suits both."""

from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch

from impala_async.errors import ConfigError

# For these bfloat16 halves the work of a CPU that has it; smaller ones gain nothing there.
LARGE_MODELS = frozenset({"nature_cnn", "impala_resnet"})
# What /proc/cpuinfo calls it: of AMD and Intel, and of Arm.
CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def pick_precision(
    name: Literal["auto", "float32", "bfloat16"], model_name: str, device: torch.device
) -> torch.dtype:
    """What torsos compute in on a device; `auto` is bfloat16 where it pays."""
    if name == "float32":
        return torch.float32
    has_it = has_bfloat16(device)
    if name == "bfloat16" and not has_it and device.type == "cuda":
        raise ConfigError(
            f"model.precision: {torch.cuda.get_device_name(device)} has no bfloat16; wants "
            "float32 or auto"
        )
    if name == "bfloat16" or (has_it and (device.type == "cuda" or model_name in LARGE_MODELS)):
        return torch.bfloat16
    return torch.float32


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies in bfloat16, and does not only imitate it."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return bool(CPU_FLAGS & _cpu_flags())


@lru_cache
def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    names = ("flags", "Features")
    return frozenset(
        flag for line in lines if line.startswith(names) for flag in line.partition(":")[2].split()
    )
