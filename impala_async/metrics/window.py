"""A window over the last n values of one quantity: count, mean, deviation, quantiles.

Values that are no finite number are counted and take their place in the window, but are left out
of all else: a report line cannot say them, and one infinity would hide every other value.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import Any, Final

import numpy as np

# A percentile imports it, which may be the first time when no descriptor is left.
import numpy.ma
import numpy.typing as npt

from impala_async.metrics.names import Value

PERCENTILES: Final = (0.0, 10.0, 50.0, 90.0, 100.0)


class WindowStat:
    """The last `n` values of `name`, and the `count` of all values ever pushed."""

    def __init__(self, name: str, n: int = 50) -> None:
        self.name = name
        self.count = 0
        self._held: deque[float] = deque(maxlen=n)

    def push(self, x: float) -> None:
        self._held.append(float(x))
        self.count += 1

    def push_many(self, values: npt.ArrayLike) -> None:
        flat = np.asarray(values, dtype=np.float64).ravel()
        self._held.extend(flat.tolist())
        self.count += flat.size

    @property
    def mean(self) -> float | None:
        return self._one(np.mean)

    @property
    def max(self) -> float | None:
        return self._one(np.max)

    @property
    def quantiles(self) -> list[float | None]:
        """Percentiles 0, 10, 50, 90 and 100; empty without values."""
        return self._compute(partial(np.percentile, q=PERCENTILES))

    def stats(self) -> dict[str, Value]:
        """`{name}_count`, `{name}_mean`, `{name}_std` and `{name}_quantiles`, clean for JSON."""
        return {
            f"{self.name}_count": self.count,
            f"{self.name}_mean": self.mean,
            f"{self.name}_std": self._one(np.std),
            f"{self.name}_quantiles": self.quantiles,
        }

    def _one(self, function: Callable[[npt.NDArray[np.float64]], Any]) -> float | None:
        return next(iter(self._compute(function)), None)

    def _compute(self, function: Callable[[npt.NDArray[np.float64]], Any]) -> list[float | None]:
        """The numbers that a function finds, None for those not finite; empty without values."""
        held = np.array(self._held)
        finite = held[np.isfinite(held)]
        if not finite.size:
            return []
        with np.errstate(all="ignore"):  # numbers near the largest overflow
            found = np.atleast_1d(function(finite)).tolist()
        return [x if isfinite(x) else None for x in found]
