"""What comes down: a version, the layout of a model's parameters, and one flat buffer of them."""

import hashlib
import json
import zlib
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
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
BFLOAT16_WORDS = "uint16"
"""How a layout names bfloat16, which numpy does not know. No weights are whole numbers."""


@dataclass(frozen=True)
class WeightsLayout:
    """The parameters of a model in the order in which the flat buffer holds them.

    Those in bfloat16 lie behind all others there, so that each is aligned and nothing lies between.
    """

    arrays: tuple[ArraySpec, ...]

    def coarse(self, names: Container[str]) -> "WeightsLayout":
        """The same parameters, those of these names in bfloat16."""
        return WeightsLayout(
            tuple(
                replace(array, dtype=BFLOAT16_WORDS) if array.name in names else array
                for array in self.arrays
            )
        )

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that two equal layouts share: the test that both sides built one model."""
        arrays = [{"name": a.name, "shape": a.shape, "dtype": a.dtype} for a in self.arrays]
        text = json.dumps(arrays, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()[:16]

    @cached_property
    def num_bytes(self) -> int:
        return sum(array.num_bytes for array in self.arrays)

    @cached_property
    def places(self) -> tuple[slice, ...]:
        """Where each array lies in the flat buffer."""
        order = sorted(
            range(len(self.arrays)), key=lambda k: self.arrays[k].dtype == BFLOAT16_WORDS
        )
        ends = accumulate(self.arrays[k].num_bytes for k in order)
        places = {
            k: slice(end - self.arrays[k].num_bytes, end)
            for k, end in zip(order, ends, strict=True)
        }
        return tuple(places[k] for k in range(len(self.arrays)))

    def views(self, buffer: NDArray[np.uint8]) -> Iterator[tuple[str, NDArray[Any]]]:
        """Name and typed view of every array in a flat buffer."""
        for array, place in zip(self.arrays, self.places, strict=True):
            yield array.name, buffer[place].view(array.dtype).reshape(array.shape)


@dataclass(frozen=True)
class Weights:
    """One version of the weights, flat. The buffer belongs to this object alone."""

    version: Version
    buffer: NDArray[np.uint8]
    layout_digest: bytes = b""
    """Of the buffer's layout; empty for the one that both sides know a model by."""

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
