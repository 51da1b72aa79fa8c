"""The account of one batch while it is with the learner: which columns live, what passes they had.

    B columns of the batch

Runs on: learner thread
"""

import numpy as np
from numpy.typing import NDArray

from impala_async.learner.loop.ledger import Settlement


class BatchAccount:
    """Columns are alive until they are dropped, for one counted reason."""

    def __init__(self, batch: int, filled_B: NDArray[np.bool_]) -> None:
        self.batch = batch
        self.alive_B: NDArray[np.bool_] = filled_B.copy()
        self._passes_B = np.zeros(len(filled_B), np.int64)
        self._dropped: dict[str, int] = {}
        self._partial: dict[str, int] = {}

    def use(self) -> None:
        """One pass of every column that is alive."""
        self._passes_B += self.alive_B

    def drop(self, which_B: NDArray[np.bool_], reason: str) -> None:
        """These columns are not trained on any more."""
        which_B = which_B & self.alive_B
        columns = int(which_B.sum())
        if columns:
            passes = int(self._passes_B[which_B].sum())
            self._dropped[reason] = self._dropped.get(reason, 0) + columns
            self._partial[reason] = self._partial.get(reason, 0) + passes
            self.alive_B &= ~which_B

    def settle(self, num_passes: int) -> Settlement:
        """The batch is done: what is alive now is trained."""
        trained = int(self.alive_B.sum())
        return Settlement(
            batch=self.batch,
            trained=trained,
            dropped=self._dropped,
            passes_done=int(self._passes_B.sum()),
            passes_init_short=trained * num_passes - int(self._passes_B[self.alive_B].sum()),
            passes_partial=self._partial,
        )
