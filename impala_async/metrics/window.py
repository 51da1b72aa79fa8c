"""A window over the last n values of one quantity: count, mean, deviation, quantiles.

Owns a preallocated ring of n doubles; `push` stores one and nothing else, all arithmetic waits
for `stats`, once per report interval. Used by one thread: whoever pushes also takes the stats
and hands them on as a frozen dict.

Values that are no finite number (NaN, plus or minus infinity) are counted and take their place
in the window, but are left out of mean, deviation, maximum and quantiles: a report line is
strict JSON, which can say neither, and one infinity would hide every other value for n pushes.
A window that holds nothing else reads as one without values, except for its count.
"""

from array import array
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from impala_async.metrics.names import Value

PERCENTILES: Final = (0.0, 10.0, 50.0, 90.0, 100.0)

_HUGE: Final = 1e150
_HUGE_SCALE: Final = 2.0**600
_LARGEST: Final = float(np.finfo(np.float64).max)


@dataclass(frozen=True, slots=True)
class Summary:
    """The statistics of a window at one moment, as plain Python numbers."""

    count: int
    mean: float | None
    std: float | None
    max: float | None
    quantiles: list[float]


class WindowStat:
    """The last `n` values of `name`, and the number of all values ever pushed."""

    def __init__(self, name: str, n: int = 50) -> None:
        assert n >= 1, f"a window of {n} values"
        self.name = name
        self._n = n
        self._count = 0
        self._ring = array("d", bytes(8 * n))
        self._values = np.frombuffer(self._ring, dtype=np.float64)

    def push(self, x: float) -> None:
        """Add one value; the oldest leaves when the window is full."""
        self._ring[self._count % self._n] = x
        self._count += 1

    def push_many(self, values: npt.ArrayLike) -> None:
        """Add every element of an array in its order, as if each had been pushed by itself."""
        flat = np.asarray(values, dtype=np.float64).ravel()
        kept = flat[-self._n :]
        self._count += flat.size
        places = np.arange(self._count - kept.size, self._count) % self._n
        self._values[places] = kept

    @property
    def count(self) -> int:
        """How many values were ever pushed, the ones that are no finite number included."""
        return self._count

    @property
    def last(self) -> float | None:
        """The newest value; None before the first, or when it is no finite number."""
        if self._count == 0:
            return None
        newest = self._ring[(self._count - 1) % self._n]
        return newest if np.isfinite(newest) else None

    @property
    def max(self) -> float | None:
        """The largest finite value in the window."""
        finite = self._finite()
        return float(finite.max()) if finite.size else None

    def summary(self) -> Summary:
        """Everything at once, for a report that has its own names for the parts."""
        finite = self._finite()
        if not finite.size:
            return Summary(self._count, None, None, None, [])
        top = float(finite.max())
        # Sums and squares of doubles beyond 1e150 overflow; a power of two rescales exactly.
        scale = _HUGE_SCALE if float(np.abs(finite).max()) > _HUGE else 1.0
        scaled = finite / scale
        numbers = [float(scaled.mean()), float(scaled.std()), *_quantiles(scaled)]
        mean, std, *quantiles = (_rescale(number, scale) for number in numbers)
        return Summary(self._count, mean, std, top, quantiles)

    def stats(self) -> dict[str, Value]:
        """`{name}_count`, `{name}_mean`, `{name}_std` and `{name}_quantiles`, clean for JSON."""
        now = self.summary()
        return {
            f"{self.name}_count": now.count,
            f"{self.name}_mean": now.mean,
            f"{self.name}_std": now.std,
            f"{self.name}_quantiles": now.quantiles,
        }

    def _finite(self) -> npt.NDArray[np.float64]:
        held = self._values[: min(self._count, self._n)]
        return held[np.isfinite(held)]


def _quantiles(values: npt.NDArray[np.float64]) -> list[float]:
    return [float(number) for number in np.percentile(values, PERCENTILES)]


def _rescale(number: float, scale: float) -> float:
    # The mean of n largest doubles may round up by one unit, which would be infinity.
    return min(max(number * scale, -_LARGEST), _LARGEST)
