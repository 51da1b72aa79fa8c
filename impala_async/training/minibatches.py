"""Which columns of a batch are trained on together, when it is split into minibatches.

Whole columns, because a recurrent state runs through a column and returns run back through it.

    B columns of a batch, N columns of a minibatch
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Minibatches:
    """Splits the living columns anew, in random order, at every pass."""

    def __init__(self, num_minibatches: int, seed: int) -> None:
        self._num_minibatches = num_minibatches
        self._random = np.random.default_rng(seed)

    def split(self, alive_B: Tensor) -> list[Tensor]:
        """Numbers of columns, in parts whose sizes differ by one at most; none is empty.

        A single part means the batch as it is.
        """
        columns = alive_B.nonzero().flatten()
        num_parts = min(self._num_minibatches, len(columns))
        if num_parts <= 1:
            return [columns]
        order = torch.from_numpy(self._random.permutation(len(columns)))
        return list(columns[order].tensor_split(num_parts))

    def state(self) -> dict[str, Any]:
        """Where the random order has got to, for a checkpoint."""
        return dict(self._random.bit_generator.state)

    def restore(self, state: Mapping[str, Any]) -> None:
        self._random.bit_generator.state = dict(state)
