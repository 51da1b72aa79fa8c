"""What goes up: columns of T action rows and S = T+1 observation rows, and their validation.

A row after an episode's end carries the final observation and no transition: its mask is False.
The last observation row is the bootstrap row, and row 0 of the next trajectory.

    T action rows, S = T+1 observation rows, C columns of one message
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impala_async.layout import Bytes2D
from impala_async.spec import Schema

# A log-probability of a discrete action cannot be positive; this is what fp32 rounding may add.
LOG_PROB_SLACK = 1e-6


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
    )


def find_fault(schema: Schema, columns: Columns) -> str | None:
    """Say why these columns must not reach the learner: `invalid`, `nonfinite`, or None.

    Rewards and log-probabilities of masked rows are never looked at, here or later.
    """
    leaves = [columns.obs[leaf.name] for leaf in schema.obs.leaves]
    leaves += [columns.state[leaf.name] for leaf in schema.state]
    flags = [columns.mask_CT, columns.terminated_CT, columns.truncated_CT]
    flags += [leaf for leaf in leaves if leaf.dtype == np.bool_]
    if any(array.view(np.uint8).max() > 1 for array in flags):
        return "invalid"
    parts = [(columns.actions[part.name], part.choices) for part in schema.action.parts]
    categories = parts + [(columns.obs[leaf.name], leaf.choices) for leaf in schema.obs.leaves]
    if any(_is_beyond(indices, choices) for indices, choices in categories if choices):
        return "invalid"
    leaves += [values for values, choices in parts if not choices]
    if not all(np.isfinite(leaf).all() for leaf in leaves if leaf.dtype.kind == "f"):
        return "nonfinite"
    return _find_row_fault(schema, columns)


def _find_row_fault(schema: Schema, columns: Columns) -> str | None:
    """The same for what matters only in valid rows."""
    mask = columns.mask_CT
    if not np.isfinite(columns.rewards_CT).all(where=mask):
        return "nonfinite"
    if not np.isfinite(columns.log_probs_CT).all(where=mask):
        return "nonfinite"
    # Of a density nothing can be said.
    is_probability = all(part.kind == "discrete" for part in schema.action.parts)
    if is_probability and (columns.log_probs_CT > LOG_PROB_SLACK).any(where=mask):
        return "invalid"
    if schema.action.legal is not None and not _are_choices_legal(schema, columns).all(where=mask):
        return "invalid"
    return None


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
