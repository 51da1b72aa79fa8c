"""Action spaces to the parts of an action, and our actions to those that an environment takes.

On our side every choice counts from 0, a MultiBinary is a choice of two for each bit, and numbers
are unbounded: they are clipped, or squashed by a tanh, only here, on their way to `env.step`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from numpy.typing import NDArray

from impala_async.envs.observations import arrays_of, choices_of, name_of, short
from impala_async.errors import EnvError
from impala_async.spec import ActionPart

SUPPORTED_ACTION = (
    "supported are Discrete, MultiDiscrete, MultiBinary, Box of floats, and Dict and Tuple of those"
)

Actions = Mapping[str, NDArray[Any]]
Turn = Callable[[NDArray[Any]], NDArray[Any]]


def action_parts(space: Space[Any], *, is_squashed: bool) -> tuple[ActionPart, ...]:
    """The parts of an action space, in the order in which the spec has them."""
    parts = tuple(_part(name_of(path), part, is_squashed) for path, part in arrays_of(space))
    if not parts:
        raise EnvError(f"action space {short(space)} is empty: {SUPPORTED_ACTION}")
    if len({part.name for part in parts}) < len(parts):
        raise EnvError(f"action space {short(space)} has two parts of one name: rename a key")
    return parts


class ActionAdapter:
    """Turns our actions into those of a space, in the space's own dtypes.

    The arrays that it returns are its own, and good until the next call.
    """

    def __init__(self, space: Space[Any], num_envs: int, *, is_squashed: bool = False) -> None:
        self._space = space
        self._num_envs = num_envs
        self._turns = {
            name_of(path): _turn(part, num_envs, is_squashed) for path, part in arrays_of(space)
        }

    def batch(self, actions: Actions) -> Any:
        """One nested action with an array of all columns at each leaf."""
        return self._nest(self._space, (), self._turned(actions))

    def each(self, actions: Actions) -> Iterable[Any]:
        """One action per column."""
        turned = self._turned(actions)
        if "" in turned:
            return turned[""]
        return [
            self._nest(self._space, (), {name: values[i] for name, values in turned.items()})
            for i in range(self._num_envs)
        ]

    def _turned(self, actions: Actions) -> dict[str, NDArray[Any]]:
        return {name: turn(actions[name]) for name, turn in self._turns.items()}

    def _nest(self, space: Space[Any], path: tuple[Any, ...], values: Mapping[str, Any]) -> Any:
        if isinstance(space, Dict):
            return {k: self._nest(part, (*path, k), values) for k, part in space.spaces.items()}
        if isinstance(space, Tuple):
            return tuple(self._nest(p, (*path, i), values) for i, p in enumerate(space.spaces))
        return values[name_of(path)]


def _part(name: str, space: Space[Any], is_squashed: bool) -> ActionPart:
    if isinstance(space, Discrete | MultiDiscrete | MultiBinary):
        return ActionPart(name, "discrete", choices_of(space), tuple(space.shape or ()))
    if isinstance(space, Box) and np.dtype(space.dtype).kind == "f":
        if not is_squashed:
            return ActionPart(name, "continuous", (), tuple(space.shape))
        if space.is_bounded():
            return ActionPart(name, "squashed", (), tuple(space.shape))
        raise EnvError(
            f"env.squash_actions: action space {short(space)} has no bounds to squash into"
        )
    at = f" at {name!r}" if name else ""
    raise EnvError(f"action space {short(space)}{at}: {SUPPORTED_ACTION}")


def _turn(space: Any, num_envs: int, is_squashed: bool) -> Turn:
    """From our values of one part to the space's, written into an array of its own."""
    if not isinstance(space, Box):
        start = getattr(space, "start", 0)
        choices = np.zeros((num_envs, *(space.shape or ())), space.dtype)
        # int32 to a narrower dtype: the values fit, since they are below the number of choices.
        return lambda values: np.add(values, start, out=choices, casting="unsafe")
    numbers = np.zeros((num_envs, *space.shape), space.dtype)
    low, high = space.low, space.high
    if not is_squashed:
        return lambda values: np.clip(values, low, high, out=numbers)
    center, reach = (high + low) / 2, (high - low) / 2

    def squash(values: NDArray[Any]) -> NDArray[Any]:
        # The last bit of a product may lie beyond the bound.
        return np.clip(center + reach * np.tanh(values), low, high, out=numbers)

    return squash
