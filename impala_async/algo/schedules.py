"""Schedules of learning rate and entropy cost (IMPALA, arXiv 1802.01561, anneals linearly).

A schedule is a pure function of the environment steps trained, so a resumed run continues on
the same curve with nothing to restore, and replayed passes do not hasten it.
"""

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def linear(start: float, end: float | None = None, horizon: int | None = None) -> Schedule:
    """From `start` to `end` over `horizon` steps trained, then `end`; constant without `end`."""
    if not math.isfinite(start):
        raise ValueError(f"start must be finite, got {start}")
    if end is None:
        return _constant(start)
    if not math.isfinite(end):
        raise ValueError(f"end must be finite, got {end}")
    if horizon is None or not 0 < horizon < math.inf:
        raise ValueError(f"horizon must be a positive number of environment steps, got {horizon}")
    num_steps = horizon

    def value(env_steps_trained: int) -> float:
        fraction = _check_steps(env_steps_trained) / num_steps
        # At the horizon exactly `end`: start + (end - start) may miss it by a rounding.
        return end if fraction >= 1 else start + (end - start) * fraction

    return value


def _constant(value: float) -> Schedule:
    def constant(env_steps_trained: int) -> float:
        _check_steps(env_steps_trained)
        return value

    return constant


def _check_steps(env_steps_trained: int) -> int:
    if not env_steps_trained >= 0:
        raise ValueError(f"env_steps_trained must be at least 0, got {env_steps_trained}")
    return env_steps_trained
