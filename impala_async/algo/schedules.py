"""Schedules of learning rate and entropy cost, over environment steps trained.

So a resumed run continues on the same curve, and replayed passes do not hasten it.
"""

from collections.abc import Callable

Schedule = Callable[[int], float]


def linear(start: float, end: float | None = None, horizon: int | None = None) -> Schedule:
    """From `start` to `end` over `horizon` steps trained, then `end`; constant without `end`."""
    if end is None:
        return lambda env_steps_trained: start
    if horizon is None or not horizon > 0:
        raise ValueError(f"horizon must be a positive number of environment steps, got {horizon}")

    def value(env_steps_trained: int) -> float:
        fraction = env_steps_trained / horizon
        # At the horizon exactly `end`: start + (end - start) may miss it by a rounding.
        return end if fraction >= 1 else start + (end - start) * fraction

    return value
