"""Says what is waited for: not at once, then now and then."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

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


@contextlib.contextmanager
def told_meanwhile(wait: Wait, what: Callable[[float], str]) -> Iterator[None]:
    """Look at a wait for what this thread itself is busy with, from another one."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_EVERY_S):
            wait.look(what)

    thread = threading.Thread(target=look, name="telling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
