"""Which columns of a batch are trained on together, when it is split into parts.

Whole columns, because a recurrent state runs along a column and returns run back along it.

    B columns of a batch, N columns of a part
"""

import numpy as np
import torch
from torch import Tensor


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
