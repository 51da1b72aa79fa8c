"""Which columns of a batch are trained on together, when it is split into parts.

Whole columns, because a recurrent state runs along a column and returns run back along it.

    B columns of a batch, T action rows, N columns of a part
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from impala_async.training.batch import Batch


class Part(NamedTuple):
    """Some columns of a batch, or all of it, and which of the living columns it has."""

    batch: Batch
    mask_BT: Tensor
    is_in_B: Tensor


def whole(batch: Batch, alive_B: Tensor) -> Part:
    """All of a batch, the columns that are dead masked."""
    return Part(batch, living_mask(batch, alive_B), alive_B)


def parts_of(
    batch: Batch, alive_B: Tensor, max_parts: int, seeds: tuple[int, ...]
) -> Iterator[Part]:
    """Random parts of the living columns, as `split_columns` has them; one alone is the whole."""
    groups = split_columns(alive_B, max_parts, seeds) if max_parts > 1 else []
    if len(groups) <= 1:
        yield whole(batch, alive_B)
        return
    for columns_N in groups:
        part = batch.take(columns_N.to(batch.mask_BT.device))
        is_in_B = torch.zeros_like(alive_B).index_fill(0, columns_N, True)
        yield Part(part, part.mask_BT, is_in_B)


def living_mask(batch: Batch, alive_B: Tensor) -> Tensor:
    """[B, T]: the valid rows of the columns that are alive, a tensor on the CPU."""
    if alive_B.all():
        # As it is with a dead column, or what is compiled would be compiled anew for it.
        return batch.mask_BT.contiguous()
    return batch.mask_BT & alive_B.to(batch.mask_BT.device, non_blocking=True).unsqueeze(-1)


def split_columns(alive_B: Tensor, max_parts: int, seeds: tuple[int, ...]) -> list[Tensor]:
    """Numbers of the living columns, in random parts whose sizes differ by one at most.

    The order hangs on `seeds` alone. None of the parts is empty, unless no column lives; a single
    part is the batch as it is.
    """
    columns = alive_B.nonzero().flatten()
    num_parts = min(max_parts, len(columns))
    if num_parts <= 1:
        return [columns]
    order = np.random.default_rng(seeds).permutation(len(columns))
    return list(columns[torch.from_numpy(order)].tensor_split(num_parts))
