"""What a step returns besides its observation: a reward, and the two flags of an end.

numpy would take any of them for something: None for NaN, the text "False" for true, and one number
for those of all columns.
"""

import reprlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impala_async.errors import EnvError

# Types that need no look.
REWARDS = frozenset({float, int, np.float32, np.float64})
FLAGS = frozenset({bool, np.bool_})
_NUMBERS = "biuf"
_BOOL = np.dtype(np.bool_)


def as_reward(value: Any) -> Any:
    """One number."""
    if type(value) in REWARDS:
        return value
    return _one(value, "reward", "a number")


def as_flag(value: Any, name: str) -> bool:
    """True or False."""
    if type(value) in FLAGS:
        return bool(value)
    wanted = "True or False"
    number = _one(value, name, wanted)
    if number not in (0, 1):
        raise EnvError(_says(value, name, wanted))
    return bool(number)


def as_rewards(values: Any, num_columns: int) -> NDArray[Any]:
    """A number for each column."""
    return _many(values, "rewards", num_columns)


def as_flags(values: Any, name: str, num_columns: int) -> NDArray[np.bool_]:
    """A flag for each column."""
    array = _many(values, name, num_columns)
    if array.dtype is _BOOL:
        return array
    flags: NDArray[np.bool_] = array.astype(np.bool_)
    if (flags != array).any():
        raise EnvError(_says(values, name, "flags"))
    return flags


def _many(values: Any, name: str, num_columns: int) -> NDArray[Any]:
    array = np.asarray(values)
    if array.shape != (num_columns,) or array.dtype.kind not in _NUMBERS:
        what = "numbers" if name == "rewards" else "flags"
        raise EnvError(_says(values, name, f"{what} of shape ({num_columns},)"))
    return array


def _one(value: Any, name: str, wanted: str) -> Any:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # it is ragged
        array = np.empty(0)
    if array.size != 1 or array.dtype.kind not in _NUMBERS:
        raise EnvError(_says(value, name, wanted))
    return array.item()


def _says(value: Any, name: str, wanted: str) -> str:
    shown = " ".join(reprlib.repr(value).split())
    return f"{name} in step: wants {wanted}, got {shown} ({type(value).__name__})"
