"""Gymnasium's spaces as JSON and back: who acts with a policy later needs no environment for them.

A Box whose bounds are the same everywhere holds each once. Keys of a Dict may be whole numbers.
"""

from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from numpy.typing import NDArray

from impala_async.errors import EnvError


def as_json(space: Space[Any]) -> dict[str, Any]:
    """Those that an environment may have here; EnvError for others."""
    if isinstance(space, Dict):
        items = space.spaces.items()
        keys = ((key if isinstance(key, int) else str(key), part) for key, part in items)
        return {"kind": "Dict", "items": [[key, as_json(part)] for key, part in keys]}
    if isinstance(space, Tuple):
        return {"kind": "Tuple", "items": [as_json(part) for part in space.spaces]}
    dtype = np.dtype(space.dtype).name
    if isinstance(space, Box):
        low, high = _bounds(space.low), _bounds(space.high)
        return {"kind": "Box", "low": low, "high": high, "shape": space.shape, "dtype": dtype}
    if isinstance(space, Discrete):
        n, start = int(space.n), int(space.start)
        return {"kind": "Discrete", "n": n, "start": start, "dtype": dtype}
    if isinstance(space, MultiDiscrete):
        nvec, start = space.nvec.tolist(), space.start.tolist()
        return {"kind": "MultiDiscrete", "nvec": nvec, "start": start, "dtype": dtype}
    if isinstance(space, MultiBinary):
        shape = space.n if isinstance(space.n, int) else list(space.n)
        return {"kind": "MultiBinary", "n": shape}
    raise EnvError(f"{type(space).__name__} is no space that can be written down")


def from_json(text: dict[str, Any]) -> Space[Any]:
    """A space that `as_json` wrote down; KeyError, TypeError or EnvError for other text."""
    kind, dtype = text["kind"], np.dtype(text.get("dtype", "int8")).type
    if kind == "Dict":
        # As a list of pairs it keeps its order.
        return Dict([(key, from_json(part)) for key, part in text["items"]])
    if kind == "Tuple":
        return Tuple([from_json(part) for part in text["items"]])
    if kind == "Box":
        shape = tuple(text["shape"])
        low, high = (np.broadcast_to(np.array(text[k], dtype), shape) for k in ("low", "high"))
        return Box(low, high, shape, dtype)
    if kind == "Discrete":
        return Discrete(text["n"], start=text["start"], dtype=dtype)
    if kind == "MultiDiscrete":
        return MultiDiscrete(text["nvec"], dtype=dtype, start=text["start"])
    if kind == "MultiBinary":
        return MultiBinary(text["n"])
    raise EnvError(f"{kind!r} is no space that can be read")


def _bounds(values: NDArray[Any]) -> Any:
    is_one = values.size > 0 and bool((values == values.flat[0]).all())
    return values.flat[0].item() if is_one else values.tolist()
