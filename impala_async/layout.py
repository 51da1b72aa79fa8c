"""Where each array of a column lies in memory.

A column is stored in two planes, each one contiguous block: `obs` (large; received in place) and
`small` (everything else). The arrays of a plane follow each other, aligned, in the order in which
they are given.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAF_ALIGNMENT = 8
COLUMN_ALIGNMENT = 64

Bytes2D = NDArray[np.uint8]
Place = tuple[str, tuple[int, ...], str]
"""Name, shape (with the leading S or T, where there is one) and dtype of an array."""


class Leaf(NamedTuple):
    """Where one array of a column lives; `shape` includes the leading S or T."""

    plane: Literal["obs", "small"]
    offset: int
    shape: tuple[int, ...]
    dtype: str


class ColumnLayout:
    """Offsets of every leaf in the two planes of a column."""

    def __init__(self, obs: Iterable[Place], small: Iterable[Place]) -> None:
        self.leaves: dict[str, Leaf] = {}
        self.obs_bytes = self._place("obs", obs)
        self.small_bytes = self._place("small", small)

    @property
    def column_bytes(self) -> int:
        return self.obs_bytes + self.small_bytes

    def views(self, obs: Bytes2D, small: Bytes2D) -> dict[str, NDArray[Any]]:
        """Typed `[columns, S or T, ...]` views over `[columns, bytes]` planes; no copies."""
        planes = {"obs": obs, "small": small}
        return {name: _view(planes[leaf.plane], leaf) for name, leaf in self.leaves.items()}

    def gaps(self, plane: Literal["obs", "small"]) -> list[slice]:
        """The bytes of a plane in which no array lies; they are zero."""
        found, end = [], 0
        for leaf in self.leaves.values():
            if leaf.plane == plane:
                found.append(slice(end, leaf.offset))
                end = leaf.offset + math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
        found.append(slice(end, self.obs_bytes if plane == "obs" else self.small_bytes))
        return [gap for gap in found if gap.stop > gap.start]

    def _place(self, plane: Literal["obs", "small"], places: Iterable[Place]) -> int:
        offset = 0
        for name, shape, dtype in places:
            self.leaves[name] = Leaf(plane, offset, shape, dtype)
            offset += _aligned(math.prod(shape) * np.dtype(dtype).itemsize, LEAF_ALIGNMENT)
        return _aligned(offset, COLUMN_ALIGNMENT)


def _view(plane: Bytes2D, leaf: Leaf) -> NDArray[Any]:
    dtype = np.dtype(leaf.dtype)
    strides = [dtype.itemsize]
    for size in reversed(leaf.shape[1:]):
        strides.insert(0, strides[0] * size)
    return np.ndarray(
        (len(plane), *leaf.shape),
        dtype,
        buffer=plane.data,
        offset=leaf.offset,
        strides=(plane.shape[1], *(strides if leaf.shape else ())),
    )


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
