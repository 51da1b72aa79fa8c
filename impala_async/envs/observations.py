"""Observation spaces to flat leaves, and observations to the arrays of those leaves.

Any nesting of Dict and Tuple is flat here: a leaf "a/b" for each space in it that is an array, in
gymnasium's own order, and one leaf with an empty name where there is no nesting. Categories
(Discrete, MultiDiscrete) count from 0 on our side, whatever the space starts at.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from numpy.typing import NDArray

from impala_async.errors import EnvError, SpacesError
from impala_async.schema import ArraySpec

SUPPORTED_OBS = (
    "supported are Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of those"
)

LEAVE_OUT = "leave it out by a wrapper (env.wrappers), as gymnasium.wrappers:FilterObservation"

Path = tuple[Any, ...]
_ARRAY = np.ndarray


class ObsLeaf(NamedTuple):
    """One array of an observation: the keys that lead to it, and what it looks like."""

    path: Path
    spec: ArraySpec
    dtype: np.dtype[Any]
    start: NDArray[Any] | None = None
    """The first category of each number, where categories do not count from 0."""

    def of(self, obs: Any) -> Any:
        """This leaf's part of an observation, batched or not."""
        for key in self.path:
            obs = obs[key]
        return obs if self.start is None else np.asarray(obs) - self.start


def obs_leaves(space: Space[Any]) -> tuple[ObsLeaf, ...]:
    """The leaves of an observation space, in the order in which the spec has them."""
    leaves = tuple(_obs_leaf(path, part) for path, part in arrays_of(space))
    names = [leaf.spec.name for leaf in leaves]
    if not leaves:
        raise EnvError(f"observation space {short(space)} is empty: {SUPPORTED_OBS}")
    for name in names:
        if names.count(name) > 1:
            raise EnvError(
                f"observation space {short(space)} has two leaves called {name!r}: rename a key"
            )
    return leaves


def flatten_obs(leaves: Sequence[ObsLeaf], obs: Any) -> dict[str, NDArray[Any]]:
    """A batched observation by leaf name: writable, in the spec's dtypes; copied only for that."""
    flat = {}
    for leaf in leaves:
        array = np.asarray(leaf.of(obs), leaf.dtype)
        flat[leaf.spec.name] = array if array.flags.writeable else array.copy()
    return flat


def check_obs(
    leaves: Sequence[ObsLeaf], obs: Any, num_envs: int | None = None, where: str = ""
) -> None:
    """Refuse an observation that its own space does not describe; `num_envs`: a batched one.

    Writing it into a batch would broadcast a wrong shape and truncate a wrong dtype in silence.
    """
    for leaf in leaves:
        try:
            array = np.asarray(leaf.of(obs))
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise EnvError(_promised(leaf, where, "it, but it is not there")) from error
        wanted = leaf.spec.shape if num_envs is None else (num_envs, *leaf.spec.shape)
        if array.shape != wanted:
            raise EnvError(_promised(leaf, where, f"shape {wanted}, it has {array.shape}"))
        # Mostly it is the very one, and to ask costs as much as all else.
        is_same = array.dtype is leaf.dtype
        if not is_same and not np.can_cast(array.dtype, leaf.dtype, casting="same_kind"):
            raise EnvError(_promised(leaf, where, f"{leaf.dtype}, it is {array.dtype}"))
        if not is_same and _may_wrap(array.dtype, leaf.dtype):
            beyond = array[array.astype(leaf.dtype) != array]
            if beyond.size:
                raise EnvError(_promised(leaf, where, f"{leaf.dtype}, it has {beyond.flat[0]}"))


def _may_wrap(given: np.dtype[Any], kept: np.dtype[Any]) -> bool:
    """Whether a whole number of the one may become another number in the other."""
    return given.kind in "iu" and kept.kind in "iu" and not np.can_cast(given, kept)


def _promised(leaf: ObsLeaf, where: str, what: str) -> str:
    return f"{leaf.spec.name or 'observation'}{where}: the space promises {what}"


class ObsRows:
    """A batch of observations that is written row by row, each as its space promises it.

    A kind that was found sound is not looked at closely again: that takes longer than to copy it.
    Only of numbers that may be too large for the space's dtype each one is.
    """

    def __init__(self, leaves: Sequence[ObsLeaf], num_rows: int) -> None:
        self.arrays: dict[str, NDArray[Any]] = {
            leaf.spec.name: np.zeros((num_rows, *leaf.spec.shape), leaf.dtype) for leaf in leaves
        }
        self._targets = [
            (leaf, self.arrays[leaf.spec.name], leaf.spec.shape, set[Any]()) for leaf in leaves
        ]
        first, *others = leaves
        is_whole = not others and not first.path and first.start is None
        # An observation that is an array needs no walk through its leaves.
        self._whole = self._targets[0] if is_whole else None

    def write(self, row: int, obs: Any, where: str = "") -> None:
        """Store an observation; EnvError for one that its space does not describe."""
        if self._whole is not None:
            _, target, shape, known = self._whole
            kind = obs.dtype if type(obs) is _ARRAY and obs.shape == shape else type(obs)
            if kind in known:
                target[row] = obs
                return
        for leaf, target, shape, known in self._targets:
            try:
                value = leaf.of(obs)
            except (LookupError, TypeError, ValueError):
                value = None  # which is told of below
            is_array = type(value) is _ARRAY and value.shape == shape
            kind = value.dtype if is_array else type(value)
            if kind not in known:
                check_obs((leaf,), obs, where=where)
                # The type of any other value says neither its shape nor its dtype.
                is_plain = is_array or isinstance(value, np.generic | int | float)
                # Python's own numbers numpy refuses by itself.
                is_numpy = is_array or isinstance(value, np.generic)
                if is_plain and not (is_numpy and _may_wrap(value.dtype, leaf.dtype)):
                    known.add(kind)
            target[row] = value


class ChoicesCheck:
    """Refuses categories that their space does not have, in every step.

    A network has no place for them: they would end it, or pass for choices of the next item.
    """

    def __init__(self, leaves: Sequence[ObsLeaf]) -> None:
        self._leaves = [(leaf, _last_choices(leaf)) for leaf in leaves if leaf.spec.choices]

    def check(self, obs: Mapping[str, NDArray[Any]], rows: Any = ...) -> None:
        """Look at these rows of batched leaves."""
        for leaf, last in self._leaves:
            values = obs[leaf.spec.name][rows]
            # Viewed as unsigned, a negative category is a huge one.
            is_beyond = values.view(last.dtype) > last
            if np.count_nonzero(is_beyond):
                first, *_ = np.argwhere(is_beyond).tolist()
                raise EnvError(_why_no_choice(leaf, tuple(first[1:]), int(values[tuple(first)])))


def _why_no_choice(leaf: ObsLeaf, item: tuple[int, ...], value: int) -> str:
    """In the environment's own numbers."""
    at = f" at {list(item)}" if item else ""
    first = 0 if leaf.start is None else int(leaf.start[item])
    last = first + int(_last_choices(leaf)[item])
    return (
        f"{leaf.spec.name or 'observation'}{at}: the space promises {first} to {last}, "
        f"it is {first + value}"
    )


def _last_choices(leaf: ObsLeaf) -> NDArray[Any]:
    """The highest category of each item, counted from 0."""
    highest = np.array(leaf.spec.choices).reshape(leaf.spec.shape) - 1
    return highest.astype(f"u{leaf.dtype.itemsize}")


def arrays_of(space: Space[Any], path: Path = ()) -> Iterator[tuple[Path, Space[Any]]]:
    """The spaces in a nested one that are no Dict and no Tuple, and the keys that lead to them."""
    if isinstance(space, Dict):
        for key, part in space.spaces.items():
            yield from arrays_of(part, (*path, key))
    elif isinstance(space, Tuple):
        for index, part in enumerate(space.spaces):
            yield from arrays_of(part, (*path, index))
    else:
        yield path, space


def name_of(path: Path) -> str:
    return "/".join(str(key) for key in path)


def short(space: Space[Any]) -> str:
    """A space on one line: the bounds of a big Box would fill a page."""
    text = " ".join(str(space).split())
    return text if len(text) <= 120 else f"{text[:117]}..."


def choices_of(space: "Discrete[Any] | MultiDiscrete[Any] | MultiBinary") -> tuple[int, ...]:
    """How many categories each item has."""
    if isinstance(space, Discrete):
        return (int(space.n),)
    if isinstance(space, MultiDiscrete):
        return tuple(space.nvec.reshape(-1).tolist())
    return (2,) * int(np.prod(space.shape))


def _obs_leaf(path: Path, space: Space[Any]) -> ObsLeaf:
    name = name_of(path)
    try:
        if isinstance(space, Box | MultiBinary):
            dtype = np.dtype(space.dtype)
            return ObsLeaf(path, ArraySpec(name, tuple(space.shape), dtype.name), dtype)
        if isinstance(space, Discrete | MultiDiscrete):
            dtype = np.dtype(space.dtype)
            spec = ArraySpec(name, tuple(space.shape or ()), dtype.name, choices_of(space))
            start = np.asarray(space.start, dtype)
            return ObsLeaf(path, spec, dtype, start if start.any() else None)
    except SpacesError as error:
        raise EnvError(f"observation space {short(space)}: {error}") from error
    at = f" at {name!r}" if path else ""
    hint = f"; {LEAVE_OUT}" if path else ""
    raise EnvError(f"observation space {short(space)}{at}: {SUPPORTED_OBS}{hint}")
