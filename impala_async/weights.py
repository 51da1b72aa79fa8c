"""Weights come down: a version, the layout of a model's parameters, and one flat buffer of them."""

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from impala_async.schema import ArraySpec, digest_of


class Version(NamedTuple):
    """Which weights: the learner's start (epoch) and its optimizer steps (update). Ordered."""

    epoch: int
    update: int


NO_VERSION = Version(0, 0)
"""The version before any weights: epochs count from 1."""
BFLOAT16 = "bfloat16"
"""numpy does not know it, so no array has it for its own dtype; weights may travel in it."""


@dataclass(frozen=True)
class WeightsLayout:
    """The parameters of a model, and how the flat buffer holds them: in their order, but those in
    bfloat16 behind all others, so that each is aligned and nothing lies between."""

    arrays: tuple[ArraySpec, ...]
    rounded: frozenset[str] = frozenset()
    """The names of those that the buffer holds in bfloat16."""

    def coarse(self, names: Iterable[str]) -> "WeightsLayout":
        return WeightsLayout(self.arrays, frozenset(names))

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(BFLOAT16 if each.name in self.rounded else each.dtype for each in self.arrays)

    def to_json(self) -> bytes:
        """The layout as JSON, for an actor that has no model of its own."""
        arrays = [
            {"name": array.name, "shape": array.shape, "dtype": dtype}
            for array, dtype in zip(self.arrays, self.dtypes, strict=True)
        ]
        return json.dumps(arrays, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that two equal layouts share: the test that both sides built one model."""
        return digest_of(self.to_json())

    @cached_property
    def num_bytes(self) -> int:
        return max((place.stop for place in self.places), default=0)

    def misfit(self, buffer: NDArray[np.uint8]) -> str:
        """Why nobody can act with such a buffer; empty for what this layout is of."""
        if buffer.nbytes != self.num_bytes:
            return f"they have {buffer.nbytes} bytes, not {self.num_bytes}"
        with np.errstate(all="ignore"):
            for place, dtype in zip(self.places, self.dtypes, strict=True):
                part: NDArray[Any] = buffer[place]
                if dtype == BFLOAT16:
                    part = np.left_shift(part.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
                elif dtype.startswith("float"):
                    part = part.view(dtype)
                # A sum is quick, and infinite where its numbers are merely huge.
                if not np.isfinite(part.sum(dtype=np.float32)) and not np.isfinite(part).all():
                    return "a number in them is not finite"
        return ""

    @cached_property
    def places(self) -> tuple[slice, ...]:
        places, end = {}, 0
        for array in sorted(self.arrays, key=lambda array: array.name in self.rounded):
            is_coarse = array.name in self.rounded
            begin, end = end, end + (2 * array.num_items if is_coarse else array.num_bytes)
            places[array.name] = slice(begin, end)
        return tuple(places[array.name] for array in self.arrays)


@dataclass(frozen=True)
class Weights:
    """One version of the weights, flat. The buffer belongs to this object alone."""

    version: Version
    buffer: NDArray[np.uint8]
    layout_digest: bytes = b""
    """The layout of the buffer; empty for the one that both sides know a model by."""

    def digest(self) -> bytes:
        """16 bytes over the content, so that a damaged transfer is noticed."""
        # A CRC of each quarter: a hash against forgery took each actor a tenth of its time.
        quarters = np.array_split(self.buffer, 4)
        return b"".join(zlib.crc32(quarter.data).to_bytes(4) for quarter in quarters)


class Lineage:
    """Which versions are ancestors of the weights now in training.

    A start from a checkpoint begins a new epoch at that checkpoint's update. The updates of
    earlier epochs beyond it were lost: data acted with such weights belongs to a dead branch.
    `forks` holds the epochs of this branch and the update at which each one began.
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
