"""Batches of environments behind one Protocol, `EnvBatch`, and what a step of one gives.

A reward and the two flags of an end are looked at before numpy takes them for something: None for
NaN, the text "False" for true, and one number for those of all columns.
"""

import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from impala_async.errors import EnvError
from impala_async.schema import ActionSpec, ObsSpec

Actions = Mapping[str, NDArray[Any]]
Obs = dict[str, NDArray[Any]]
# Types that need no look.
REWARDS = frozenset({float, int, np.float32, np.float64})
FLAGS = frozenset({bool, np.bool_})
_BOOL = np.dtype(np.bool_)


class Step(NamedTuple):
    """The result of one step of all columns.

    `final_obs` is there when a SAME_STEP batch has a column that ended, and holds something only
    in the rows of such columns; `obs` has their reset observation.

    `idle` is there when a batch has columns that wait for others of their environment, as agents
    do that are gone while the rest plays on. It marks the columns that made no transition in this
    step, those that it reset among them: their row is masked. An idle column has reward 0 and no
    flags, and `obs` repeats its observation until it shows the first one of a new episode.

    `untrained` is there when a batch has several policies. It marks the columns whose policy is not
    trained: they play as all others do, but their row is masked.
    """

    obs: Obs
    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    final_obs: Obs | None = None
    idle: NDArray[np.bool_] | None = None
    untrained: NDArray[np.bool_] | None = None

    @property
    def masked(self) -> NDArray[np.bool_] | None:
        """Columns whose row is masked, besides those that reset themselves."""
        if self.idle is None or self.untrained is None:
            return self.idle
        return self.idle | self.untrained


class EnvBatch(Protocol):
    """`num_envs` environments of one kind that step together, each resetting itself.

    NEXT_STEP: the step after a column's end resets it: the action is ignored, the reward 0.
    SAME_STEP: the step that ends a column's episode returns its reset observation.

    A batch may be a part of a larger one: `first_env` is the place of its first environment there,
    and seeds are those of the larger one.
    """

    name: str
    num_envs: int
    obs_spec: ObsSpec
    action_spec: ActionSpec
    autoreset: AutoresetMode

    def reset(self, seed: int, first_env: int = 0) -> Obs: ...

    def step(self, actions: Actions) -> Step: ...

    def close(self) -> None: ...


def spread_seed(seed: int) -> int:
    """A seed far from those of the neighbours of `seed`, with room for a seed per column.

    Gymnasium seeds column i with seed + i: without this, actors with neighbouring seeds would
    step the same environments.
    """
    word = int(np.random.SeedSequence(seed).generate_state(1)[0])
    return word % (2**31 - 2**16)


def as_reward(value: Any) -> Any:
    """One number."""
    return value if type(value) in REWARDS else as_rewards(value, "reward")


def as_flag(value: Any, name: str) -> bool:
    """True or False."""
    return bool(value if type(value) in FLAGS else as_flags(value, name))


def as_rewards(values: Any, name: str, num_columns: int | None = None) -> NDArray[Any]:
    """A number for each column, or one number."""
    return _as_numbers(values, name, "a number", num_columns)


def as_flags(values: Any, name: str, num_columns: int | None = None) -> NDArray[np.bool_]:
    """A flag for each column, or one flag."""
    wanted = "True or False"
    numbers = _as_numbers(values, name, wanted, num_columns)
    if numbers.dtype is _BOOL:
        return numbers
    flags: NDArray[np.bool_] = numbers.astype(np.bool_)
    if (flags != numbers).any():
        raise _refusal(values, name, wanted)
    return flags


def _as_numbers(values: Any, name: str, wanted: str, num_columns: int | None) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):  # it is ragged
        array = np.empty(0)
    shape: tuple[int, ...] = ()
    if num_columns is not None:
        shape, wanted = (num_columns,), f"{wanted} for each of {num_columns} columns"
    elif array.size == 1:
        array = array.reshape(shape)
    if array.shape != shape or array.dtype.kind not in "biuf":
        raise _refusal(values, name, wanted)
    return array


def _refusal(values: Any, name: str, wanted: str) -> EnvError:
    shown = " ".join(reprlib.repr(values).split())
    return EnvError(f"{name} in step: wants {wanted}, got {shown} ({type(values).__name__})")
