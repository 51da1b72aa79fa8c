"""Which columns of a part make its loss or gradient not finite: it is halved until that is known.

B columns of a batch, N columns of a part
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from impala_async.training.batch import Batch, Part

# Each is a forward and a backward pass. What is still undecided then counts as found.
MAX_TRIES = 32
# Columns that alone stay below these do so together too: a norm overflows at 1e19, a loss at 1e38.
GOOD_NORM, GOOD_LOSS = 1e15, 1e30


def find_culprits(columns_N: Tensor, is_good: Callable[[Tensor], bool]) -> Tensor:
    """Those of these columns that are not good, without which the others are."""
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


def only(part: Part, batch: Batch, columns_N: Tensor) -> Part:
    """These columns of the batch, which the part has among others."""
    taken = batch.take(columns_N.to(batch.mask_BT.device))
    is_in_B = torch.zeros_like(part.is_in_B).index_fill(0, columns_N, True)
    return Part(taken, taken.mask_BT, is_in_B)
