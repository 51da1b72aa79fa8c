"""Says what is waited for: not at once, then now and then."""

import time
from collections.abc import Callable

AFTER_S = 3.0
EVERY_S = 10.0


class Wait:
    """One wait, from now on or `since` a moment of the clock. `tell` takes a line."""

    def __init__(
        self,
        tell: Callable[[str], None],
        *,
        after_s: float = AFTER_S,
        since: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._since = clock() if since is None else since
        self._due_s = after_s

    def look(self, what: Callable[[float], str]) -> None:
        """Tell `what` of the seconds waited, if it is time for another line."""
        waited_s = self._clock() - self._since
        if waited_s >= self._due_s:
            self._due_s = waited_s + EVERY_S
            self._tell(what(waited_s))
