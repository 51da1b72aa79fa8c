"""The newest weights that came over the network, for all actors of this host.

Of one start of a learner, as versions of two cannot be compared. At most one pull is under way,
however many wait for it. No socket and no clock: what to send is told, and times come in.

Runs on: main thread
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from impala_async.weights import NO_VERSION, Version
from impala_async.wire.codec import Frame
from impala_async.wire.messages import SLOWEST_BYTES_PER_S

# How large weights are is known from the first ones on: these get as long as 60 MB may take.
FIRST_PATIENCE_S = 300.0


@dataclass
class Shelf:
    """Owns the frames of one version, and who waits for a newer one, by their sessions."""

    lease_s: float
    """A pull that is unanswered for so long, and as long as its weights take on the slowest line,
    is lost, and the next may go."""
    version: Version = NO_VERSION
    frames: Sequence[Frame] = ()
    _waiting: dict[bytes, Version] = field(default_factory=dict)
    _asking: bytes | None = None
    _asked_at: float = 0.0
    _transfer_s: float = FIRST_PATIENCE_S

    def pull(self, session: bytes, have: Version) -> Sequence[Frame] | None:
        """The answer to a pull, or None: it waits."""
        if self.version > have:
            self._waiting.pop(session, None)
            return self.frames
        self._waiting[session] = have
        return None

    def next_to_ask(self, now: float) -> tuple[bytes, Version] | None:
        """Whose pull must go to the learner now, if any."""
        patience_s = self.lease_s + self._transfer_s
        is_asking = self._asking is not None and now - self._asked_at < patience_s
        if is_asking or not self._waiting:
            return None
        # Whoever asked in vain goes last.
        if self._asking in self._waiting:
            self._waiting[self._asking] = self._waiting.pop(self._asking)
        session, have = next(iter(self._waiting.items()))
        self._asking, self._asked_at = session, now
        return session, have

    def put(self, session: bytes, version: Version, frames: Sequence[Frame]) -> list[bytes]:
        """A pull brought weights; the sessions that are to have them."""
        self._transfer_s = sum(len(frame) for frame in frames) / SLOWEST_BYTES_PER_S
        if version > self.version:
            self.version, self.frames = version, frames
        return self._end(session, [who for who, have in self._waiting.items() if version > have])

    def nothing_newer(self, session: bytes) -> list[bytes]:
        """A pull brought the word that there are none; only who asked is told, if it still waits.

        Others may have heard of newer ones since: they are asked for in their turn.
        """
        return self._end(session, [session] if session in self._waiting else [])

    def forget(self, session: bytes) -> None:
        """It is gone, or was refused."""
        self._end(session, [])

    def _end(self, session: bytes, answered: list[bytes]) -> list[bytes]:
        if self._asking == session:
            self._asking = None
        for who in {*answered, session}:
            self._waiting.pop(who, None)
        return answered
