"""Writes an observation that is a window over frames: each frame once, and which ones a row shows.

A column of a trajectory holds an empty frame, the frames of its first row, and one for each row
after it. Whatever a row shows must be among those: its newest frame is new, and the others are in
the row before it, or empty, or the newest itself, as behind a reset. What is not would be lost, so
it is an error.

    C columns, T action rows, S = T+1 observation rows, K frames of a window

Runs on: sampler thread
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from impala_async.errors import EnvError
from impala_async.spec import ArraySpec

EMPTY = 0


class StackWriter:
    """The frames of one leaf of some columns that share a cursor."""

    def __init__(self, leaf: ArraySpec, num_columns: int) -> None:
        self._name = leaf.name
        self._num_window = leaf.shape[0]
        # The last row that was seen: what the next one continues.
        self._last = np.zeros((num_columns, *leaf.shape), leaf.dtype)
        self._words = _wide(self._last)
        self._frames: NDArray[np.uint8]
        self._windows: NDArray[np.int32]

    def show(self, obs: NDArray[Any]) -> None:
        """The row at which the next trajectory begins."""
        np.copyto(self._last, obs)

    def begin(self, frames: NDArray[np.uint8], windows: NDArray[np.int32]) -> None:
        """Open a trajectory in `[C, frames, ...]` and `[C, S, K]`, with the last row as row 0."""
        self._frames, self._windows = frames, windows
        frames[:, EMPTY] = 0
        first = slice(1, 1 + self._num_window)
        frames[:, first] = self._last
        windows[:, 0] = np.arange(1, 1 + self._num_window)

    def write(self, row: int, obs: NDArray[Any]) -> None:
        """The observation of a row after row 0, in order."""
        newest = self._num_window + row
        self._frames[:, newest] = obs[:, -1]
        windows = self._windows
        windows[:, row, :-1] = windows[:, row - 1, 1:]
        windows[:, row, -1] = newest
        words = _wide(obs)
        if not np.array_equal(words[:, :-1], self._words[:, 1:]):
            slides = (words[:, :-1] == self._words[:, 1:]).reshape(len(words), -1).all(1)
            for column in np.flatnonzero(~slides).tolist():
                windows[column, row] = self._find(column, row, newest, obs[column])
        np.copyto(self._last, obs)

    def _find(self, column: int, row: int, newest: int, window: NDArray[Any]) -> list[int]:
        """Where a window that does not continue the last one has its frames."""
        frames = self._frames[column]
        known = [newest, EMPTY, *self._windows[column, row - 1].tolist()]
        found = []
        for frame in window:
            place = next((place for place in known if np.array_equal(frames[place], frame)), None)
            if place is None:
                which = repr(self._name) if self._name else "the observation"
                raise EnvError(
                    f"env.frame_stack: {which} does not slide by one frame per step, and what "
                    "does not would be lost: set it to off"
                )
            found.append(place)
        return found


def _wide(stacks: NDArray[Any]) -> NDArray[Any]:
    """`[C, K, ...]` as `[C, K, words]`, of as many bytes as fit: fewer items to compare."""
    flat = stacks.reshape(*stacks.shape[:2], -1)
    return flat if flat.shape[-1] % 8 else flat.view(np.uint64)
