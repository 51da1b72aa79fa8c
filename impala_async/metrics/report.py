"""One report line: snapshots merged under declared names, and a verdict on what limits the run.

Owns no state. Used by the reporter, which gets one frozen dict from each owner of windows,
timers and counters. Two owners of one key, a key outside `metrics.names` and a value that JSON
cannot hold are bugs of ours and fail at once. A number that is not finite is none of these: a
diverged loss is news, and reaches the sinks as null.
"""

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Final

from impala_async.metrics.names import REGISTRY, Value, undeclared

WAIT_SHARE_THAT_LIMITS: Final = 0.2

_REJECTED: Final = "rejected/"
_ACTOR_STAGES: Final = (
    ("actor/env_time_ms", "environment", "in environment steps"),
    ("actor/act_time_ms", "inference", "in the policy"),
    ("actor/send_wait_ms", "network/ingest", "waiting to send"),
)


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
    report["bottleneck"] = bottleneck(report)
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


def bottleneck(report: Mapping[str, Value]) -> str:
    """What limits the run, as `<what>: <the measured number that says so>`.

    The learner's own clock decides first: does it wait, and for what. Only when it waits for
    batches do the actors' timers say which of their stages is the long one.
    """
    refused = _refused_share(report)
    if refused is not None:
        return refused
    if "learner/starved_since_s" in report and report["learner/starved_since_s"] is not None:
        return _blame_actors(report, f"the learner has had no batch{_for_how_long(report)}")
    update_ms = _number(report, "timing_breakdown/learner_grad_time_ms")
    batch_wait_ms = _number(report, "timing_breakdown/learner_dequeue_time_ms")
    copy_wait_ms = _number(report, "timing_breakdown/learner_load_wait_time_ms") or 0.0
    if update_ms is None or batch_wait_ms is None:
        return "unknown: no update has been measured yet"
    whole_ms = update_ms + batch_wait_ms + copy_wait_ms
    if whole_ms <= 0.0:
        return "unknown: no measurable time has passed"
    wait_share = (batch_wait_ms + copy_wait_ms) / whole_ms
    if wait_share <= WAIT_SHARE_THAT_LIMITS:
        return f"learner: updates take {_percent(update_ms / whole_ms)} of its time"
    if copy_wait_ms > batch_wait_ms:
        share = _percent(copy_wait_ms / whole_ms)
        return f"network/ingest: the learner waits {share} of its time for copies to its device"
    share = _percent(batch_wait_ms / whole_ms)
    return _blame_actors(report, f"the learner waits {share} of its time for batches")


def _refused_share(report: Mapping[str, Value]) -> str | None:
    """If most of what arrives is refused, nothing else matters."""
    received = _number(report, "trajectories/received") or 0.0
    rejected = _number(report, "trajectories/rejected") or 0.0
    if rejected <= received / 2:
        return None
    reasons = {name: _number(report, name) or 0.0 for name in report if name.startswith(_REJECTED)}
    most = max(reasons, key=lambda name: reasons[name], default=_REJECTED)
    share = _percent(rejected / received)
    return f"rejections: {share} of what arrived was refused, most as {most[len(_REJECTED) :]}"


def _blame_actors(report: Mapping[str, Value], finding: str) -> str:
    """Name the stage that takes the most of an actor's time, if the actors have told."""
    if report.get("num_actors") == 0:
        return f"actors: {finding}, none is connected"
    stages = [(_number(report, name), what, where) for name, what, where in _ACTOR_STAGES]
    known = [(spent_ms, what, where) for spent_ms, what, where in stages if spent_ms is not None]
    whole_ms = sum(spent_ms for spent_ms, _, _ in known)
    whole_ms += _number(report, "actor/weights_wait_ms") or 0.0
    if not known or whole_ms <= 0.0:
        return f"actors: {finding}"
    longest_ms, what, where = max(known)
    return (
        f"{what}: {finding}, an actor spends {_percent(longest_ms / whole_ms)} of its time {where}"
    )


def _for_how_long(report: Mapping[str, Value]) -> str:
    now_s, since_s = _number(report, "time_s"), _number(report, "learner/starved_since_s")
    if now_s is None or since_s is None:
        return ""
    return f" for {max(0.0, now_s - since_s):.0f} s"


def _number(report: Mapping[str, Value], name: str) -> float | None:
    value = report.get(name)
    return float(value) if isinstance(value, int | float) else None


def _percent(share: float) -> str:
    return f"{100.0 * share:.0f} %"
