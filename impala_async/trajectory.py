"""Trajectories: columns of T action rows and S = T+1 observation rows, and their checks.

A row after an episode's end carries the final observation and no transition: its mask is False.
The last observation row is the bootstrap row, and row 0 of the next trajectory.

`find_fault` looks at everything. Most messages are sound, and for a schema without masks and
categories a handful of sums and maxima over whole stretches of their planes shows it:
`ColumnChecks` takes these first, and looks closely only at a message that does not look sound in
this way. So a verdict is never other than that of `find_fault`.

    T action rows, S = T+1 observation rows, C columns of one message
    P choices of all discrete parts, A choices of one item
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from impala_async.layout import Bytes2D, Leaf
from impala_async.schema import ActionPart, ArraySpec, Schema

# A log-probability of a discrete action cannot be positive; this is what fp32 rounding may add.
LOG_PROB_SLACK = 1e-6
# A larger number overflows in float32 once it is squared and summed, as for statistics. A network
# may turn a smaller number into a larger one: the update step finds such columns.
LARGEST = 1e15


@dataclass(frozen=True)
class Columns:
    """Typed views of some columns, over memory that somebody else owns.

    Of an observation that is a stack, `obs` has the frames of each column, and `windows` has the
    numbers of those that each row shows, `[C, S, frames of a window]`.
    """

    obs: dict[str, NDArray[Any]]
    actions: dict[str, NDArray[Any]]
    state: dict[str, NDArray[Any]]
    rewards_CT: NDArray[np.float32]
    log_probs_CT: NDArray[np.float32]
    terminated_CT: NDArray[np.bool_]
    truncated_CT: NDArray[np.bool_]
    mask_CT: NDArray[np.bool_]
    windows: dict[str, NDArray[np.int32]] = field(default_factory=dict)


def columns_over(schema: Schema, obs: Bytes2D, small: Bytes2D) -> Columns:
    """View `[columns, bytes]` planes as the leaves of a trajectory; nothing is copied."""
    views = schema.layout.views(obs, small)

    def group(prefix: str) -> dict[str, NDArray[Any]]:
        return {k.removeprefix(prefix): v for k, v in views.items() if k.startswith(prefix)}

    return Columns(
        obs=group("obs/"),
        actions=group("action/"),
        state=group("state/"),
        rewards_CT=views["reward"],
        log_probs_CT=views["log_prob"],
        terminated_CT=views["terminated"],
        truncated_CT=views["truncated"],
        mask_CT=views["mask"],
        windows=group("window/"),
    )


class Fault(NamedTuple):
    """Why columns must not reach the learner: a `reason` to count by, and what was found."""

    reason: Literal["invalid", "nonfinite"]
    what: str


def find_fault(schema: Schema, columns: Columns) -> Fault | None:
    """The first thing that is wrong with these columns.

    Rewards and log-probabilities of masked rows are never looked at, here or later.
    """
    for what, flags in _flags(schema, columns):
        if flags.view(np.uint8).max() > 1:
            return Fault("invalid", f"{what} has a flag that is neither 0 nor 1")
    if fault := _find_end_fault(columns):
        return fault
    for what, indices, choices in _categories(schema, columns):
        if _is_beyond(indices, choices):
            return Fault("invalid", f"{what} is none of its choices")
    for name, window in columns.windows.items():
        if _is_beyond(window, (columns.obs[name].shape[1],)):
            return Fault("invalid", f"the window of observation {name!r} shows no frame of it")
    for what, values in _numbers(schema, columns):
        if not are_moderate(values).all():
            return Fault("nonfinite", f"{what} is {how_large(values)}")
    return _find_row_fault(schema, columns)


def find_padding_fault(schema: Schema, obs: Bytes2D, small: Bytes2D) -> Fault | None:
    """Whether bytes lie where no array is: then whoever wrote the planes has another layout."""
    layout = schema.layout
    for plane, stretches in ((obs, layout.gaps("obs")), (small, layout.gaps("small"))):
        if any(plane[:, stretch].any() for stretch in stretches):
            return Fault("invalid", "its arrays lie elsewhere: what lies between them is not zero")
    return None


def _find_end_fault(columns: Columns) -> Fault | None:
    """The row after the end of an episode has its last observation and is masked, or two episodes
    would be learned as one."""
    ends_CT, mask_CT = columns.terminated_CT | columns.truncated_CT, columns.mask_CT
    if (ends_CT & ~mask_CT).any():
        return Fault("invalid", "an episode ends in a masked row")
    if (ends_CT[:, :-1] & mask_CT[:, 1:]).any():
        return Fault("invalid", "the row after the end of an episode is not masked")
    return None


def _find_row_fault(schema: Schema, columns: Columns) -> Fault | None:
    """The same for what matters only in valid rows."""
    mask = columns.mask_CT
    if not are_moderate(columns.rewards_CT).all(where=mask):
        return Fault("nonfinite", f"a reward is {how_large(columns.rewards_CT[mask])}")
    if not np.isfinite(columns.log_probs_CT).all(where=mask):
        return Fault("nonfinite", "the log-probability of an action is not finite")
    # A density may be above 1, so only probabilities are checked.
    is_probability = all(part.kind == "discrete" for part in schema.action.parts)
    if is_probability and (columns.log_probs_CT > LOG_PROB_SLACK).any(where=mask):
        return Fault("invalid", "the log-probability of an action is above 0")
    if schema.action.legal is not None:
        is_illegal_CT = mask & ~_are_choices_legal(schema, columns)
        if is_illegal_CT.any():
            return Fault("invalid", _why_illegal(schema, columns, is_illegal_CT))
    return None


def are_moderate(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Which of some numbers are neither NaN nor too large."""
    limit = largest_of(values.dtype)
    if values.dtype.kind == "i":  # the least of them has no absolute value
        return np.asarray((values <= limit) & (values >= -limit))
    return np.asarray(np.abs(values) <= limit)


@cache
def largest_of(dtype: np.dtype[Any]) -> float:
    """The largest number of a dtype that is admitted; every finite float16 is."""
    if dtype.kind == "i":
        return int(LARGEST)
    return min(LARGEST, float(np.finfo(dtype).max))


def how_large(values: NDArray[Any]) -> str:
    """Say what is wrong with numbers that are not all moderate."""
    return f"beyond {LARGEST:g}" if np.isfinite(values).all() else "not finite"


def _flags(schema: Schema, columns: Columns) -> Iterator[tuple[str, NDArray[Any]]]:
    yield "mask", columns.mask_CT
    yield "terminated", columns.terminated_CT
    yield "truncated", columns.truncated_CT
    for leaf in schema.obs.leaves:
        if leaf.dtype == "bool":
            yield _obs_name(leaf), columns.obs[leaf.name]
    for state in schema.state:
        if state.dtype == "bool":
            yield f"the state {state.name!r}", columns.state[state.name]


def _categories(
    schema: Schema, columns: Columns
) -> Iterator[tuple[str, NDArray[Any], tuple[int, ...]]]:
    for part in schema.action.parts:
        if part.choices:
            yield _part_name(part), columns.actions[part.name], part.choices
    for leaf in schema.obs.leaves:
        if leaf.choices:
            yield _obs_name(leaf), columns.obs[leaf.name], leaf.choices


def _numbers(schema: Schema, columns: Columns) -> Iterator[tuple[str, NDArray[Any]]]:
    for leaf in schema.obs.leaves:
        if leaf.may_be_large:
            yield _obs_name(leaf), columns.obs[leaf.name]
    for part in schema.action.parts:
        if not part.choices:
            yield _part_name(part), columns.actions[part.name]
    for state in schema.state:
        if state.may_be_large:
            yield f"the state {state.name!r}", columns.state[state.name]


def _obs_name(leaf: ArraySpec) -> str:
    return f"the observation {leaf.name!r}" if leaf.name else "the observation"


def _part_name(part: ActionPart) -> str:
    return f"the action {part.name!r}" if part.name else "the action"


def _is_beyond(indices: NDArray[Any], choices: tuple[int, ...]) -> bool:
    """Whether any item is no index below its number of choices."""
    # Viewed as unsigned, a negative index is a huge one.
    unsigned = indices.view(f"u{indices.dtype.itemsize}")
    if min(choices) == max(choices):
        return bool(unsigned.max() >= choices[0])
    items = unsigned.reshape(*indices.shape[:2], -1)
    return bool((items >= np.array(choices)).any())


def _are_choices_legal(schema: Schema, columns: Columns) -> NDArray[np.bool_]:
    """Whether what was chosen in a row is legal there: so something is, for every item.

    The learner would find an illegal action impossible, and its loss infinite.
    """
    assert schema.action.legal is not None
    num_columns, num_rows = columns.mask_CT.shape
    legal_CTP = columns.obs[schema.action.legal][:, :-1].reshape(num_columns, num_rows, -1)
    discrete = [part for part in schema.action.parts if part.choices]
    chosen = [columns.actions[part.name].reshape(num_columns, num_rows, -1) for part in discrete]
    sizes = [size for part in discrete for size in part.choices]
    places = np.concatenate(chosen, -1) + np.cumsum([0, *sizes[:-1]])
    return np.asarray(np.take_along_axis(legal_CTP, places, -1).all(-1))


def _why_illegal(schema: Schema, columns: Columns, is_illegal_CT: NDArray[np.bool_]) -> str:
    """Say of the first illegal row whether it has no legal action or a forbidden one was chosen."""
    assert schema.action.legal is not None
    column, row = np.argwhere(is_illegal_CT)[0]
    legal_P = columns.obs[schema.action.legal][column, row].reshape(-1) != 0
    sizes = [size for part in schema.action.parts for size in part.choices]
    if all(item_A.any() for item_A in np.split(legal_P, np.cumsum(sizes)[:-1])):
        return f"an action is chosen that {schema.action.legal!r} forbids"
    return f"{schema.action.legal!r} has a row where an action is chosen and none is legal"


Stretch = slice
"""Bytes of a plane."""
Numbers = tuple[Stretch, str]
"""Numbers of some dtype, none of which may be NaN or too large."""
Indices = tuple[Stretch, int]
"""Integers of 32 bits, all of which must be below a limit, and not below 0."""


class ColumnChecks:
    """Checks messages of one schema."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        leaves = schema.layout.leaves
        self._is_plain = schema.action.legal is None and all(map(_is_plain, schema.obs.leaves))
        self._is_plain &= all(map(_is_even, schema.action.parts))
        self._is_plain &= all(state.dtype == "float32" for state in schema.state)
        flags = [_stretch(leaves[name]) for name in ("terminated", "truncated", "mask")]
        self._terminated, self._truncated, self._mask = flags
        self._obs_gaps = schema.layout.gaps("obs")
        # The bits that are never set.
        self._unused = np.zeros(schema.layout.small_bytes, np.uint8)
        for gap in schema.layout.gaps("small"):
            self._unused[gap] = 0xFF
        for flag in flags:
            self._unused[flag] = 0xFE
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
        columns = columns_over(self._schema, obs, small)
        return find_padding_fault(self._schema, obs, small) or find_fault(self._schema, columns)

    def count_valid(self, small: Bytes2D) -> NDArray[np.int64]:
        """Valid rows of each column, once its mask is known to hold flags."""
        counts: NDArray[np.int64] = np.add.reduce(small[:, self._mask], axis=1, dtype=np.int64)
        return counts

    def _looks_sound(self, obs: Bytes2D, small: Bytes2D) -> bool:
        if _largest(small & self._unused) or any(_largest(obs[:, gap]) for gap in self._obs_gaps):
            return False
        mask, ends = small[:, self._mask], small[:, self._terminated] | small[:, self._truncated]
        if _largest(ends) and (_largest(ends & ~mask) or _largest(ends[:, :-1] & mask[:, 1:])):
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
    # `max` calls this after one or two more calls, whose cost matters here.
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
