"""Says what is waited for: not at once, then now and then."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

AFTER_S = 3.0
EVERY_S = 10.0
LOOK_EVERY_S = 0.25


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


@contextmanager
def told_of(what: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Another thread tells of the work that is done in here, as this one is busy with it."""
    is_over = threading.Event()
    wait = Wait(tell)

    def look() -> None:
        while not is_over.wait(LOOK_EVERY_S):
            wait.look(lambda s: f"{what} ({s:.0f} s)")

    thread = threading.Thread(target=look, name="wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
