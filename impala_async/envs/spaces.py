"""Gymnasium spaces to our spec, and observations and actions between the two.

An observation is flat leaves: a Box is one leaf whose name is empty, a Dict has a leaf "a/b" for
each Box in it, in the order of gymnasium's own Dict. An action is one Discrete; on our side its
choices count from 0, whatever the space starts at.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete
from numpy.typing import NDArray

from impala_async.errors import EnvError
from impala_async.spec import ActionPart, ActionSpec, ArraySpec, ObsSpec

SUPPORTED_OBS = "supported now are Box and (nested) Dict of Box"
SUPPORTED_ACTION = "supported now is Discrete"

Path = tuple[Any, ...]
Actions = Mapping[str, NDArray[np.int32]]


class ObsLeaf(NamedTuple):
    """One array of an observation: the keys that lead to it, and what it looks like."""

    path: Path
    spec: ArraySpec
    dtype: np.dtype[Any]

    def of(self, obs: Any) -> Any:
        """This leaf's part of an observation, batched or not."""
        for key in self.path:
            obs = obs[key]
        return obs


def describe_spaces(
    observation_space: Space[Any], action_space: Space[Any]
) -> tuple[ObsSpec, ActionSpec]:
    """Our spec of an environment's spaces; EnvError for spaces that are not supported."""
    leaves = obs_leaves(observation_space)
    return ObsSpec(tuple(leaf.spec for leaf in leaves)), describe_action(action_space)


def obs_leaves(space: Space[Any]) -> tuple[ObsLeaf, ...]:
    """The leaves of an observation space, in the order in which the spec has them."""
    leaves = tuple(_obs_leaf(path, box) for path, box in _boxes((), space))
    names = [leaf.spec.name for leaf in leaves]
    if not leaves:
        raise EnvError(f"observation space {_short(space)} is empty: {SUPPORTED_OBS}")
    for name in names:
        if names.count(name) > 1:
            raise EnvError(
                f"observation space {_short(space)} has two leaves called {name!r}: rename a key"
            )
    return leaves


def describe_action(space: Space[Any]) -> ActionSpec:
    """Our spec of an action space."""
    return ActionSpec((ActionPart("", "discrete", int(_discrete(space).n)),))


def flatten_obs(leaves: Sequence[ObsLeaf], obs: Any) -> dict[str, NDArray[Any]]:
    """A batched observation by leaf name: writable, in the spec's dtypes; copied only for that."""
    flat = {}
    for leaf in leaves:
        array = np.asarray(leaf.of(obs), leaf.dtype)
        flat[leaf.spec.name] = array if array.flags.writeable else array.copy()
    return flat


def check_obs(leaves: Sequence[ObsLeaf], obs: Any, num_envs: int | None = None) -> None:
    """Refuse an observation that its own space does not describe; `num_envs`: a batched one.

    Writing it into a batch would broadcast a wrong shape and truncate a wrong dtype in silence.
    """
    for leaf in leaves:
        name = leaf.spec.name or "observation"
        try:
            array = np.asarray(leaf.of(obs))
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise EnvError(f"{name}: the space promises it, but it is not there") from error
        wanted = leaf.spec.shape if num_envs is None else (num_envs, *leaf.spec.shape)
        if array.shape != wanted:
            raise EnvError(f"{name}: the space promises shape {wanted}, it has {array.shape}")
        if not np.can_cast(array.dtype, leaf.dtype, casting="same_kind"):
            raise EnvError(f"{name}: the space promises {leaf.dtype}, it is {array.dtype}")


class ActionAdapter:
    """Turns our actions into those of a Discrete space, in the space's own dtype.

    The array that it returns is its own, and good until the next call.
    """

    def __init__(self, space: Space[Any], num_envs: int) -> None:
        discrete = _discrete(space)
        self._start = discrete.start
        self._actions = np.zeros(num_envs, discrete.dtype)

    def __call__(self, actions: Actions) -> NDArray[Any]:
        # int32 to a narrower space: the values fit, since they are below n.
        np.add(actions[""], self._start, out=self._actions, casting="unsafe")
        return self._actions


def _boxes(path: Path, space: Space[Any]) -> Iterator[tuple[Path, Box]]:
    if isinstance(space, Box):
        yield path, space
    elif isinstance(space, Dict):
        for key, part in space.spaces.items():
            yield from _boxes((*path, key), part)
    else:
        at = f" at {_name(path)!r}" if path else ""
        raise EnvError(f"observation space {_short(space)}{at}: {SUPPORTED_OBS}")


def _obs_leaf(path: Path, box: Box) -> ObsLeaf:
    dtype = np.dtype(box.dtype)
    try:
        return ObsLeaf(path, ArraySpec(_name(path), box.shape, dtype.name), dtype)
    except ValueError as error:
        raise EnvError(f"observation space {_short(box)}: {error}") from error


def _discrete(space: Space[Any]) -> Discrete[Any]:
    if not isinstance(space, Discrete):
        raise EnvError(f"action space {_short(space)}: {SUPPORTED_ACTION}")
    return space


def _name(path: Path) -> str:
    return "/".join(str(key) for key in path)


def _short(space: Space[Any]) -> str:
    """A space on one line: the bounds of a big Box would fill a page."""
    text = " ".join(str(space).split())
    return text if len(text) <= 120 else f"{text[:117]}..."
