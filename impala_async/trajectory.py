"""What goes up: columns of T action rows and S = T+1 observation rows, and their validation.

A row after an episode's end carries the final observation and no transition: its mask is False.
The last observation row is the bootstrap row, and row 0 of the next trajectory.

    T action rows, S = T+1 observation rows, C columns of one message
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impala_async.spec import Bytes2D, Schema

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
    for part in schema.action.parts:
        # Viewed as unsigned, a negative index is a huge one.
        if columns.actions[part.name].view(np.uint32).max() >= part.num_choices:
            return "invalid"
    if not all(np.isfinite(leaf).all() for leaf in leaves if leaf.dtype.kind == "f"):
        return "nonfinite"
    mask = columns.mask_CT
    if not np.isfinite(columns.rewards_CT).all(where=mask):
        return "nonfinite"
    if not np.isfinite(columns.log_probs_CT).all(where=mask):
        return "nonfinite"
    if (columns.log_probs_CT > LOG_PROB_SLACK).any(where=mask):
        return "invalid"
    return None
