"""Gymnasium spaces to our spec, and our actions to those that an environment takes.

On our side every choice counts from 0, a MultiBinary is a choice of two for each bit, and numbers
are unbounded: they are clipped, or squashed by a tanh, only here, on their way to `env.step`.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from numpy.typing import NDArray

from impala_async.envs.batch import Actions
from impala_async.envs.observations import choices_of, name_of, obs_leaves, parts_of, short
from impala_async.errors import EnvError
from impala_async.schema import ActionPart, ActionSpec, ObsSpec

logger = logging.getLogger(__name__)

SUPPORTED_ACTION = (
    "supported are Discrete, MultiDiscrete, MultiBinary, Box of floats, and Dict and Tuple of those"
)
AUTO = "auto"
USUAL_KEY = "action_mask"

Turn = Callable[[NDArray[Any]], NDArray[Any]]


class SpaceOptions(NamedTuple):
    """How spaces are read: the settings of `env` that matter here."""

    mask_key: str | None = AUTO
    is_squashed: bool = False
    is_stacked: bool = False


USUAL = SpaceOptions()


class Spaces:
    """Both spaces of one environment; EnvError for those that are not supported.

    Each call of `batch` and `each` makes new arrays, since environments keep the actions that they
    are given.
    """

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        options: SpaceOptions = USUAL,
    ) -> None:
        self.leaves = obs_leaves(observation_space, is_stacked=options.is_stacked)
        self.obs_spec = ObsSpec(tuple(leaf.spec for leaf in self.leaves))
        self._action_space = action_space
        self._is_nested = isinstance(action_space, Dict | Tuple)
        found = parts_of(action_space, "action space")
        parts = tuple(_part(name, part, options) for name, (_, part) in found.items())
        if options.is_squashed and all(part.kind == "discrete" for part in parts):
            raise EnvError(
                f"env.squash_actions: action space {short(action_space)} has no numbers to squash: "
                "drop it"
            )
        self.action_spec = ActionSpec(parts, self._legal(observation_space, parts, options))
        self._turns = {name: _turn(part, options) for name, (_, part) in found.items()}
        # A Box wants arrays, also where they have no dimension.
        self._scalars = {
            name for name, (_, part) in found.items() if isinstance(part, Box) and not part.shape
        }

    def batch(self, actions: Actions) -> Any:
        """The environment's action, with an array of all columns at each leaf."""
        if not self._is_nested:
            return self._turns[""](actions[""])
        turned = {name: turn(actions[name]) for name, turn in self._turns.items()}
        return _nest(self._action_space, (), turned)

    def each(self, actions: Actions) -> Iterable[Any]:
        """One action of the environment per column."""
        if not self._is_nested:
            return self._columns("", self._turns[""](actions[""]))
        columns = {
            name: self._columns(name, turn(actions[name])) for name, turn in self._turns.items()
        }
        return [
            _nest(self._action_space, (), dict(zip(columns, values, strict=True)))
            for values in zip(*columns.values(), strict=True)
        ]

    def _columns(self, name: str, values: NDArray[Any]) -> Iterable[Any]:
        return [values[i, ...] for i in range(len(values))] if name in self._scalars else values

    def _legal(
        self, space: Space[Any], parts: tuple[ActionPart, ...], options: SpaceOptions
    ) -> str | None:
        """The leaf that masks illegal actions: under the usual key only if it fits."""
        if options.mask_key is None:
            return None
        key = USUAL_KEY if options.mask_key == AUTO else options.mask_key
        why_not = self._why_no_mask(space, key, sum(sum(part.choices) for part in parts))
        if why_not is None:
            return key
        if options.mask_key != AUTO:
            raise EnvError(
                f"env.action_mask_key: {key!r} must be a key of a Dict observation with an integer "
                f"or a bool for each discrete action, but {why_not}"
            )
        if any(leaf.spec.name == key for leaf in self.leaves):
            logger.warning("%r is taken for an input, not for a mask of actions: %s", key, why_not)
        return None

    def _why_no_mask(self, space: Space[Any], key: str, num_choices: int) -> str | None:
        if num_choices == 0:
            return "there are no discrete actions"
        leaf = next((leaf for leaf in self.leaves if leaf.spec.name == key), None)
        if leaf is None or not isinstance(space, Dict):
            return f"it is no key of {short(space)}"
        kind = "categories" if leaf.spec.choices else leaf.dtype
        if leaf.spec.num_items != num_choices or leaf.dtype.kind not in "biu" or leaf.spec.choices:
            return f"it has shape {leaf.spec.shape} of {kind}, and there are {num_choices} actions"
        if len(self.leaves) == 1:
            return "the observation has nothing else"
        return None


def _nest(space: Space[Any], path: tuple[Any, ...], values: Actions) -> Any:
    if isinstance(space, Dict):
        return {key: _nest(part, (*path, key), values) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(_nest(part, (*path, i), values) for i, part in enumerate(space.spaces))
    return values[name_of(path)]


def _part(name: str, space: Space[Any], options: SpaceOptions) -> ActionPart:
    whose = f"action space {short(space)}" + (f" at {name!r}" if name else "")
    if isinstance(space, Discrete | MultiDiscrete | MultiBinary):
        choices = choices_of(space)
        if not choices:
            raise EnvError(f"{whose} has no items to choose")
        return ActionPart(name, "discrete", choices, tuple(space.shape or ()))
    if not isinstance(space, Box) or np.dtype(space.dtype).kind != "f":
        raise EnvError(f"{whose}: {SUPPORTED_ACTION}")
    if not all(space.shape):
        raise EnvError(f"{whose} has no numbers")
    if not options.is_squashed:
        return ActionPart(name, "continuous", (), tuple(space.shape))
    if not space.is_bounded():
        raise EnvError(f"env.squash_actions: {whose} has no bounds to squash into")
    return ActionPart(name, "squashed", (), tuple(space.shape))


def _turn(space: Any, options: SpaceOptions) -> Turn:
    """From our values of one part to a new array of the space's."""
    dtype = np.dtype(space.dtype)
    if not isinstance(space, Box):
        start = getattr(space, "start", 0)
        if np.any(start):
            # int32 to a narrower dtype: the values fit, being below the number of choices.
            return lambda values: np.add(values, start, dtype=dtype, casting="unsafe")
        return lambda values: values.astype(dtype)
    low, high = space.low, space.high
    if not options.is_squashed:
        return lambda values: np.minimum(np.maximum(values, low), high).astype(dtype, copy=False)
    # In float64, since the width of a wide space may be beyond float32.
    low, high = low.astype(np.float64), high.astype(np.float64)
    center, reach = high / 2 + low / 2, high / 2 - low / 2

    def squash(values: NDArray[Any]) -> NDArray[Any]:
        # The last bit of a product may lie beyond the bound.
        squashed: NDArray[Any] = np.clip(center + reach * np.tanh(values), low, high)
        return squashed.astype(dtype)

    return squash
