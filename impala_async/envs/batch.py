"""Batches of environments behind one Protocol, `EnvBatch`, and what they give, each number checked.

Unchecked, numpy would take None for NaN, the text "False" for true, and one number for those of all
columns; it would broadcast a wrong shape, and truncate a wrong dtype, in silence.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from impala_async.errors import EnvError
from impala_async.schema import ActionSpec, ArraySpec, ObsSpec

Actions = Mapping[str, NDArray[Any]]
Obs = dict[str, NDArray[Any]]
FLOAT, BOOL = np.dtype(np.float32), np.dtype(np.bool_)
# Types of a reward and of a flag that need no look.
REWARDS = frozenset({float, int, np.float32, np.float64})
FLAGS = frozenset({bool, np.bool_})
PLAIN = {FLOAT: REWARDS, BOOL: FLAGS}


class Step(NamedTuple):
    """The result of one step of all columns.

    `final_obs` is there when a SAME_STEP batch has a column that ended, and holds something only
    in the rows of such columns; `obs` has their reset observation.

    `idle` marks the columns that made no transition in this step: those that a NEXT_STEP batch has
    reset, and those that wait for others of their environment, as agents do that are gone while the
    rest plays on. Their row is masked, they have reward 0 and no flags, and `obs` repeats their
    observation until it shows the first one of a new episode. None: no column is idle.

    `untrained` is there, and `idle` too, when a batch has several policies. It marks the columns
    whose policy is not trained: they play as all others do, but their row is masked.
    """

    obs: Obs
    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    final_obs: Obs | None = None
    idle: NDArray[np.bool_] | None = None
    untrained: NDArray[np.bool_] | None = None

    @property
    def ended(self) -> NDArray[np.bool_]:
        """Columns whose episode ended with this step."""
        return self.terminated | self.truncated

    @property
    def fresh(self) -> NDArray[np.bool_] | None:
        """Columns that remember nothing: `obs` begins their episode, or they wait for one."""
        return self.idle if self.final_obs is None else self.ended

    @property
    def masked(self) -> NDArray[np.bool_] | None:
        """Columns whose row is masked."""
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


def as_numbers(values: Any, name: str, dtype: np.dtype[Any], num_columns: int | None = None) -> Any:
    """The rewards (FLOAT) or flags (BOOL) of all columns, or that of one."""
    if num_columns is None and type(values) in PLAIN[dtype]:
        return values
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):  # it is ragged
        array = np.empty(0, object)
    shape = () if num_columns is None else (num_columns,)
    if num_columns is None and array.size == 1:
        array = array.reshape(shape)
    if array.shape == shape and array.dtype.kind in "biuf":
        if dtype is FLOAT or array.dtype is dtype:
            return array
        flags = array.astype(dtype)
        if (flags == array).all():
            return flags
    wanted = "a number" if dtype is FLOAT else "True or False"
    of_each = "" if num_columns is None else f" for each of {num_columns} columns"
    shown = " ".join(reprlib.repr(values).split())
    got = f"{shown} ({type(values).__name__})"
    raise EnvError(f"{name} in step: wants {wanted}{of_each}, got {got}")


class ObsLeaf(NamedTuple):
    """One array of an observation: the keys that lead to it, and what it looks like."""

    path: tuple[Any, ...]
    spec: ArraySpec
    dtype: np.dtype[Any]
    start: NDArray[Any] | None = None
    """The first category of each number, where categories do not count from 0."""

    def of(self, obs: Any) -> Any:
        """This leaf's part of an observation, batched or not; None where it is not there."""
        try:
            for key in self.path:
                obs = obs[key]
            return obs if self.start is None else np.asarray(obs) - self.start
        except (LookupError, TypeError, ValueError):
            return None

    @property
    def last_choices(self) -> NDArray[Any]:
        """The highest category of each item, counted from 0."""
        last = np.reshape(self.spec.choices, self.spec.shape) - 1
        return last.astype(f"u{self.dtype.itemsize}")


class ObsRows:
    """Observations of a batch as arrays of leaves, each checked to be what its space promises.

    A row is written by itself, or a batched observation is read as a whole.
    """

    def __init__(self, leaves: Sequence[ObsLeaf], num_rows: int) -> None:
        self.arrays: Obs = {
            leaf.spec.name: np.zeros((num_rows, *leaf.spec.shape), leaf.dtype) for leaf in leaves
        }
        self._leaves = [(leaf, self.arrays[leaf.spec.name], set[Any]()) for leaf in leaves]
        first, *others = leaves
        # An observation that is an array needs no walk through its leaves.
        self._is_array = not others and not first.path and first.start is None
        self._last_choices = [(leaf, leaf.last_choices) for leaf in leaves if leaf.spec.choices]

    def write(self, row: int, obs: Any, where: str = "") -> None:
        """Store an observation of one row, whose categories are left to `check_choices`.

        A kind that was found sound is not looked at closely again: that takes longer than to copy
        it. Only of numbers that may be too large for the space's dtype each one is.
        """
        if self._is_array:
            _, target, known = self._leaves[0]
            if type(obs) is np.ndarray and obs.dtype in known and obs.shape == target.shape[1:]:
                target[row] = obs
                return
        for leaf, target, known in self._leaves:
            value = leaf.of(obs)
            is_array = type(value) is np.ndarray and value.shape == leaf.spec.shape
            kind = value.dtype if is_array else type(value)
            if kind not in known:
                array = _checked(leaf, value, leaf.spec.shape, where)
                # The type of any other value says neither its shape nor its dtype.
                is_plain = is_array or isinstance(value, np.generic | int | float)
                if is_plain and not _may_wrap(array.dtype, leaf.dtype):
                    known.add(kind)
            target[row] = value

    def read(self, obs: Any, where: str = "", rows: Any = ...) -> Obs:
        """A batched observation: writable, in the spec's dtypes, and copied only for that.

        `rows`: those whose categories matter.
        """
        flat = {}
        for leaf, target, _ in self._leaves:
            array = np.asarray(_checked(leaf, leaf.of(obs), target.shape, where), leaf.dtype)
            flat[leaf.spec.name] = array if array.flags.writeable else array.copy()
        self.check_choices(flat, rows)
        return flat

    def check_choices(self, obs: Obs, rows: Any = ...) -> None:
        """Refuse categories that their space does not have.

        They would end a network, or pass for choices of the next item.
        """
        for leaf, last in self._last_choices:
            values = obs[leaf.spec.name][rows]
            # Viewed as unsigned, a negative category is a huge one.
            is_beyond = values.view(last.dtype) > last
            if np.count_nonzero(is_beyond):
                place = tuple(np.argwhere(is_beyond)[0].tolist())
                item = place[1:]
                # In the environment's own numbers.
                first = 0 if leaf.start is None else int(leaf.start[item])
                at = f" at {list(item)}" if item else ""
                span = f"{first} to {first + int(last[item])}"
                raise _broken(leaf, at, f"{span}, it is {first + int(values[place])}")


def _checked(leaf: ObsLeaf, value: Any, shape: tuple[int, ...], where: str) -> NDArray[Any]:
    """A leaf's part of an observation; EnvError for one that its own space does not describe."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # it is ragged
        value = None
    if value is None:
        raise _broken(leaf, where, "it, but it is not there")
    if array.shape != shape:
        raise _broken(leaf, where, f"shape {shape}, it has {array.shape}")
    # Mostly it is the very one, and to ask costs as much as all else.
    if array.dtype is leaf.dtype:
        return array
    if not np.can_cast(array.dtype, leaf.dtype, casting="same_kind"):
        raise _broken(leaf, where, f"{leaf.dtype}, it is {array.dtype}")
    if _may_wrap(array.dtype, leaf.dtype):
        beyond = array[array.astype(leaf.dtype) != array]
        if beyond.size:
            raise _broken(leaf, where, f"{leaf.dtype}, it has {beyond.flat[0]}")
    return array


def _may_wrap(given: np.dtype[Any], kept: np.dtype[Any]) -> bool:
    """Whether a whole number of the one may become another number in the other."""
    return given.kind in "iu" and kept.kind in "iu" and not np.can_cast(given, kept)


def _broken(leaf: ObsLeaf, where: str, what: str) -> EnvError:
    return EnvError(f"{leaf.spec.name or 'observation'}{where}: the space promises {what}")
