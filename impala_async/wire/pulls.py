"""The actor's side of the weights port, in one session, as a pure state machine: it says when a
heartbeat is due and when to ask for weights, and judges what comes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass

import numpy as np

from impala_async.errors import MismatchError, ProtocolError
from impala_async.weights import NO_VERSION, Version, Weights, WeightsLayout
from impala_async.wire import messages as wire

# Who asks in vain asks again, ever less often; a version that is named is asked for at once.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
# Heartbeats are at least so far apart, even if a learner asks for more of them.
SHORTEST_BEAT_S = 0.02


def doubling(first_s: float, longest_s: float) -> Iterator[float]:
    while True:
        yield first_s
        first_s = min(2 * first_s, longest_s)


@dataclass(eq=False)
class Pulls:
    session: bytes
    _: KW_ONLY
    have: Version
    layouts: Sequence[WeightsLayout]
    heartbeat_s: float
    reply_timeout_s: float
    now: InitVar[float]

    def __post_init__(self, now: float) -> None:
        self.named = NO_VERSION
        self.has_heard = False
        self.session_over = ""
        """Why it is, in a clause."""
        self.last_heard = self.looked_at = self.next_beat = now
        self.answer = "it has not answered"
        """The outcome of the last question for weights, in a clause."""
        self._were_timed = False
        self._asked_at: float | None = None
        self._not_before, self._pauses = -math.inf, doubling(FIRST_PAUSE_S, LONGEST_PAUSE_S)

    @property
    def silent_s(self) -> float:
        """How long nothing had come when all that had come was last taken: a heartbeat is owed an
        answer, and whoever stood still for a while himself may not have looked yet."""
        return self.looked_at - self.last_heard

    @property
    def is_asking(self) -> bool:
        """Whether weights may be on their way."""
        return self._asked_at is not None

    @property
    def is_serving(self) -> bool:
        """Whether the weights port answers, and there are weights to act with."""
        return self.has_heard and self.have != NO_VERSION

    def name(self, version: Version) -> None:
        """The learner named a version: it is fetched if it is newer."""
        if version > self.named:
            self.named, self._not_before = version, -math.inf

    def on_new_connection(self) -> None:
        """A reply that was awaited is lost with the old one; the learner must know who is here."""
        self._asked_at = None
        self.next_beat = -math.inf

    def is_beat_due(self, now: float, timers: Mapping[str, float]) -> bool:
        """The first timers go at once: a short run wants to know its bottleneck too."""
        return now >= self.next_beat or (bool(timers) and not self._were_timed)

    def said_beat(self, now: float, timers: Mapping[str, float]) -> None:
        self.next_beat = now + max(self.heartbeat_s, SHORTEST_BEAT_S)
        self._were_timed = bool(timers)

    def get(self, now: float) -> wire.Get | None:
        is_waiting = self._asked_at is not None and now - self._asked_at <= self.reply_timeout_s
        if is_waiting or now < self._not_before or not self._lacks_weights:
            return None
        return wire.Get(self.session, *self.have)

    def said_get(self, now: float) -> None:
        self._asked_at = now

    def wait_s(self, now: float) -> float:
        """In how many seconds a question may be due, if nothing comes until then."""
        is_later = self._asked_at is None and self._lacks_weights
        return self._not_before - now if is_later else self.reply_timeout_s

    def take(
        self, message: wire.Message, frames: Sequence[wire.Frame], now: float
    ) -> Weights | None:
        """Weights that are newer than what there was, if that came. Those of another model are a
        MismatchError; damaged ones a ProtocolError, and asked for again."""
        if not wire.is_lost_on_them(message):
            self.last_heard, self.has_heard = now, True
        if isinstance(message, wire.Grant):
            self.name(Version(message.epoch, message.update))
        elif isinstance(message, wire.Reject):
            self.answer = f"it refuses: {message.text}"
            if wire.code_of(message) == "hello_again":
                # Where it never served this one it may be another run's.
                ended = "it has ended the session"
                unknown = "its weights port knows no session of this actor"
                self.session_over = ended if self.is_serving else unknown
        elif isinstance(message, wire.NotModified | wire.WeightsReply):
            had, self._asked_at = self.have, None
            try:
                return self._take_answer(message, frames)
            except ProtocolError:
                self.answer = "what it sends is damaged"
                raise
            finally:
                if self.have == had and self._lacks_weights:
                    self._not_before = now + next(self._pauses)
        return None

    @property
    def _lacks_weights(self) -> bool:
        return self.have == NO_VERSION or self.named > self.have

    def _take_answer(
        self, reply: wire.NotModified | wire.WeightsReply, frames: Sequence[wire.Frame]
    ) -> Weights | None:
        version = Version(reply.epoch, reply.update)
        number = f"{version.epoch}.{version.update}"
        if isinstance(reply, wire.NotModified):
            # They are not published yet, or could not be sent just now, but soon will be.
            none = "none yet" if self.have == NO_VERSION else "none that are newer"
            none = f"{number}, but none for us yet" if version > self.have else none
            self.answer = f"it says that it has {none}"
            return None
        layout = {each.digest: each for each in self.layouts}.get(reply.layout_digest)
        if layout is None:
            raise MismatchError(
                "the learner's model differs from the one built here from its settings: install "
                "the same release of impala-async on both sides"
            )
        if len(frames) != 2:
            raise ProtocolError("wrong_frame_count", "weights come with one frame")
        weights = Weights(version, np.frombuffer(frames[1], np.uint8), reply.layout_digest)
        if weights.digest() != reply.content_digest:
            raise ProtocolError("damaged_weights", f"weights {number} are damaged")
        if misfit := layout.misfit(weights.buffer):
            raise ProtocolError("damaged_weights", f"weights {number} are damaged: {misfit}")
        # Within a run an older epoch is a learner that should be dead.
        if version <= self.have:
            self.answer = f"it sends {number}, which is not newer"
            return None
        self.answer, self.have = "it has not answered", version
        self._pauses = doubling(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        return weights
