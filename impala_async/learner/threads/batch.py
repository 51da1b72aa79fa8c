"""A batch on the learner's device, and the account of its columns while it is there.

    B columns of the batch

Runs on: learner thread; on a GPU it is made on the loader thread
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from impala_async.learner.loop.ledger import Settlement
from impala_async.schema import Schema
from impala_async.training.batch import Batch


class LoadedBatch:
    """The tensors of a batch, which of its columns are alive, and what passes they had.

    Columns are alive until they are dropped, for one counted reason. The counts of a slot are
    copied: the slot may be filled again. `place` is its place in the loader, `batch` its number.
    """

    def __init__(
        self,
        place: int,
        tensors: Batch,
        *,
        batch: int,
        filled_B: NDArray[np.bool_],
        updates_B: NDArray[np.int64],
        valid_rows_B: NDArray[np.int64],
    ) -> None:
        self.place = place
        self.tensors = tensors
        self.batch = batch
        self.updates_B = updates_B.copy()
        self.valid_rows_B = valid_rows_B.copy()
        self.alive_B = filled_B.copy()
        self._passes_B = np.zeros(len(filled_B), np.int64)
        self._dropped: dict[str, int] = {}
        self._partial: dict[str, int] = {}

    @property
    def num_valid_rows(self) -> int:
        """Those of the columns that are alive."""
        return int(self.valid_rows_B[self.alive_B].sum())

    def use(self) -> None:
        """Count one pass of every column that is alive."""
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

    def settle(self, num_passes: int, slot: int | None = None) -> Settlement:
        """The batch is done, and the slot is empty by it: what is alive now is trained."""
        trained = int(self.alive_B.sum())
        return Settlement(
            batch=self.batch,
            trained=trained,
            dropped=self._dropped,
            passes_done=int(self._passes_B.sum()),
            passes_init_short=trained * num_passes - int(self._passes_B[self.alive_B].sum()),
            passes_partial=self._partial,
            slot=slot,
        )


def batch_over(schema: Schema, obs: torch.Tensor, small: torch.Tensor) -> Batch:
    """View planes on any device as the leaves of a batch; nothing is copied."""

    def view(name: str) -> torch.Tensor:
        leaf = schema.layout.leaves[name]
        plane = {"obs": obs, "small": small}[leaf.plane]
        dtype: torch.dtype = getattr(torch, leaf.dtype)
        stop = leaf.offset + math.prod(leaf.shape) * dtype.itemsize
        typed = plane[:, leaf.offset : stop].view(dtype)
        return typed.view(len(plane), *leaf.shape)

    return Batch(
        obs={leaf.name: view(f"obs/{leaf.name}") for leaf in schema.obs.leaves},
        actions={part.name: view(f"action/{part.name}") for part in schema.action.parts},
        state={array.name: view(f"state/{array.name}") for array in schema.state},
        rewards_BT=view("reward"),
        log_probs_BT=view("log_prob"),
        terminated_BT=view("terminated"),
        truncated_BT=view("truncated"),
        mask_BT=view("mask"),
        windows={
            leaf.name: view(f"window/{leaf.name}") for leaf in schema.obs.leaves if leaf.is_stack
        },
    )
