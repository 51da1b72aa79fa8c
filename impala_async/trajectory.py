"""What goes up: columns of T action rows and S = T+1 observation rows, and their validation.

A row after an episode's end carries the final observation and no transition: its mask is False.
The last observation row is the bootstrap row, and row 0 of the next trajectory.

    T action rows, S = T+1 observation rows, C columns of one message
    P choices of all discrete parts, A choices of one item
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from impala_async.layout import Bytes2D
from impala_async.spec import ActionPart, ArraySpec, Schema

# A log-probability of a discrete action cannot be positive; this is what fp32 rounding may add.
LOG_PROB_SLACK = 1e-6
# Squared and summed, what is larger overflows in float32, and all else in its batch would be lost.
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


def _find_row_fault(schema: Schema, columns: Columns) -> Fault | None:
    """The same for what matters only in valid rows."""
    mask = columns.mask_CT
    if not are_moderate(columns.rewards_CT).all(where=mask):
        return Fault("nonfinite", f"a reward is {how_large(columns.rewards_CT[mask])}")
    if not np.isfinite(columns.log_probs_CT).all(where=mask):
        return Fault("nonfinite", "the log-probability of an action is not finite")
    # Of a density nothing can be said.
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
    """What is wrong with numbers that are not all moderate."""
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
    """Of the first such row: what nobody could choose there, or what somebody did."""
    assert schema.action.legal is not None
    column, row = np.argwhere(is_illegal_CT)[0]
    legal_P = columns.obs[schema.action.legal][column, row].reshape(-1) != 0
    sizes = [size for part in schema.action.parts for size in part.choices]
    if all(item_A.any() for item_A in np.split(legal_P, np.cumsum(sizes)[:-1])):
        return f"an action is chosen that {schema.action.legal!r} forbids"
    return f"{schema.action.legal!r} has a row where an action is chosen and none is legal"
