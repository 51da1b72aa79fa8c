"""A batch as tensors, which view the memory of a slot, and the columns it is trained on in parts.

A part has whole columns: a recurrent state runs along a column, and returns run back along it.

    B columns of a batch, T action rows, S = T+1 observation rows, N columns of a part,
    F frames, K frames of a stack
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from impala_async.errors import ConfigError
from impala_async.files import write_whole
from impala_async.schema import Bytes2D, Schema
from impala_async.training.checkpoint import copies_of
from impala_async.trajectory import fields_of

# Tries to find the columns at fault, each a forward and a backward pass. The undecided are found.
MAX_TRIES = 32
# Columns that alone stay below these do so together too: a norm overflows at 1e19, a loss at 1e38.
GOOD_NORM, GOOD_LOSS = 1e15, 1e30


@dataclass(frozen=True)
class Batch:
    """The columns of a slot as tensors, as they lie there: the fields are those of `Columns`."""

    obs: dict[str, Tensor]
    actions: dict[str, Tensor]
    state: dict[str, Tensor]
    rewards_BT: Tensor
    log_probs_BT: Tensor
    terminated_BT: Tensor
    truncated_BT: Tensor
    mask_BT: Tensor
    windows: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def in_planes(schema: Schema, obs: Tensor | Bytes2D, small: Tensor | Bytes2D) -> "Batch":
        """View the planes of columns, on any device; nothing is copied."""
        planes = torch.as_tensor(obs), torch.as_tensor(small)
        return Batch(*fields_of(schema.layout.views(*planes, dtype_of=partial(getattr, torch))))

    def tensors(self) -> dict[str, Tensor]:
        """All of them, a leaf's named `field/leaf`, in an order that a schema's batches share."""
        named: dict[str, Tensor] = {}
        for name, part in vars(self).items():
            is_one = isinstance(part, Tensor)
            named |= {name: part} if is_one else {f"{name}/{k}": part[k] for k in part}
        return named

    def rows_of_obs(self) -> dict[str, Tensor]:
        """The leaves as `[B, S, ...]`; of a stack, each row's window over its column's frames."""
        shown = {name: _through(window, self.obs[name]) for name, window in self.windows.items()}
        return {**self.obs, **shown}

    def living(self, alive_B: Tensor) -> "Batch":
        """This batch, in which the columns that are not alive, a tensor on the CPU, are masked."""
        if alive_B.all():
            return self
        alive_B1 = alive_B.to(self.mask_BT.device, non_blocking=True).unsqueeze(-1)
        return replace(self, mask_BT=self.mask_BT & alive_B1)

    def take(self, columns_N: Tensor) -> "Batch":
        """Copy the columns with these numbers, a tensor on the CPU."""
        columns_N = columns_N.to(self.mask_BT.device)
        # `part[columns_N]` takes bytes one by one.
        taken: dict[str, Any] = {
            name: part.index_select(0, columns_N)
            if isinstance(part, Tensor)
            else {k: each.index_select(0, columns_N) for k, each in part.items()}
            for name, part in vars(self).items()
        }
        return Batch(**taken)

    def keep(self, path: Path, about: dict[str, str], **others: Tensor) -> str:
        """Write it for a look at it; return, in words, where it is, or why it is nowhere.

        `safetensors.torch.load_file` reads it. The names are those of the fields and of `others`,
        and `about` becomes its metadata.
        """
        try:
            write_whole(path, save(copies_of({**others, **self.tensors()}), about))
        except OSError as error:
            return f"the last batch cannot be kept in {path}: {error.strerror}"
        return f"the last batch is kept in {path}"


def deal(alive_B: Tensor, max_parts: int, seeds: tuple[int, ...]) -> list[Tensor]:
    """The numbers of the living columns, a tensor on the CPU, dealt to so many parts if they
    suffice: to one alone in order, else as the seeds alone decide. Sizes differ by one at most, and
    no part is empty but one alone."""
    columns_N = alive_B.nonzero().flatten()
    num_parts = min(max_parts, len(columns_N))
    if num_parts <= 1:
        return [columns_N]
    order = np.random.default_rng(seeds).permutation(len(columns_N))
    return list(columns_N[torch.from_numpy(order)].tensor_split(num_parts))


@contextmanager
def only_read(what: str, kept: Mapping[str, Tensor]) -> Iterator[None]:
    """Somebody's code may not change these in place, by their names: ConfigError if it did."""
    # Every change in place increases a tensor's version.
    versions = {name: tensor._version for name, tensor in kept.items()}
    yield
    changed = [name for name, tensor in kept.items() if tensor._version != versions[name]]
    if changed:
        raise ConfigError(
            f"{what} changes {changed[0]} in place, which other passes over the batch read too: it "
            "must make a new tensor"
        )


def find_culprits(columns_N: Tensor, is_good: Callable[[Tensor], bool]) -> Tensor:
    """Those of these columns that are not good, without which the others are, by halving."""
    found = []
    groups, num_tries = deque([columns_N]), 0
    while groups:
        group = groups.popleft()
        num_tries += 1
        if num_tries <= MAX_TRIES and is_good(group):
            continue
        if num_tries >= MAX_TRIES or len(group) == 1:
            found.append(group)
        else:
            groups.extend(group.tensor_split(2))
    return torch.cat(found) if found else columns_N[:0]


def _through(window_BSK: Tensor, frames_BF: Tensor) -> Tensor:
    """[B, S, K, ...]: the frames of each column with these numbers."""
    num_columns, num_frames = frames_BF.shape[:2]
    starts_B = torch.arange(num_columns, device=frames_BF.device) * num_frames
    places = (window_BSK + starts_B[:, None, None]).flatten()
    flat = frames_BF.reshape(-1, *frames_BF.shape[2:])
    return flat.index_select(0, places).view(*window_BSK.shape, *flat.shape[1:])
