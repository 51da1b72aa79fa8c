"""The way of one actor to the learner: two connections of its own, so that all between the two is
as if nobody stood there. Credit, sessions and leases are theirs.

Runs on: main thread
"""

from collections import deque
from collections.abc import Sequence

from impala_async.relay.shelf import Shelf
from impala_async.wire.codec import Frame
from impala_async.wire.sockets import Context, Dealer

# Credit mostly ends before these do. What is beyond them is lost, and sent again if it matters.
MAX_WAITING = 64
MAX_WAITING_BYTES = 64 << 20
# As many as actors mostly have under way at once: these no longer wait here, but for the line.
MAX_QUEUED = 8
# Silence after which the learner will long have ended a session; or before it has begun one.
SILENT_LEASES = 3
UNWELCOME_S = 60.0


class Lane:
    """One connection. What it does not take now waits, in order, as it would at the actor."""

    def __init__(self, context: Context, url: str) -> None:
        self.dealer = Dealer(context, url, MAX_QUEUED)
        self._waiting: deque[Sequence[Frame]] = deque()
        self._num_bytes = 0

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def send(self, frames: Sequence[Frame]) -> bool:
        """Now, or as soon as it can be; False if too much is waiting already."""
        num_bytes = self._num_bytes + _size_of(frames)
        # One alone may have any size: it would come again and again.
        if self._waiting and (len(self._waiting) >= MAX_WAITING or num_bytes > MAX_WAITING_BYTES):
            return False
        self._waiting.append(frames)
        self._num_bytes = num_bytes
        self.flush()
        return True

    def flush(self) -> None:
        """Send what waits, as far as the connection takes it."""
        while self._waiting and self.dealer.send(self._waiting[0]):
            self._num_bytes -= _size_of(self._waiting.popleft())

    def forget(self) -> None:
        """Send nothing of what waits."""
        self._waiting.clear()
        self._num_bytes = 0


class Passage:
    """Begins with a hello. Its session is what the learner said in its welcome."""

    def __init__(self, actor: bytes, route: bytes, data: Lane, now: float) -> None:
        self.actor = actor
        self.data = data
        self.data_route = route
        self.weights: Lane | None = None
        self.weights_route = b""
        self.session = b""
        # None in lockstep, where no version may be passed over: there each pull is its own.
        self.shelf: Shelf | None = None
        self.last_heard = now
        self._patience_s = UNWELCOME_S

    @property
    def lanes(self) -> list[Lane]:
        return [self.data] if self.weights is None else [self.data, self.weights]

    def is_over(self, now: float) -> bool:
        """Whether nothing came from the actor for too long."""
        return now - self.last_heard > self._patience_s

    def begin(self, session: bytes, lease_s: float, shelf: Shelf | None) -> None:
        """The learner has welcomed it, or says so again; then what it has asked for still holds."""
        if self.shelf is not None and session != self.session:
            self.shelf.forget(self.session)
        self.session, self.shelf = session, shelf
        self._patience_s = SILENT_LEASES * lease_s


def _size_of(frames: Sequence[Frame]) -> int:
    return sum(len(frame) for frame in frames)
