"""What actors say goes up, what the learner says comes down, each on its own way.

It decides nothing of the protocol: it answers a pull itself where it holds newer weights than the
actor has, and tells who is not known here, as after a restart, to say hello again.

Runs on: main thread
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from impala_async.errors import ProtocolError
from impala_async.relay.passage import Lane, Passage
from impala_async.relay.shelf import Shelf
from impala_async.relay.welcome import Translator
from impala_async.weights import Version
from impala_async.wire.codec import Frame
from impala_async.wire.messages import (
    WRONG_PORT,
    Get,
    Hello,
    Message,
    NotModified,
    Reject,
    WeightsReply,
    Welcome,
    pack,
    unpack,
)
from impala_async.wire.session import FULL_RETRY_S, reject
from impala_async.wire.sockets import Context, Dealer, NoSocketError, Poller, Router

logger = logging.getLogger(__name__)

BURST = 32
# Each has two sockets here and, with its own connections, six descriptors: of a process's 1,024,
# which is what it often has, some must be left for who only knocks.
MAX_ACTORS = 128


@dataclass
class Counts:
    """Messages, but `served` and `fetched`, which are weights."""

    up: int = 0
    down: int = 0
    bad: int = 0
    lost: int = 0
    served: int = 0
    fetched: int = 0


class Exchange:
    """Owns a passage per actor, and the newest weights; the two ports are lent to it."""

    def __init__(
        self,
        context: Context,
        learner_url: str,
        ports: tuple[Router, Router],
        poller: Poller,
        translator: Translator,
    ) -> None:
        self.counts = Counts()
        self._context = context
        self._learner_url = learner_url
        self._data, self._weights = ports
        self._poller = poller
        self._translator = translator
        self._by_actor: dict[bytes, Passage] = {}
        self._by_session: dict[bytes, Passage] = {}
        # Lanes with something that waits for the learner to be there.
        self._late: set[Lane] = set()
        # Of the start of a learner, by its run and epoch, that was heard of last.
        self._shelf_of: tuple[bytes, int] | None = None
        self._shelf = Shelf(0.0)
        poller.add(self._data, self._take_data)
        poller.add(self._weights, self._take_weights)

    @property
    def num_actors(self) -> int:
        return len(self._by_session)

    @property
    def is_late(self) -> bool:
        """Whether something waits that `flush` may send."""
        return bool(self._late)

    def flush(self) -> None:
        """Try again to send what waits."""
        for lane in list(self._late):
            lane.flush()
            if not lane.is_waiting:
                self._late.discard(lane)

    def sweep(self, now: float) -> None:
        """Now and then: end what is over, and ask again for what was lost."""
        for passage in list(self._by_actor.values()):
            if passage.is_over(now):
                self._end(passage)
        self._ask(self._shelf)

    def close(self) -> None:
        """End all passages; the learner's sessions end by that, or by their leases."""
        for passage in list(self._by_actor.values()):
            self._end(passage)

    # -------------------- up

    def _take_data(self) -> None:
        for _ in range(BURST):
            arrived = self._data.receive_whole()
            if arrived is None:
                return
            route, frames = arrived
            message = self._read(self._data, route, frames)
            if isinstance(message, Hello):
                passage = self._greet(route, message)
            else:
                passage = self._find(self._data, route, message)
            if passage is not None:
                passage.data_route = route
                self._up(passage.data, frames)

    def _take_weights(self) -> None:
        for _ in range(BURST):
            arrived = self._weights.receive_whole()
            if arrived is None:
                return
            route, frames = arrived
            message = self._read(self._weights, route, frames)
            if isinstance(message, Hello):
                refusal = reject("bad_message", f"not_allowed_now: {WRONG_PORT}")
                self._down(self._weights, route, [pack(refusal)])
                continue
            passage = self._find(self._weights, route, message)
            if passage is None or passage.weights is None:
                continue
            passage.weights_route = route
            if isinstance(message, Get) and passage.shelf is not None:
                self._pull(passage, passage.shelf, Version(message.epoch, message.update))
            else:
                self._up(passage.weights, frames)

    def _read(self, router: Router, route: bytes, frames: list[memoryview]) -> Message | None:
        """What an actor says; None, and its sender is told, if that is no message."""
        try:
            message = unpack(frames[0] if frames else b"")
            if isinstance(message, Hello) and len(frames) > 1:
                # A stranger's: nothing else that it sends is kept.
                raise ProtocolError("wrong_frame_count", "more frames than this message has")
            return message
        except ProtocolError as error:
            self.counts.bad += 1
            self._down(router, route, [pack(reject("bad_message", f"{error.reason}: {error}"))])
            return None

    def _find(self, router: Router, route: bytes, message: Message | None) -> Passage | None:
        """Whose message it is; the sender is told if that is nobody known."""
        if message is None:
            return None
        passage = self._by_session.get(getattr(message, "session", b""))
        if passage is None:
            self._down(router, route, [pack(reject("hello_again", "this session is over", 0.0))])
        else:
            passage.last_heard = time.monotonic()
        return passage

    def _greet(self, route: bytes, hello: Hello) -> Passage | None:
        """A hello that comes again over the same connection is the same one; None if it must wait
        until there is room."""
        now = time.monotonic()
        known = self._by_actor.get(hello.actor)
        if known is not None and known.data_route == route:
            known.last_heard = now
            known.data.forget()
            return known
        if known is not None:
            self._end(known)
        try:
            self._make_room()
            lane = Lane(self._context, self._learner_url)
        except NoSocketError as error:
            self._send_away(route, error)
            return None
        passage = Passage(hello.actor, route, lane, now)
        self._by_actor[hello.actor] = passage
        self._poller.add(lane.dealer, partial(self._take_data_answers, passage))
        return passage

    def _make_room(self) -> None:
        """Who is not welcome yet gives way, the oldest one first."""
        if len(self._by_actor) < MAX_ACTORS:
            return
        strangers = (passage for passage in self._by_actor.values() if not passage.session)
        oldest = next(strangers, None)
        if oldest is None:
            raise NoSocketError(f"it has {MAX_ACTORS} actors")
        self._end(oldest)
        self._send_away(oldest.data_route, "others came later")

    def _send_away(self, route: bytes, reason: object) -> None:
        """For a moment: who asks again may find that there is room."""
        refusal = reject("full", f"this relay has no room: {reason}", FULL_RETRY_S)
        self._down(self._data, route, [pack(refusal)])

    def _up(self, lane: Lane, frames: Sequence[Frame]) -> None:
        self.counts.up += 1
        if not lane.send(frames):
            # Not for good: whatever is not settled, actors send again.
            self.counts.lost += 1
        if lane.is_waiting:
            self._late.add(lane)

    # -------------------- down

    def _take_data_answers(self, passage: Passage) -> None:
        for _ in range(BURST):
            frames = passage.data.dealer.receive(0)
            if frames is None:
                return
            message = _understood(frames)
            if isinstance(message, Welcome):
                try:
                    told = self._begin(passage, message, frames)
                except NoSocketError as error:
                    self._end(passage)
                    self._send_away(passage.data_route, error)
                    return
                # It may have come twice; then nobody need hear the second one.
                self._down(self._data, passage.data_route, told)
            elif not self._down(self._data, passage.data_route, frames):
                # Now the learner cannot route to it either, and knows by that.
                logger.info("an actor is gone: its connection is closed")
                self._end(passage)
                return

    def _begin(self, passage: Passage, welcome: Welcome, frames: Sequence[Frame]) -> list[Frame]:
        """A session is open: be ready for its weights; the welcome for the actor."""
        if passage.weights is None:
            host = self._learner_url.rpartition(":")[0]
            passage.weights = Lane(self._context, f"{host}:{welcome.weights_port}")
            dealer = passage.weights.dealer
            self._poller.add(dealer, partial(self._take_weights_answers, passage, dealer))
        told, is_lockstep = self._translator.translate(welcome, frames)
        start = welcome.run_id, welcome.epoch
        if start != self._shelf_of:
            self._shelf_of, self._shelf = start, Shelf(welcome.lease_s)
        self._by_session.pop(passage.session, None)
        passage.begin(welcome.session, welcome.lease_s, None if is_lockstep else self._shelf)
        self._by_session[welcome.session] = passage
        return told

    def _take_weights_answers(self, passage: Passage, dealer: Dealer) -> None:
        for _ in range(BURST):
            frames = dealer.receive(0)
            if frames is None:
                return
            for session in self._who_hears(passage, frames):
                self._down(self._weights, self._by_session[session].weights_route, frames)
            if passage.shelf is not None:
                self._ask(passage.shelf)

    def _who_hears(self, passage: Passage, frames: Sequence[Frame]) -> list[bytes]:
        """An answer is for whoever it came to, but for weights: those are for all who wait."""
        message, shelf, session = _understood(frames), passage.shelf, passage.session
        hearers = [session]
        if isinstance(message, WeightsReply):
            self.counts.fetched += 1
            if shelf is not None:
                hearers = shelf.put(session, Version(message.epoch, message.update), frames)
            self.counts.served += len(hearers)
        elif isinstance(message, NotModified) and shelf is not None:
            hearers = shelf.nothing_newer(session)
        elif isinstance(message, Reject) and shelf is not None:
            shelf.forget(session)
        return hearers

    def _pull(self, passage: Passage, shelf: Shelf, have: Version) -> None:
        frames = shelf.pull(passage.session, have)
        if frames is None:
            self._ask(shelf)
        else:
            self.counts.served += 1
            self._down(self._weights, passage.weights_route, frames)

    def _ask(self, shelf: Shelf) -> None:
        due = shelf.next_to_ask(time.monotonic())
        if due is not None:
            session, have = due
            lane = self._by_session[session].weights
            assert lane is not None, "a session begins with both"
            self._up(lane, [pack(Get(session, *have))])

    def _down(self, router: Router, route: bytes, frames: Sequence[Frame]) -> bool:
        self.counts.down += 1
        return router.send(route, frames)

    def _end(self, passage: Passage) -> None:
        """Close its connections, by which the learner knows."""
        del self._by_actor[passage.actor]
        self._by_session.pop(passage.session, None)
        for lane in passage.lanes:
            self._late.discard(lane)
            self._poller.remove(lane.dealer)
            lane.dealer.close()
        if passage.shelf is not None:
            passage.shelf.forget(passage.session)
            self._ask(passage.shelf)


def _understood(frames: Sequence[Frame]) -> Message | None:
    """What the learner says, of which its actor will judge."""
    try:
        return unpack(frames[0])
    except ProtocolError:
        return None
