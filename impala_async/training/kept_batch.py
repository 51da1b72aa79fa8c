"""A batch that made updates fail, kept for a look: `safetensors.torch.load_file` reads it.

The names are those of `Batch`; metadata says what was not finite.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from impala_async.training.batch import Batch
from impala_async.whole_file import write_whole


def keep_batch(path: Path, batch: Batch, is_failed_B: Tensor, about: Mapping[str, str]) -> str:
    """Write it; where it is, in words, or why it is nowhere."""
    found: dict[str, Tensor] = {"is_failed_B": is_failed_B}
    for item in fields(batch):
        part = getattr(batch, item.name)
        leaves = {"": part} if isinstance(part, Tensor) else {f"/{k}": v for k, v in part.items()}
        found |= {f"{item.name}{name}": leaf for name, leaf in leaves.items()}
    whole = {
        name: leaf.to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, leaf in found.items()
    }
    try:
        write_whole(path, save(whole, dict(about)))
    except OSError as error:
        return f"the last batch cannot be kept in {path}: {error.strerror}"
    return f"the last batch is kept in {path}"
