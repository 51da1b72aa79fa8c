"""Trajectories: columns of T action rows and S = T+1 observation rows, and their checks.

A row after an episode's end carries the final observation and no transition: its mask is False.
The last observation row is the bootstrap row, and row 0 of the next trajectory.

    C columns of one message, P choices of all discrete parts
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from impala_async.schema import Bytes2D, ColumnLayout, Leaf, Plane, Schema, num_frames

# A log-probability of a discrete action cannot be positive; this is what fp32 rounding may add.
LOG_PROB_SLACK = 1e-6
# A larger number overflows in float32 once it is squared and summed, as for statistics. A network
# may turn a smaller number into a larger one: the update step finds such columns.
LARGEST = 1e15


@dataclass(frozen=True)
class Columns:
    """Typed views of some columns, over memory that somebody else owns."""

    obs: dict[str, NDArray[Any]]
    actions: dict[str, NDArray[Any]]
    state: dict[str, NDArray[Any]]
    rewards_CT: NDArray[np.float32]
    log_probs_CT: NDArray[np.float32]
    terminated_CT: NDArray[np.bool_]
    truncated_CT: NDArray[np.bool_]
    mask_CT: NDArray[np.bool_]
    windows: dict[str, NDArray[np.int32]]
    """The numbers of the frames in `obs` that each row of a stack shows, `[C, S, frames]`."""


def columns_over(schema: Schema, obs: Bytes2D, small: Bytes2D) -> Columns:
    """View `[columns, bytes]` planes as the leaves of a trajectory; nothing is copied."""
    return Columns(*fields_of(schema.layout.views(obs, small)))


def fields_of(views: Mapping[str, Any]) -> tuple[Any, ...]:
    """The fields of `Columns`, in their order, from the views of a layout."""

    def group(prefix: str) -> dict[str, Any]:
        return {k.removeprefix(prefix): v for k, v in views.items() if k.startswith(prefix)}

    rows = (views[name] for name in ("reward", "log_prob", "terminated", "truncated", "mask"))
    return (group("obs/"), group("action/"), group("state/"), *rows, group("window/"))


class Fault(NamedTuple):
    """Why columns must not reach the learner: a `reason` to count by, and what was found."""

    reason: Literal["invalid", "nonfinite"]
    what: str


def are_moderate(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Which of some numbers are neither NaN nor too large."""
    limit = largest_of(values.dtype)
    # The least integer has no absolute value.
    return np.asarray((values <= limit) & (values >= -limit))


@cache
def largest_of(dtype: np.dtype[Any]) -> float:
    """The largest number of a dtype that is admitted; every finite float16 is."""
    if dtype.kind == "i":
        return int(LARGEST)
    return min(LARGEST, float(np.finfo(dtype).max))


def how_large(values: NDArray[Any]) -> str:
    """Say what is wrong with numbers that are not all moderate."""
    return f"beyond {LARGEST:g}" if np.isfinite(values).all() else "not finite"


class _Range(NamedTuple):
    """The numbers between which all items of an array must be."""

    what: str
    leaf: Leaf
    dtype: str
    """The dtype as which it is read: a negative index, read as unsigned, is a huge one."""
    least: float
    most: Any
    """A number, or one for each item of a column."""
    beyond: str = ""
    """How a number beyond them is called; empty: too large."""
    is_masked: bool = False
    """Whether its items in masked rows are never looked at, here or later."""

    def find_fault(self, values: NDArray[Any], mask: NDArray[np.bool_]) -> Fault | None:
        if self._holds(values):
            return None
        if self.is_masked and self._holds(values := np.where(mask, values, 0)):
            return None
        if self.beyond and np.isfinite(values).all():
            return Fault("invalid", f"{self.what} is {self.beyond}")
        return Fault("nonfinite", f"{self.what} is {how_large(values)}")

    def _holds(self, values: NDArray[Any]) -> bool:
        if isinstance(self.most, np.ndarray):
            return not (values > self.most).any()
        # With a NaN neither is true. `max` makes one or two calls more, whose cost matters here.
        return bool(
            np.maximum.reduce(values, axis=None) <= self.most
            and (self.dtype[0] == "u" or np.minimum.reduce(values, axis=None) >= self.least)
        )


class ColumnChecks:
    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        layout = schema.layout
        self._mask, self._terminated, self._truncated = (
            layout.leaves[name].stretch for name in ("mask", "terminated", "truncated")
        )
        self._ranges = list(_ranges(schema))
        # One look at all of this plane, which is small; of the other one, where there are any.
        self._small_bits = _unused_bits(layout, "small")
        obs_bits = _unused_bits(layout, "obs")
        edges = [0, *(np.flatnonzero(np.diff(obs_bits)) + 1), layout.obs_bytes]
        self._obs_bits = [(slice(a, b), obs_bits[a]) for a, b in pairwise(edges) if obs_bits[a]]

    def find_fault(self, obs: Bytes2D, small: Bytes2D) -> Fault | None:
        if (small & self._small_bits).any() or any(
            (obs[:, stretch] & bits).any() for stretch, bits in self._obs_bits
        ):
            what = "a flag is neither 0 nor 1, or what lies between its arrays is not zero"
            return Fault("invalid", what)
        mask = small[:, self._mask].view(np.bool_)
        ends = (small[:, self._terminated] | small[:, self._truncated]).view(np.bool_)
        if ends.any() and (ends & ~mask).any():
            return Fault("invalid", "an episode ends in a masked row")
        if ends.any() and (ends[:, :-1] & mask[:, 1:]).any():
            # Two episodes would be learned as one.
            return Fault("invalid", "the row after the end of an episode is not masked")
        with np.errstate(all="ignore"):
            for each in self._ranges:
                plane = obs if each.leaf.plane == "obs" else small
                if fault := each.find_fault(plane[:, each.leaf.stretch].view(each.dtype), mask):
                    return fault
        return _find_illegal(self._schema, obs, small)


def _unused_bits(layout: ColumnLayout, plane: Plane) -> Bytes2D:
    """The bits of a plane that are never set: those between arrays, and all but one of a flag."""
    num_bytes = layout.obs_bytes if plane == "obs" else layout.small_bytes
    bits = np.full(num_bytes, 0xFF, np.uint8)
    for leaf in layout.leaves.values():
        if leaf.plane == plane:
            bits[leaf.stretch] = 0xFE if leaf.dtype == "bool" else 0
    return bits


def _ranges(schema: Schema) -> Iterator[_Range]:
    leaves = schema.layout.leaves
    for group, kind, specs in (
        ("action", "action", [part.array for part in schema.action.parts]),
        ("obs", "observation", schema.obs.leaves),
        ("state", "state", schema.state),
    ):
        for spec in specs:
            leaf = leaves[f"{group}/{spec.name}"]
            what = f"the {kind} {spec.name!r}" if spec.name else f"the {kind}"
            if spec.choices:
                num_rows = math.prod(leaf.shape) // spec.num_items
                yield _indices(what, leaf, np.array(spec.choices * num_rows) - 1)
            elif spec.may_be_large:
                yield _numbers(what, leaf)
            if spec.is_stack:
                what, most = f"the window of {what}", num_frames(spec, schema.rows) - 1
                yield _indices(what, leaves[f"window/{spec.name}"], np.array(most))
    yield _numbers("a reward", leaves["reward"], is_masked=True)
    what, largest = "the log-probability of an action", float(np.finfo(np.float32).max)
    # A density may be above 1, so only probabilities are checked.
    is_probability = all(part.kind == "discrete" for part in schema.action.parts)
    log_most = LOG_PROB_SLACK if is_probability else largest
    yield _Range(what, leaves["log_prob"], "float32", -largest, log_most, "above 0", is_masked=True)


def _indices(what: str, leaf: Leaf, most: NDArray[Any]) -> _Range:
    dtype = f"u{leaf.dtype.removeprefix('u')}"
    one_for_all = most.min().item() if most.min() == most.max() else most
    return _Range(what, leaf, dtype, 0, one_for_all, "none of its choices")


def _numbers(what: str, leaf: Leaf, *, is_masked: bool = False) -> _Range:
    most = largest_of(np.dtype(leaf.dtype))
    return _Range(what, leaf, leaf.dtype, -most, most, is_masked=is_masked)


def _find_illegal(schema: Schema, obs: Bytes2D, small: Bytes2D) -> Fault | None:
    """Whether a valid row has a choice that is not legal there, whose loss would be infinite."""
    legal = schema.action.legal
    if legal is None:
        return None
    columns = columns_over(schema, obs, small)
    num_columns, num_rows = columns.mask_CT.shape
    legal_CTP = columns.obs[legal][:, :-1].reshape(num_columns, num_rows, -1) != 0
    discrete = [part for part in schema.action.parts if part.choices]
    chosen = [columns.actions[part.name].reshape(num_columns, num_rows, -1) for part in discrete]
    sizes = [size for part in discrete for size in part.choices]
    firsts = np.cumsum([0, *sizes[:-1]])
    is_legal_CT = np.take_along_axis(legal_CTP, np.concatenate(chosen, -1) + firsts, -1).all(-1)
    if (columns.mask_CT & ~is_legal_CT).any():
        what = f"an action is chosen that {legal!r} forbids, or where none is legal"
        return Fault("invalid", what)
    return None
