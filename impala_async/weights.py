"""What comes down: a version, the layout of a model's parameters, and one flat buffer of them."""

import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from impala_async.spec import ArraySpec


class Version(NamedTuple):
    """Which weights: the learner's start (epoch) and its optimizer steps (update). Ordered."""

    epoch: int
    update: int


NO_VERSION = Version(0, 0)
"""Before any weights: epochs count from 1."""


@dataclass(frozen=True)
class WeightsLayout:
    """The parameters of a model in the order in which the flat buffer holds them."""

    arrays: tuple[ArraySpec, ...]

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that two equal layouts share: the test that both sides built one model."""
        arrays = [{"name": a.name, "shape": a.shape, "dtype": a.dtype} for a in self.arrays]
        text = json.dumps(arrays, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()[:16]

    @cached_property
    def num_bytes(self) -> int:
        return sum(array.num_bytes for array in self.arrays)

    def views(self, buffer: NDArray[np.uint8]) -> Iterator[tuple[str, NDArray[Any]]]:
        """Name and typed view of every array in a flat buffer."""
        offset = 0
        for array in self.arrays:
            part = buffer[offset : offset + array.num_bytes]
            yield array.name, part.view(array.dtype).reshape(array.shape)
            offset += array.num_bytes


@dataclass(frozen=True)
class Weights:
    """One version of the weights, flat. The buffer belongs to this object alone."""

    version: Version
    buffer: NDArray[np.uint8]

    def digest(self) -> bytes:
        """16 bytes over the content, so that a damaged transfer is noticed.

        A CRC of each quarter: a hash against forgery took each actor a tenth of its time.
        """
        quarters = np.array_split(self.buffer, 4)
        return b"".join(zlib.crc32(quarter.data).to_bytes(4) for quarter in quarters)


class Lineage:
    """Which versions are ancestors of the weights now in training.

    A start from a checkpoint begins a new epoch at that checkpoint's update. What earlier epochs
    did beyond it was lost: data acted with such weights belongs to a dead branch. `forks` holds
    the epochs of this branch and the update at which each one began.
    """

    def __init__(self, epoch: int, forks: dict[int, int] | None = None) -> None:
        self.epoch = epoch
        self.forks = dict(forks or {})

    def is_ancestor(self, version: Version) -> bool:
        """Whether the present weights grew out of a version of this or an earlier epoch."""
        if version.epoch == self.epoch:
            return True
        if version.epoch not in self.forks:
            return False
        later = (at for epoch, at in self.forks.items() if epoch > version.epoch)
        return version.update <= min(later, default=-1)

    def resumed(self, epoch: int, update: int) -> "Lineage":
        """The lineage of a new epoch that starts from one of our checkpoints."""
        return Lineage(epoch, {self.epoch: 0, **self.forks, epoch: update})
