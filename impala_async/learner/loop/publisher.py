"""Weights down: one encoded frame per version, served to every actor that asks.

Actors pull. A pull that has the newest version costs a few bytes; one that has not shares the
same frame with all others, without a copy.

Runs on: event loop
"""

from collections import deque
from dataclasses import dataclass, field

from impala_async.metrics.report import Counters
from impala_async.weights import NO_VERSION, Version, Weights
from impala_async.wire.codec import Frame
from impala_async.wire.messages import Get, NotModified, WeightsReply, pack


@dataclass
class _Published:
    """A version, and the two frames that carry it once somebody has asked."""

    weights: Weights
    frames: list[Frame] = field(default_factory=list)


class Publisher:
    """Owns the newest published weights; in lockstep the last few, as nobody may skip one."""

    def __init__(self, num_kept: int = 1) -> None:
        self.version: Version = NO_VERSION
        self.layout_digest = b""
        self._kept: deque[_Published] = deque(maxlen=num_kept)
        self._counters = Counters(("served", "not_modified", "bytes"), prefix="weights/")

    def publish(self, weights: Weights) -> None:
        """Make this the newest version; the buffer is never written to again."""
        self.version = weights.version
        self._kept.append(_Published(weights))

    def reply(self, get: Get) -> list[Frame]:
        """The frames that answer a pull: the oldest that is kept of those that are newer."""
        have = Version(get.epoch, get.update)
        if have >= self.version:
            return self.nothing_new()
        # Who has none begins where everybody is now.
        newer = [kept for kept in self._kept if kept.weights.version > have]
        published = newer[-1] if have == NO_VERSION else newer[0]
        # Once per version that somebody wants: many are replaced before anybody asks.
        published.frames = published.frames or self._encode(published.weights)
        self._counters.add("served")
        self._counters.add("bytes", len(published.frames[1]))
        return published.frames

    def nothing_new(self) -> list[Frame]:
        """The answer to a pull that has to come again."""
        self._counters.add("not_modified")
        return [pack(NotModified(*self.version))]

    def _encode(self, weights: Weights) -> list[Frame]:
        digest = weights.layout_digest or self.layout_digest
        reply = WeightsReply(*weights.version, digest, weights.digest())
        return [pack(reply), weights.buffer.data]

    def report(self) -> dict[str, object]:
        return {
            "weights/version_epoch": self.version.epoch,
            "weights/version_update": self.version.update,
            **self._counters.snapshot(),
        }
