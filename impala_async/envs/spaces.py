"""Gymnasium spaces to our spec, and our actions to those that an environment takes.

A nesting of Dict and Tuple is flat on our side, with a leaf or part "a/b" for each array. Choices
and categories count from 0, a MultiBinary has two for each bit, and numbers are unbounded: they are
clipped, or squashed by a tanh, only on their way to `env.step`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray

from impala_async.config.env import EnvSection
from impala_async.envs.batch import Actions, ObsLeaf
from impala_async.errors import EnvError, SpacesError
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec

logger = logging.getLogger(__name__)

SUPPORTED = (
    "supported are Discrete, MultiDiscrete, MultiBinary, Box (for actions, one of floats), and "
    "Dict and Tuple of those"
)
LEAVE_OUT = "leave it out by a wrapper (env.wrappers), as gymnasium.wrappers:FilterObservation"
MOST_CHOICES = 1 << 20
AUTO = "auto"
USUAL_MASK = "action_mask"

Path = tuple[Any, ...]


class Spaces:
    """Both spaces of one environment; EnvError for those that are not supported.

    `batch` and `each` make new arrays, since environments keep the actions that they are given.
    """

    def __init__(
        self, observation_space: Space[Any], action_space: Space[Any], section: EnvSection
    ) -> None:
        self._made_of = observation_space, action_space, section
        self.observation_space, self.action_space = observation_space, action_space
        is_stacked, is_squashed = section.frame_stack == "on", section.squash_actions
        mask = USUAL_MASK if section.action_mask_key == AUTO else section.action_mask_key
        self.leaves = obs_leaves(observation_space, is_stacked=is_stacked, mask=mask)
        self.obs_spec = ObsSpec(tuple(leaf.spec for leaf in self.leaves))
        arrays = _arrays_of(observation_space, "observation space").items()
        self.boxes = {name: part for name, (_, part) in arrays if isinstance(part, Box)}
        found = _arrays_of(action_space, "action space")
        parts = tuple(_part(name, part, is_squashed) for name, (_, part) in found.items())
        if is_squashed and all(part.kind == "discrete" for part in parts):
            raise EnvError(
                f"env.squash_actions: action space {short(action_space)} has no numbers to squash: "
                "drop it"
            )
        num_choices = sum(sum(part.choices) for part in parts)
        if num_choices > MOST_CHOICES:
            raise EnvError(
                f"action space {short(action_space)} has {num_choices:,} choices, and a policy "
                f"gives each a number: wants {MOST_CHOICES:,} at most"
            )
        is_usual = section.action_mask_key == AUTO
        legal = self._legal(observation_space, num_choices, mask, is_usual=is_usual)
        self.action_spec = ActionSpec(parts, legal)
        self._turns = {name: _turn(part, is_squashed) for name, (_, part) in found.items()}
        self._batched = batch_space(action_space)
        self._is_nested = isinstance(action_space, Dict | Tuple)
        if self._is_nested and _has_empty(action_space):
            whose = f"action space {short(action_space)}"
            raise EnvError(f"{whose} has a Dict or Tuple without parts: leave it out")

    def __reduce__(self) -> tuple[Any, ...]:
        return Spaces, self._made_of

    def batch(self, actions: Actions) -> Any:
        """The environment's action, with an array of all columns at each leaf."""
        if not self._is_nested:
            return self._turns[""](actions[""])
        turned = {name: turn(actions[name]) for name, turn in self._turns.items()}
        return _nest(self.action_space, (), turned)

    def each(self, actions: Actions) -> Iterable[Any]:
        batch: Iterable[Any] = self.batch(actions)
        return iterate(self._batched, batch) if self._is_nested else batch

    def _legal(
        self, space: Space[Any], num_choices: int, key: str | None, *, is_usual: bool
    ) -> str | None:
        """The leaf that masks illegal actions: under the usual key only if it fits."""
        specs = [leaf.spec for leaf in self.leaves]
        leaf = next((spec for spec in specs if spec.name == key), None)
        if key is None or (is_usual and leaf is None):
            for spec in specs:
                if key and spec.name.endswith(f"/{key}"):
                    told = "%r is taken for an input: if it masks actions, set env.action_mask_key"
                    logger.warning(f"{told} to that", spec.name)
            return None
        is_flags = leaf is not None and not (leaf.is_float or leaf.choices)
        if leaf is not None and is_flags and leaf.num_items == num_choices and len(specs) > 1:
            return key
        must = (
            f"must have an integer or a bool for each of {num_choices} discrete actions, and stand "
            f"beside other keys of a Dict: the observation space is {short(space)}"
        )
        if not is_usual:
            raise EnvError(f"env.action_mask_key: {key!r} {must}")
        logger.warning("%r is taken for an input, not for a mask of actions, which %s", key, must)
        return None


def obs_leaves(
    space: Space[Any], *, is_stacked: bool = False, mask: str | None = None
) -> tuple[ObsLeaf, ...]:
    """The leaves of an observation space, in the order in which the spec has them. `mask` has a
    number for each action in every row, whatever its shape: it is no stack."""
    leaves = []
    for name, (path, part) in _arrays_of(space, "observation space").items():
        try:
            leaves.append(_obs_leaf(name, path, part, is_stacked and name != mask))
        except SpacesError as error:
            at = f" at {name!r}" if name else ""
            raise EnvError(f"observation space {short(space)}{at}: {error}") from error
    if is_stacked and not any(leaf.spec.is_stack for leaf in leaves):
        raise EnvError(
            f"env.frame_stack: observation space {short(space)} has no stack of images, bytes of "
            "three dimensions or more: set it to off"
        )
    return tuple(leaves)


def _obs_leaf(name: str, path: Path, space: Space[Any], is_stacked: bool) -> ObsLeaf:
    choices: tuple[int, ...] = ()
    start: Any = 0
    if isinstance(space, Discrete | MultiDiscrete):
        choices, start = _choices_of(space), space.start
    elif not isinstance(space, Box | MultiBinary):
        raise SpacesError(f"{SUPPORTED}; {LEAVE_OUT}" if path else SUPPORTED)
    dtype, shape = np.dtype(space.dtype), tuple(space.shape or ())
    is_stack = is_stacked and dtype == np.uint8 and len(shape) >= 3 and not choices
    spec = ArraySpec(name, shape, dtype.name, choices, is_stack)
    first = np.asarray(start, dtype) if np.any(start) else None
    return ObsLeaf(path, spec, dtype, first, is_bits=isinstance(space, MultiBinary))


def _part(name: str, space: Space[Any], is_squashed: bool) -> ActionPart:
    whose = f"action space {short(space)}" + (f" at {name!r}" if name else "")
    if 0 in (space.shape or ()):
        raise EnvError(f"{whose} is empty")
    if isinstance(space, Discrete | MultiDiscrete | MultiBinary):
        return ActionPart(name, "discrete", _choices_of(space), tuple(space.shape or ()))
    if not isinstance(space, Box) or np.dtype(space.dtype).kind != "f":
        raise EnvError(f"{whose}: {SUPPORTED}")
    if is_squashed and not space.is_bounded():
        raise EnvError(f"env.squash_actions: {whose} has no bounds to squash into")
    return ActionPart(name, "squashed" if is_squashed else "continuous", (), tuple(space.shape))


def _turn(space: Any, is_squashed: bool) -> Callable[[NDArray[Any]], NDArray[Any]]:
    dtype = np.dtype(space.dtype)
    if not isinstance(space, Box):
        if not np.any(start := getattr(space, "start", 0)):
            return lambda values: values.astype(dtype)
        # int32 to a narrower dtype: the values fit, being below the number of choices.
        return lambda values: np.add(values, start, dtype=dtype, casting="unsafe")
    low, high = space.low, space.high
    if not is_squashed:
        return lambda values: np.minimum(np.maximum(values, low), high).astype(dtype, copy=False)
    # In float64, since the width of a wide space may be beyond float32.
    low, high = low.astype(np.float64), high.astype(np.float64)
    center, reach = high / 2 + low / 2, high / 2 - low / 2
    # The last bit of a product may lie beyond the bound.
    return lambda values: np.clip(center + reach * np.tanh(values), low, high).astype(dtype)


def _nest(space: Space[Any], path: Path, values: Actions) -> Any:
    if isinstance(space, Dict):
        return {key: _nest(part, (*path, key), values) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(_nest(part, (*path, i), values) for i, part in enumerate(space.spaces))
    return values[_name_of(path)]


def _arrays_of(space: Space[Any], what: str) -> dict[str, tuple[Path, Space[Any]]]:
    """The spaces in a nested one that are no Dict and no Tuple, with the keys that lead to them."""
    if not isinstance(space, Space):
        kind = type(space)  # the old gym has spaces of the same names
        got = f"{space!r} ({kind.__module__}.{kind.__qualname__})"
        raise EnvError(f"{what}: wants a space of gymnasium, got {got}")
    found: dict[str, tuple[Path, Space[Any]]] = {}
    for path, part in _walk(space, ()):
        name = _name_of(path)
        if name in found:
            raise EnvError(f"{what} {short(space)} has two parts called {name!r}: rename a key")
        found[name] = path, part
    if not found:
        raise EnvError(f"{what} {short(space)} is empty")
    return found


def _walk(space: Space[Any], path: Path) -> Iterator[tuple[Path, Space[Any]]]:
    if isinstance(space, Dict | Tuple):
        items = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        for key, part in items:
            yield from _walk(part, (*path, key))
    else:
        yield path, space


def _has_empty(space: Space[Any]) -> bool:
    """Whether a Dict or Tuple in it has no part, as gymnasium batches none such."""
    if not isinstance(space, Dict | Tuple):
        return False
    parts = [*(space.spaces.values() if isinstance(space, Dict) else space.spaces)]
    return not parts or any(map(_has_empty, parts))


def _name_of(path: Path) -> str:
    return "/".join(str(key) for key in path)


def _choices_of(space: "Discrete[Any] | MultiDiscrete[Any] | MultiBinary") -> tuple[int, ...]:
    if isinstance(space, Discrete):
        return (int(space.n),)
    if isinstance(space, MultiDiscrete):
        return tuple(space.nvec.reshape(-1).tolist())
    return (2,) * int(np.prod(space.shape))


def short(space: Space[Any]) -> str:
    """A space on one line: the bounds of a big Box would fill a page."""
    text = " ".join(str(space).split())
    return text if len(text) <= 120 else f"{text[:117]}..."
