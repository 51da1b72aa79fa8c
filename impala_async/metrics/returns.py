"""Mean returns for people: three significant digits, and no goal that only rounding reaches."""

import math

RETURN_EPISODES = 100
# Whole numbers are written out up to here, and decimals down to there.
_MAX_EXPONENT, _MIN_EXPONENT = 9, -5


def format_return(value: float | None, goal: float | None = None) -> str:
    """A return, with as many digits more as it takes to tell one below the goal from the goal."""
    if value is None:
        return "-"
    num_digits = 3
    while goal is not None and value < goal <= float(_format(value, num_digits)):
        num_digits += 1
    return _format(value, num_digits)


def format_mean_return(value: float | None, num_episodes: object, goal: float | None = None) -> str:
    """As `format_return`, with the number of episodes while there are few."""
    is_early = isinstance(num_episodes, int) and 0 < num_episodes < RETURN_EPISODES
    few = f" ({num_episodes} episode{'s' * (num_episodes != 1)})" if is_early else ""
    aim = "" if goal is None else f" / {goal:.12g}"
    return f"{format_return(value, goal)}{aim}{few}"


def _format(value: float, num_digits: int) -> str:
    value = value or 0.0  # without the sign of -0.0
    if not math.isfinite(value):
        return str(value)
    scientific = f"{value:.{num_digits - 1}e}"
    exponent = int(scientific.partition("e")[2])
    if not _MIN_EXPONENT <= exponent <= _MAX_EXPONENT:
        return scientific
    return f"{value:.{max(0, num_digits - 1 - exponent)}f}"
