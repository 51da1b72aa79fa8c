"""One report line: snapshots merged under declared names, and the verdict that follows.

Owns no state. Used by the reporter, which gets one frozen dict from each owner of windows,
timers and counters. Two owners of one key, a key outside `metrics.names` and a value that JSON
cannot hold are bugs of ours and fail at once. A number that is not finite is none of these: a
diverged loss is news, and reaches the sinks as null.
"""

import math
from collections.abc import Mapping
from numbers import Integral, Real

from impala_async.metrics.names import REGISTRY, Value, undeclared
from impala_async.metrics.verdict import judge


def merge(*snapshots: Mapping[str, object]) -> dict[str, Value]:
    """All snapshots as one report, in their order, every value clean for strict JSON."""
    report: dict[str, Value] = {}
    for snapshot in snapshots:
        unknown = undeclared(snapshot)
        assert not unknown, f"metrics that metrics/names.py does not declare: {sorted(unknown)}"
        twice = report.keys() & snapshot.keys()
        assert not twice, f"metrics with two owners: {sorted(twice)}"
        report.update((name, clean(value)) for name, value in snapshot.items())
    return report


def assemble(*snapshots: Mapping[str, object]) -> dict[str, Value]:
    """The whole report line: the merged snapshots and the verdict that follows from them.

    A line holds every declared name: what nobody has measured yet is null.
    """
    report = merge(*snapshots)
    verdict = judge(report)
    report["bottleneck"], report["advice"] = str(verdict), verdict.advice
    return dict.fromkeys(REGISTRY) | report


def clean(value: object) -> Value:
    """A value as plain Python, numpy's scalars included; what is not finite becomes None."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return [_clean_number(element) for element in value]
    return _clean_number(value)


def _clean_number(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, Integral):
        return int(value)
    assert isinstance(value, Real), f"a report cannot hold {value!r}"
    number = float(value)
    return number if math.isfinite(number) else None
