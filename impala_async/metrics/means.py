"""The statistics of updates as a report tells them: means over the updates since the last one.

Owned by one thread, which adds those of each update and takes the means when it reports.
"""

import math
from collections.abc import Mapping

from impala_async.metrics.names import is_setting


class UpdateMeans:
    """Sums since the last report, and what each statistic was last: its mean then, or newer."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        # As in windows, what is not finite is left out: one such value would hide all others.
        self._sums: dict[str, tuple[float, int]] = {}

    def add(
        self, stats: Mapping[str, float], num_updates: int, of: Mapping[str, int] | None = None
    ) -> None:
        """Take in means over so many updates, of some over as many as `of` says. Those of updates
        that were skipped, 0, are told only while nothing else is known of the interval."""
        self._last.update(stats)
        sums = self._sums
        for name, value in stats.items():
            count = num_updates if of is None else of.get(name, num_updates)
            if count and math.isfinite(value):
                total, number = sums.get(name, (0.0, 0))
                sums[name] = total + count * value, number + count

    def take(self) -> dict[str, float]:
        """The mean of each, and settings as they are now; the sums start anew."""
        sums, self._sums = self._sums, {}
        for name, (total, number) in sums.items():
            if not is_setting(name):
                self._last[name] = total / number
        return dict(self._last)
