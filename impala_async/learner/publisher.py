"""Weights down: one encoded frame per version, served to every actor that asks.

Actors pull. A pull that has the newest version costs a few bytes; one that has not shares the
same frame with all others, without a copy.

Runs on: event loop
"""

from impala_async.metrics.counter import Counters
from impala_async.weights import NO_VERSION, Version, Weights
from impala_async.wire.codec import Frame
from impala_async.wire.messages import Get, NotModified, WeightsReply, pack


class Publisher:
    """Owns the newest published weights and the two frames that carry them."""

    def __init__(self) -> None:
        self.version: Version = NO_VERSION
        self.layout_digest = b""
        self._weights: Weights | None = None
        self._frames: list[Frame] = []
        self._not_modified: list[Frame] = [pack(NotModified(*NO_VERSION))]
        self._counters = Counters(("served", "not_modified", "bytes"), prefix="weights/")

    def publish(self, weights: Weights) -> None:
        """Make this the newest version; the buffer is never written to again."""
        self.version = weights.version
        self._weights = weights
        self._frames = []
        self._not_modified = [pack(NotModified(*weights.version))]

    def reply(self, get: Get) -> list[Frame]:
        """The frames that answer a pull."""
        if Version(get.epoch, get.update) >= self.version:
            self._counters.add("not_modified")
            return self._not_modified
        if not self._frames:
            self._frames = self._encode()
        self._counters.add("served")
        self._counters.add("bytes", len(self._frames[1]))
        return self._frames

    def _encode(self) -> list[Frame]:
        """Once per version that somebody wants: many are replaced before anybody asks."""
        weights = self._weights
        assert weights is not None
        reply = WeightsReply(*weights.version, self.layout_digest, weights.digest())
        return [pack(reply), weights.buffer.data]

    def report(self) -> dict[str, object]:
        return {
            "weights/version_epoch": self.version.epoch,
            "weights/version_update": self.version.update,
            **self._counters.snapshot(),
        }
