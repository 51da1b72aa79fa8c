"""Spaces of gymnasium as JSON: a run folder keeps those of its environment, so that its policy can
be used where that environment is not.

A bound is a list of all its numbers, or of the one that they all are; null is no bound.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from numpy.typing import NDArray

from impala_async.envs.spaces import Spaces
from impala_async.errors import SpacesError
from impala_async.schema import MAX_COLUMN_BYTES

Saved = dict[str, Any]
# A column has two rows at least. A few words of a file would take all memory.
MOST_BYTES = MAX_COLUMN_BYTES // 2
BAD = (
    *(LookupError, TypeError, ValueError, AttributeError, AssertionError),
    *(OverflowError, MemoryError, RecursionError, SyntaxError),
)
"""The errors that numpy and gymnasium raise for a description of no space."""


def save_spaces(spaces: Spaces | None) -> Saved:
    """Both spaces of an environment, or of each agent of it."""
    assert spaces is not None, "only env workers know them"
    return {
        "observation": save_space(spaces.observation_space),
        "action": save_space(spaces.action_space),
    }


def load_spaces(saved: Saved) -> tuple[Space[Any], Space[Any]]:
    """The spaces of observations and actions; SpacesError names the one that is damaged."""
    found = []
    for what in ("observation", "action"):
        try:
            found.append(load_space(saved.get(what)))
        except SpacesError as error:
            raise SpacesError(f"{what}: {error}") from None
    return found[0], found[1]


def save_space(space: Space[Any]) -> Saved:
    """The space as JSON takes it; one of a kind that is not supported has no kind here."""
    if isinstance(space, Dict):
        # A list: JSON would turn a number that is a key into text. Other keys have no other form.
        parts = [
            [key if isinstance(key, str | int) else str(key), save_space(part)]
            for key, part in space.spaces.items()
        ]
        return {"kind": "Dict", "parts": parts}
    if isinstance(space, Tuple):
        return {"kind": "Tuple", "parts": [save_space(part) for part in space.spaces]}
    saved = {"dtype": np.dtype(space.dtype).name, "shape": list(space.shape or ())}
    if isinstance(space, Box):
        bounds = {"low": _saved_bound(space.low), "high": _saved_bound(space.high)}
        return {"kind": "Box", **saved, **bounds}
    if isinstance(space, Discrete):
        return {"kind": "Discrete", **saved, "n": int(space.n), "start": int(space.start)}
    if isinstance(space, MultiDiscrete):
        numbers = {"nvec": space.nvec.tolist(), "start": np.asarray(space.start).tolist()}
        return {"kind": "MultiDiscrete", **saved, **numbers}
    if isinstance(space, MultiBinary):
        return {"kind": "MultiBinary", **saved}
    return saved


def load_space(saved: Any) -> Space[Any]:
    """The space again; SpacesError for what is none, or larger than a row can be."""
    try:
        if (size := _size_of(saved)) > MOST_BYTES:
            raise SpacesError(f"takes {size} bytes, more than {MOST_BYTES}")
        return _load(saved)
    except BAD as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise SpacesError(f"describes no space: {what[:200]}") from None


def _size_of(saved: Saved) -> int:
    """The bytes of a row of it, before memory is taken for any."""
    if (kind := saved["kind"]) in ("Dict", "Tuple"):
        # A Dict has pairs of a key and its part.
        return sum(_size_of(part[1] if kind == "Dict" else part) for part in saved["parts"])
    return math.prod(saved["shape"]) * np.dtype(saved.get("dtype", "int8")).itemsize


def _load(saved: Saved) -> Space[Any]:
    return LOADERS[saved["kind"]](saved)


def _load_box(saved: Saved) -> Space[Any]:
    shape, dtype = tuple(saved["shape"]), np.dtype(saved["dtype"])
    low = _bound(saved["low"], -math.inf, shape, dtype)
    return Box(low, _bound(saved["high"], math.inf, shape, dtype), shape, dtype.type)


def _load_discrete(saved: Saved) -> Space[Any]:
    # Releases of gymnasium that take no dtype here have int64 alone.
    how: Any = {} if saved["dtype"] == "int64" else {"dtype": np.dtype(saved["dtype"]).type}
    space: Space[Any] = Discrete(saved["n"], start=saved["start"], **how)
    return space


def _load_multi_discrete(saved: Saved) -> Space[Any]:
    dtype: Any = np.dtype(saved["dtype"])
    nvec, start = (np.array(saved[key], dtype) for key in ("nvec", "start"))
    return MultiDiscrete(nvec, dtype.type, start=start)


def _load_multi_binary(saved: Saved) -> Space[Any]:
    shape = saved["shape"]
    return MultiBinary(shape[0] if len(shape) == 1 else shape)


LOADERS: dict[str, Callable[[Saved], Space[Any]]] = {
    "Box": _load_box,
    "Discrete": _load_discrete,
    "MultiDiscrete": _load_multi_discrete,
    "MultiBinary": _load_multi_binary,
    # Pairs keep their order, in which leaves come; a dict would be sorted.
    "Dict": lambda saved: Dict([(key, _load(part)) for key, part in saved["parts"]]),
    "Tuple": lambda saved: Tuple([_load(part) for part in saved["parts"]]),
}


def _saved_bound(bound: NDArray[Any]) -> list[float | None]:
    numbers = bound.reshape(-1)
    if numbers.size and (numbers == numbers[0]).all():
        numbers = numbers[:1]
    return [number if math.isfinite(number) else None for number in numbers.tolist()]


def _bound(
    saved: Iterable[float | None], unbounded: float, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    numbers = np.array([unbounded if each is None else each for each in saved], dtype)
    return np.full(shape, numbers[0]) if len(numbers) == 1 else numbers.reshape(shape)
