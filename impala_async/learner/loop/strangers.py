"""What strangers do at the ports, for people: a line now and then, and not one for each of them.

Runs on: event loop
"""

from collections import Counter
from collections.abc import Callable

EVERY_S = 10.0


class Strangers:
    """Remembers what has been told. `tell` takes a line."""

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._tell = tell
        self._clock = clock
        self._due = clock() + EVERY_S
        self._told: Counter[str] = Counter()
        self._num_told = 0

    def look(self, hellos: Counter[bytes], num_given_way: int, cut_off: Counter[str]) -> None:
        """Tell what is new, if it is time; then the hellos, by their routes, are forgotten."""
        if self._clock() < self._due:
            return
        self._due = self._clock() + EVERY_S
        parts = [
            _count(n, "connection") + f" cut off that {why}"
            for why, n in (cut_off - self._told).items()
        ]
        if num_given_way > self._num_told:
            parts.append(_count(num_given_way - self._num_told, "session") + " gave way")
        if parts:
            said = ""
            if hellos:
                total, routes = _count(hellos.total(), "hello"), _count(len(hellos), "connection")
                said = f"{total} over {routes}; "
            self._tell(f"strangers in {EVERY_S:.0f} s: {said}{', '.join(parts)}")
        self._told, self._num_told = cut_off, num_given_way
        hellos.clear()


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
