"""A batch as tensors, which view the memory of a slot, and the parts it is trained on in.

A part has whole columns, because a recurrent state runs along a column and returns run back along
it.

B columns of a batch, T action rows, S = T+1 observation rows, N columns of a part,
F frames, K frames of a stack
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from impala_async.files import write_whole
from impala_async.schema import Schema
from impala_async.training.state import copies_of
from impala_async.trajectory import Columns

# Tries to find the columns at fault. Each is a forward and a backward pass; what is still undecided
# behind them counts as found.
MAX_TRIES = 32
# Columns that alone stay below these do so together too: a norm overflows at 1e19, a loss at 1e38.
GOOD_NORM, GOOD_LOSS = 1e15, 1e30


@dataclass(frozen=True)
class Batch:
    """The columns of a slot as tensors, column by column as they lie there."""

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
    def over(columns: Columns) -> "Batch":
        """View the columns' memory; nothing is copied."""
        return Batch(
            obs={name: torch.from_numpy(leaf) for name, leaf in columns.obs.items()},
            actions={name: torch.from_numpy(part) for name, part in columns.actions.items()},
            state={name: torch.from_numpy(part) for name, part in columns.state.items()},
            rewards_BT=torch.from_numpy(columns.rewards_CT),
            log_probs_BT=torch.from_numpy(columns.log_probs_CT),
            terminated_BT=torch.from_numpy(columns.terminated_CT),
            truncated_BT=torch.from_numpy(columns.truncated_CT),
            mask_BT=torch.from_numpy(columns.mask_CT),
            windows={name: torch.from_numpy(part) for name, part in columns.windows.items()},
        )

    @staticmethod
    def in_planes(schema: Schema, obs: Tensor, small: Tensor) -> "Batch":
        """View the planes of columns, on any device; nothing is copied."""

        def view(name: str) -> Tensor:
            leaf = schema.layout.leaves[name]
            plane = {"obs": obs, "small": small}[leaf.plane]
            dtype: torch.dtype = getattr(torch, leaf.dtype)
            stop = leaf.offset + math.prod(leaf.shape) * dtype.itemsize
            typed = plane[:, leaf.offset : stop].view(dtype)
            return typed.view(len(plane), *leaf.shape)

        leaves = schema.obs.leaves
        return Batch(
            obs={leaf.name: view(f"obs/{leaf.name}") for leaf in leaves},
            actions={part.name: view(f"action/{part.name}") for part in schema.action.parts},
            state={array.name: view(f"state/{array.name}") for array in schema.state},
            rewards_BT=view("reward"),
            log_probs_BT=view("log_prob"),
            terminated_BT=view("terminated"),
            truncated_BT=view("truncated"),
            mask_BT=view("mask"),
            windows={leaf.name: view(f"window/{leaf.name}") for leaf in leaves if leaf.is_stack},
        )

    def rows_of_obs(self) -> dict[str, Tensor]:
        """The leaves as `[B, S, ...]`; of a stack, each row's window over its column's frames."""
        shown = {name: _through(window, self.obs[name]) for name, window in self.windows.items()}
        return {**self.obs, **shown}

    def take(self, columns_N: Tensor) -> "Batch":
        """Copy the columns with these numbers."""
        taken: dict[str, Any] = {}
        for item in fields(self):
            part = getattr(self, item.name)
            if isinstance(part, Tensor):
                taken[item.name] = part[columns_N]
            else:
                taken[item.name] = {name: leaf[columns_N] for name, leaf in part.items()}
        return Batch(**taken)

    def keep(self, path: Path, about: dict[str, str], **others: Tensor) -> str:
        """Write it for a look at it; return, in words, where it is, or why it is nowhere.

        `safetensors.torch.load_file` reads it. The names are those of the fields and of `others`,
        and `about` becomes its metadata.
        """
        found = dict(others)
        for item in fields(self):
            part = getattr(self, item.name)
            leaves = {"": part} if isinstance(part, Tensor) else {f"/{k}": part[k] for k in part}
            found |= {f"{item.name}{name}": leaf for name, leaf in leaves.items()}
        try:
            write_whole(path, save(copies_of(found), about))
        except OSError as error:
            return f"the last batch cannot be kept in {path}: {error.strerror}"
        return f"the last batch is kept in {path}"


class Part(NamedTuple):
    """Some columns of a batch, or all of it, and which of the living columns it has."""

    batch: Batch
    mask_BT: Tensor
    is_in_B: Tensor


def parts_of(
    batch: Batch, alive_B: Tensor, max_parts: int, seeds: tuple[int, ...]
) -> Iterator[Part]:
    """Deal the living columns to parts at random; a single part is the batch as it is.

    Args:
        batch: on any device.
        alive_B: which columns are trained on, a tensor on the CPU. Dead ones are masked.
        max_parts: how many parts there are, if so many columns live. None is empty, and their
            sizes differ by one at most.
        seeds: the order hangs on these alone.
    """
    num_parts = min(max_parts, int(alive_B.sum())) if max_parts > 1 else 1
    if num_parts <= 1:
        yield Part(batch, living_mask(batch, alive_B), alive_B)
        return
    columns = alive_B.nonzero().flatten()
    order = np.random.default_rng(seeds).permutation(len(columns))
    for columns_N in columns[torch.from_numpy(order)].tensor_split(num_parts):
        yield part_with(batch, columns_N)


def part_with(batch: Batch, columns_N: Tensor) -> Part:
    """Copy these columns of the batch."""
    part = batch.take(columns_N.to(batch.mask_BT.device))
    is_in_B = torch.zeros(len(batch.mask_BT), dtype=torch.bool).index_fill(0, columns_N, True)
    return Part(part, part.mask_BT, is_in_B)


def find_culprits(columns_N: Tensor, is_good: Callable[[Tensor], bool]) -> Tensor:
    """Those of these columns that are not good, without which the others are.

    They make a loss or gradient not finite: columns are halved until it is known which.
    """
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


def living_mask(batch: Batch, alive_B: Tensor) -> Tensor:
    """[B, T]: the valid rows of the columns that are alive, a tensor on the CPU."""
    if alive_B.all():
        return batch.mask_BT
    return batch.mask_BT & alive_B.to(batch.mask_BT.device, non_blocking=True).unsqueeze(-1)


def _through(window_BSK: Tensor, frames_BF: Tensor) -> Tensor:
    """[B, S, K, ...]: the frames of each column with these numbers."""
    num_columns, num_frames = frames_BF.shape[:2]
    starts_B = torch.arange(num_columns, device=frames_BF.device) * num_frames
    places = (window_BSK + starts_B[:, None, None]).flatten()
    flat = frames_BF.reshape(-1, *frames_BF.shape[2:])
    return flat.index_select(0, places).view(*window_BSK.shape, *flat.shape[1:])
