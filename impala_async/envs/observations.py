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


def obs_leaves(space: Space[Any], *, is_stacked: bool = False) -> tuple[ObsLeaf, ...]:
    """The leaves of an observation space, in the order in which the spec has them.

    `is_stacked`: images are windows over frames.
    """
    found = parts_of(space, "observation space").items()
    leaves = tuple(_obs_leaf(space, name, path, part, is_stacked) for name, (path, part) in found)
    if is_stacked and not any(leaf.spec.is_stack for leaf in leaves):
        raise EnvError(
            f"env.frame_stack: observation space {short(space)} has no stack of images, bytes of "
            "three dimensions or more: set it to off"
        )
    return leaves


class ObsRows:
    """Observations of a batch as arrays of leaves, each checked to be what its space promises.

    A row is written by itself, or a batched observation is read as a whole. Written unchecked, a
    wrong shape would be broadcast, and a wrong dtype truncated, in silence.
    """

    def __init__(self, leaves: Sequence[ObsLeaf], num_rows: int) -> None:
        self.arrays: dict[str, NDArray[Any]] = {
            leaf.spec.name: np.zeros((num_rows, *leaf.spec.shape), leaf.dtype) for leaf in leaves
        }
        self._leaves = [(leaf, self.arrays[leaf.spec.name], set[Any]()) for leaf in leaves]
        first, *others = leaves
        # An observation that is an array needs no walk through its leaves.
        self._is_array = not others and not first.path and first.start is None
        self._choices = [(leaf, _last_choices(leaf)) for leaf in leaves if leaf.spec.choices]

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
            try:
                value = leaf.of(obs)
            except (LookupError, TypeError, ValueError):
                value = None  # which is told of below
            is_array = type(value) is np.ndarray and value.shape == leaf.spec.shape
            kind = value.dtype if is_array else type(value)
            if kind not in known:
                array = _checked(leaf, obs, leaf.spec.shape, where)
                # The type of any other value says neither its shape nor its dtype.
                is_plain = is_array or isinstance(value, np.generic | int | float)
                if is_plain and not _may_wrap(array.dtype, leaf.dtype):
                    known.add(kind)
            target[row] = value

    def read(self, obs: Any, where: str = "", rows: Any = ...) -> dict[str, NDArray[Any]]:
        """A batched observation: writable, in the spec's dtypes, and copied only for that.

        `rows`: those whose categories matter.
        """
        flat = {}
        for leaf, target, _ in self._leaves:
            array = np.asarray(_checked(leaf, obs, target.shape, where), leaf.dtype)
            flat[leaf.spec.name] = array if array.flags.writeable else array.copy()
        self.check_choices(flat, rows)
        return flat

    def check_choices(self, obs: Mapping[str, NDArray[Any]], rows: Any = ...) -> None:
        """Refuse categories that their space does not have.

        They would end a network, or pass for choices of the next item.
        """
        for leaf, last in self._choices:
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


def _checked(leaf: ObsLeaf, obs: Any, shape: tuple[int, ...], where: str) -> NDArray[Any]:
    """A leaf's part of an observation; EnvError for one that its own space does not describe."""
    try:
        array = np.asarray(leaf.of(obs))
    except (LookupError, TypeError, ValueError) as error:
        raise _broken(leaf, where, "it, but it is not there") from error
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


def _last_choices(leaf: ObsLeaf) -> NDArray[Any]:
    """The highest category of each item, counted from 0."""
    highest = np.array(leaf.spec.choices).reshape(leaf.spec.shape) - 1
    return highest.astype(f"u{leaf.dtype.itemsize}")


def parts_of(space: Space[Any], what: str) -> dict[str, tuple[Path, Space[Any]]]:
    """The spaces in a nested one that are no Dict and no Tuple, with the keys that lead to them.

    Args:
        space: the space.
        what: what an error calls it.
    """
    found: dict[str, tuple[Path, Space[Any]]] = {}
    for path, part in _arrays_of(space, ()):
        name = name_of(path)
        if name in found:
            raise EnvError(f"{what} {short(space)} has two parts called {name!r}: rename a key")
        found[name] = path, part
    if not found:
        raise EnvError(f"{what} {short(space)} is empty")
    return found


def _arrays_of(space: Space[Any], path: Path) -> Iterator[tuple[Path, Space[Any]]]:
    if isinstance(space, Dict | Tuple):
        items = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        for key, part in items:
            yield from _arrays_of(part, (*path, key))
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


def _obs_leaf(
    whole: Space[Any], name: str, path: Path, space: Space[Any], is_stacked: bool
) -> ObsLeaf:
    choices: tuple[int, ...] = ()
    start: Any = 0
    if isinstance(space, Discrete | MultiDiscrete):
        choices, start = choices_of(space), space.start
    elif not isinstance(space, Box | MultiBinary):
        at, hint = (f" at {name!r}", f"; {LEAVE_OUT}") if path else ("", "")
        raise EnvError(f"observation space {short(whole)}{at}: {SUPPORTED_OBS}{hint}")
    dtype, shape = np.dtype(space.dtype), tuple(space.shape or ())
    is_stack = is_stacked and dtype == np.uint8 and len(shape) >= 3 and not choices
    try:
        spec = ArraySpec(name, shape, dtype.name, choices, is_stack)
    except SpacesError as error:
        raise EnvError(f"observation space {short(whole)}: {error}") from error
    return ObsLeaf(path, spec, dtype, np.asarray(start, dtype) if np.any(start) else None)
