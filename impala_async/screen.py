"""The checks of `trajectory.find_fault` in as few passes over memory as possible.

Most messages are sound. For a schema without masks and categories that shows in a handful of sums
and maxima over whole stretches of their planes; a message that does not look sound in this way, for
whatever reason, is looked at closely. So a verdict is never other than `find_fault`'s.

    C columns, T action rows
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impala_async.layout import Bytes2D, Leaf
from impala_async.spec import ActionPart, ArraySpec, Schema
from impala_async.trajectory import LOG_PROB_SLACK, Fault, columns_over, find_fault, largest_of

Stretch = slice
"""Bytes of a plane."""
Numbers = tuple[Stretch, str]
"""Numbers of some dtype, none of which may be NaN or too large."""
Indices = tuple[Stretch, int]
"""Integers of 32 bits, all of which must be below a limit, and not below 0."""


class Screen:
    """Checks messages of one schema."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        leaves = schema.layout.leaves
        self._is_plain = schema.action.legal is None and all(map(_is_plain, schema.obs.leaves))
        self._is_plain &= all(map(_is_even, schema.action.parts))
        self._is_plain &= all(state.dtype == "float32" for state in schema.state)
        self._mask = _stretch(leaves["mask"])
        self._flags = Stretch(_stretch(leaves["terminated"]).start, self._mask.stop)
        self._log_probs = _stretch(leaves["log_prob"])
        self._is_probability = all(part.kind == "discrete" for part in schema.action.parts)
        # State, log-probabilities and rewards lie one behind the other.
        rewards = _stretch(leaves["reward"])
        self._small_numbers = [(Stretch(0, rewards.stop), "float32"), *_action_numbers(schema)]
        self._obs_numbers = list(_obs_numbers(schema))
        self._small_indices = list(_action_indices(schema))
        self._obs_indices = list(_window_indices(schema))

    def is_sound(self, obs: Bytes2D, small: Bytes2D) -> bool:
        """Whether nothing is wrong with these columns; of a plain schema it may say no too soon."""
        if self._is_plain:
            return self._looks_sound(obs, small)
        return self.find_fault(obs, small) is None

    def find_fault(self, obs: Bytes2D, small: Bytes2D) -> Fault | None:
        """The first thing that is wrong with the columns in these planes."""
        if self._is_plain and self._looks_sound(obs, small):
            return None
        return find_fault(self._schema, columns_over(self._schema, obs, small))

    def count_valid(self, small: Bytes2D) -> NDArray[np.int64]:
        """Valid rows of each column, once its mask is known to hold flags."""
        counts: NDArray[np.int64] = np.add.reduce(small[:, self._mask], axis=1, dtype=np.int64)
        return counts

    def _looks_sound(self, obs: Bytes2D, small: Bytes2D) -> bool:
        if _largest(small[:, self._flags]) > 1:
            return False
        if self._is_probability and not (
            _largest(small[:, self._log_probs].view(np.float32)) <= LOG_PROB_SLACK
        ):
            return False
        for plane, indices in ((small, self._small_indices), (obs, self._obs_indices)):
            for stretch, limit in indices:
                # Viewed as unsigned, a negative index is a huge one.
                if _largest(plane[:, stretch].view(np.uint32)) >= limit:
                    return False
        with np.errstate(all="ignore"):
            return all(
                _are_moderate(plane[:, stretch].view(dtype))
                for plane, numbers in ((small, self._small_numbers), (obs, self._obs_numbers))
                for stretch, dtype in numbers
            )


def _are_moderate(numbers: NDArray[Any]) -> bool:
    limit = largest_of(numbers.dtype)
    # With a NaN neither is.
    return bool(_largest(numbers) <= limit and np.minimum.reduce(numbers, axis=None) >= -limit)


def _largest(numbers: NDArray[Any]) -> Any:
    # What `max` comes to after a call or two more, which count here.
    return np.maximum.reduce(numbers, axis=None)


def _obs_numbers(schema: Schema) -> Iterator[Numbers]:
    for leaf in schema.obs.leaves:
        if leaf.may_be_large:
            yield _stretch(schema.layout.leaves[f"obs/{leaf.name}"]), leaf.dtype


def _action_numbers(schema: Schema) -> Iterator[Numbers]:
    for part in schema.action.parts:
        if not part.choices:
            yield _stretch(schema.layout.leaves[f"action/{part.name}"]), "float32"


def _action_indices(schema: Schema) -> Iterator[Indices]:
    for part in schema.action.parts:
        if part.choices:
            yield _stretch(schema.layout.leaves[f"action/{part.name}"]), part.choices[0]


def _window_indices(schema: Schema) -> Iterator[Indices]:
    for leaf in schema.obs.leaves:
        if leaf.is_stack:
            frames = schema.layout.leaves[f"obs/{leaf.name}"]
            yield _stretch(schema.layout.leaves[f"window/{leaf.name}"]), frames.shape[0]


def _stretch(leaf: Leaf) -> Stretch:
    num_bytes = math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
    return Stretch(leaf.offset, leaf.offset + num_bytes)


def _is_plain(leaf: ArraySpec) -> bool:
    """Whether it may hold any bytes, or any moderate numbers."""
    return not leaf.choices and leaf.dtype != "bool"


def _is_even(part: ActionPart) -> bool:
    """Whether one limit holds for all its items."""
    return len(set(part.choices)) <= 1
