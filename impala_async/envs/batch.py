"""Batches of environments behind one Protocol, `EnvBatch`, and what they give, each number checked.

Unchecked, numpy would take None for NaN, the text "False" for true, and one number for those of all
columns; it would broadcast a wrong shape, and truncate a wrong dtype, in silence.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from impala_async.errors import EnvError
from impala_async.schema import ActionSpec, ArraySpec, ObsSpec
from impala_async.user_code import one_line

if TYPE_CHECKING:
    from impala_async.envs.spaces import Spaces

Actions = Mapping[str, NDArray[Any]]
Obs = dict[str, NDArray[Any]]
FLOAT, BOOL = np.dtype(np.float32), np.dtype(np.bool_)
# Types of a reward and of a flag that need no look.
PLAIN = {FLOAT: {float, int, np.float32, np.float64}, BOOL: {bool, np.bool_}}


class Step(NamedTuple):
    """The result of one step of all columns.

    `final_obs` is there when a SAME_STEP batch has columns that ended, and holds something only in
    their rows; `obs` has their reset observation.

    `idle` marks the columns that made no transition: those that a NEXT_STEP batch has reset, and
    agents that are gone, or to come, while others play. Their row is masked, with reward 0 and no
    flags, and `obs` repeats their observation until a new episode begins. None: no column is idle.

    `untrained` is there, and `idle` too, when a batch has several policies: it marks the columns
    whose policy is not trained. They play as all others do, but their row is masked.
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
        return self.terminated | self.truncated

    @property
    def fresh(self) -> NDArray[np.bool_] | None:
        """Columns that remember nothing: `obs` begins their episode, or they wait for one."""
        return self.idle if self.final_obs is None else self.ended

    @property
    def masked(self) -> NDArray[np.bool_] | None:
        if self.idle is None or self.untrained is None:
            return self.idle
        return self.idle | self.untrained


class EnvBatch(Protocol):
    """`num_envs` environments of one kind that step together, each resetting itself.

    A batch may be a part of a larger one: `first_env` is the place of its first environment there,
    and seeds are those of the larger one.
    """

    name: str
    num_envs: int
    obs_spec: ObsSpec
    action_spec: ActionSpec
    autoreset: AutoresetMode

    @property
    def spaces(self) -> "Spaces | None":
        """Those of one environment, or agent; None where only env workers know them."""

    def reset(self, seed: int, first_env: int = 0) -> Obs: ...

    def step(self, actions: Actions) -> Step: ...

    def close(self) -> None: ...


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
    is_bits: bool = False
    """Numbers are 0 or 1."""

    def of(self, obs: Any) -> Any:
        """This leaf's part of an observation, batched or not; None where it is not there."""
        try:
            for key in self.path:
                obs = obs[key]
        except (LookupError, TypeError, ValueError):
            return None
        try:
            return obs if self.start is None else np.asarray(obs) - self.start
        except (TypeError, ValueError):
            return obs  # it is no number, and told as that


class ObsRows:
    """Observations of a batch as arrays of leaves, each checked to be what its space promises."""

    def __init__(self, leaves: Sequence[ObsLeaf], num_rows: int) -> None:
        self.arrays: Obs = {
            leaf.spec.name: np.zeros((num_rows, *leaf.spec.shape), leaf.dtype) for leaf in leaves
        }
        self._leaves = [(leaf, self.arrays[leaf.spec.name], leaf.spec.shape) for leaf in leaves]
        # The highest category of each item, counted from 0.
        self._last_choices: list[tuple[ObsLeaf, NDArray[Any]]] = []
        for leaf in leaves:
            choices = leaf.spec.choices or (2,) * leaf.spec.num_items * leaf.is_bits
            if choices:
                last = np.reshape(choices, leaf.spec.shape) - 1
                self._last_choices.append((leaf, last.astype(f"u{leaf.dtype.itemsize}")))

    def write(self, row: int, obs: Any, where: str = "") -> None:
        """Store an observation of one row, whose categories are left to `check_choices`."""
        for leaf, target, shape in self._leaves:
            value = leaf.of(obs)
            # A call that is saved here is a fiftieth of a step of CartPole.
            if type(value) is np.ndarray and value.dtype is leaf.dtype and value.shape == shape:
                target[row] = value
            else:
                target[row] = _checked(leaf, value, shape, where)

    def read(self, obs: Any, where: str = "", rows: Any = ...) -> Obs:
        """A batched observation: writable, in the spec's dtypes, in the order of C, and copied only
        for that. `rows` are those whose categories matter."""
        flat = {}
        for leaf, target, _ in self._leaves:
            array = np.asarray(_checked(leaf, leaf.of(obs), target.shape, where), leaf.dtype)
            flat[leaf.spec.name] = array if array.flags.carray else array.copy()
        self.check_choices(flat, rows)
        return flat

    def check_choices(self, obs: Obs, rows: Any = ...) -> None:
        """Refuse categories that would end a network, or pass for choices of the next item."""
        for leaf, last in self._last_choices:
            values = obs[leaf.spec.name][rows]
            # Viewed as unsigned, a negative category is a huge one.
            is_beyond = values.view(last.dtype) > last
            if np.count_nonzero(is_beyond):
                place = tuple(np.argwhere(is_beyond)[0].tolist())
                item = place[1:]
                # The message names the environment's own numbers.
                first = 0 if leaf.start is None else int(leaf.start[item])
                at = f" at {list(item)}" if item else ""
                span = f"{first} to {first + int(last[item])}"
                # Without a sign, one below the first was a huge one, and comes back to itself.
                own = np.add([values[place]], first, dtype=leaf.dtype, casting="unsafe")[0]
                raise _broken(leaf, at, f"{span}, it is {own}")


def _checked(leaf: ObsLeaf, value: Any, shape: tuple[int, ...], where: str) -> NDArray[Any]:
    """A leaf's part of an observation; EnvError for one that its own space does not describe."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        # A tensor of another device says what to do.
        what = "ragged" if "inhomogeneous" in str(error) else f"no array: {one_line(error)}"
        raise _broken(leaf, where, f"shape {shape}, it is {what}") from None
    if value is None:
        raise _broken(leaf, where, "it, but it is not there")
    if array.shape != shape:
        raise _broken(leaf, where, f"shape {shape}, it has {array.shape}")
    # Mostly it is the very one, and to ask costs as much as all else.
    if array.dtype is leaf.dtype:
        return array
    # Whole numbers are looked at one by one.
    is_whole = array.dtype.kind in "iu" and leaf.dtype.kind in "iu"
    if not is_whole and not np.can_cast(array.dtype, leaf.dtype, casting="same_kind"):
        raise _broken(leaf, where, f"{leaf.dtype}, it is {array.dtype}")
    # A whole number must not become another one.
    if leaf.dtype.kind in "iu" and (beyond := array[array.astype(leaf.dtype) != array]).size:
        raise _broken(leaf, where, f"{leaf.dtype}, it has {beyond[0]}")
    return array


def _broken(leaf: ObsLeaf, where: str, what: str) -> EnvError:
    return EnvError(f"{leaf.spec.name or 'observation'}{where}: the space promises {what}")
