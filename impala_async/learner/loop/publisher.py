"""The weights that actors pull, encoded once for each version: all who get it share its frames.

Runs on: event loop
"""

from collections import deque

from impala_async.metrics.report import Counters
from impala_async.weights import NO_VERSION, Version, Weights
from impala_async.wire import messages as wire


class Publisher:
    """Owns the newest published weights; in lockstep the last few, as nobody may skip one."""

    def __init__(self, num_kept: int = 1) -> None:
        self.version: Version = NO_VERSION
        self.layout_digest = b""
        # The frames of each are there once somebody has asked: many are replaced before.
        self._kept: deque[tuple[Weights, list[wire.Frame]]] = deque(maxlen=num_kept)
        self._counters = Counters(("weights/served", "weights/not_modified", "weights/bytes"))

    def publish(self, weights: Weights) -> None:
        """Make this the newest version. Its buffer is never written to again."""
        self.version = weights.version
        self._kept.append((weights, []))

    def choose(self, get: wire.Get, *, may_begin: bool = True) -> Version:
        """The version that a pull is for: the oldest that is kept of those that are newer than what
        it has, or NO_VERSION."""
        have = Version(get.epoch, get.update)
        if have >= self.version or (have == NO_VERSION and not may_begin):
            return NO_VERSION
        # One that has no weights begins with the newest.
        newer = (kept.version for kept, _ in self._kept if kept.version > have)
        return self.version if have == NO_VERSION else next(newer)

    def reply(self, version: Version) -> list[wire.Frame]:
        """The frames that give a version that is kept, or say that there is none."""
        if version == NO_VERSION:
            self._counters.add("weights/not_modified")
            return self.nothing_new()
        weights, frames = next(kept for kept in self._kept if kept[0].version == version)
        if not frames:
            digest = weights.layout_digest or self.layout_digest
            reply = wire.WeightsReply(*weights.version, digest, weights.digest())
            frames += [wire.pack(reply), weights.buffer.data]
        self._counters.add("weights/served")
        self._counters.add("weights/bytes", len(frames[1]))
        return frames

    def nothing_new(self) -> list[wire.Frame]:
        """The answer to a pull that has to come again."""
        return [wire.pack(wire.NotModified(*self.version))]

    def report(self) -> dict[str, object]:
        return {
            "weights/version_epoch": self.version.epoch,
            "weights/version_update": self.version.update,
            **self._counters,
        }
