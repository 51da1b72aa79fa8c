"""The actor's second connection: weights down, heartbeats up, in a thread of its own.

So a lease lives however long an environment step takes, and newer weights arrive while the
present trajectory is being unrolled.

Runs on: link thread (`_run`); the other methods on the sampler thread
"""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from impala_async.actor.joining import read
from impala_async.actor.retrying import Log
from impala_async.envs.watch import hang_now
from impala_async.errors import MismatchError, ProtocolError
from impala_async.weights import NO_VERSION, Version, Weights, WeightsLayout
from impala_async.wire.codec import Frame, decode_weights
from impala_async.wire.messages import (
    REJECT_CODES,
    Get,
    Grant,
    Heartbeat,
    NotModified,
    Reject,
    WeightsReply,
    pack,
)
from impala_async.wire.sockets import Context, Dealer

logger = logging.getLogger(__name__)

# Who asks in vain asks again, ever less often; a version that is named is asked for at once.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
CONNECT_POLL_S = 0.02
# Messages between two looks at whether it is time for a heartbeat, or to end.
MAX_AT_ONCE = 100


class Link:
    """Owns the weights socket of one session, and the newest weights that came over it."""

    def __init__(
        self,
        context: Context,
        url: str,
        *,
        session: bytes,
        layouts: Sequence[WeightsLayout],
        have: Version,
        heartbeat_s: float,
        reply_timeout_s: float,
        num_kept: int = 1,
        log: Log = logger,
    ) -> None:
        self.url = url
        self.opened_at = self.last_heard = time.monotonic()
        self.has_heard = False
        self.answer = "it has not answered"
        """What came of the last question for weights, in a clause."""
        self.is_session_over = False
        self.timers: Mapping[str, float] = {}
        self._context = context
        self._session = session
        self._layouts = {layout.digest: layout for layout in layouts}
        # Whatever a learner asks for, the line and this thread have other things to do.
        self._heartbeat_s = max(heartbeat_s, CONNECT_POLL_S)
        self._log = log
        self._reply_timeout_s = reply_timeout_s
        # Newest versions that the sampler thread and the link thread have heard of: one each, so
        # that neither overwrites what the other has just written.
        self._wanted = self._named = NO_VERSION
        self._have = have
        self._asked_at: float | None = None
        self._not_before, self._pause_s = -math.inf, FIRST_PAUSE_S
        # One, the newest; in lockstep none may be passed over.
        self._newest: deque[Weights] = deque(maxlen=num_kept)
        self._grants: deque[Grant] = deque(maxlen=16)
        self._arrived = threading.Event()
        self._failure: BaseException | None = None
        self._is_closed = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    @property
    def is_asking(self) -> bool:
        """Whether weights may be on their way."""
        return self._asked_at is not None

    @property
    def is_serving(self) -> bool:
        """Whether the weights port answers, and there are weights to act with."""
        return self.has_heard and self._have != NO_VERSION

    @property
    def is_behind(self) -> bool:
        """Whether a newer version has been named than has come."""
        return max(self._wanted, self._named) > self._have

    def want(self, version: Version) -> None:
        """The learner named a version: fetch it if it is newer."""
        if version > self._wanted:
            self._wanted = version
            self._not_before = -math.inf
            os.eventfd_write(self._wake_fd, 1)

    def take_newest(self) -> Weights | None:
        """Weights that arrived since the last call."""
        self._check()
        self._arrived.clear()
        return self._newest.popleft() if self._newest else None

    def wait_for_weights(self, timeout_s: float) -> None:
        """Until new weights are there, or the time is over."""
        self._arrived.wait(timeout_s)

    def take_grants(self) -> list[Grant]:
        """Grants that came as answers to heartbeats."""
        self._check()
        return [self._grants.popleft() for _ in range(len(self._grants))]

    def close(self) -> None:
        """End the thread; once is enough, twice does no harm."""
        if self._is_closed:
            return
        self._is_closed = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        os.close(self._wake_fd)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        socket = Dealer(self._context, self.url, is_watched=True)
        try:
            self._serve(socket)
        except BaseException as error:  # a thread has no caller: the sampler thread raises it
            self._failure = error
            self._arrived.set()
        finally:
            socket.close()

    def _serve(self, socket: Dealer) -> None:
        next_beat, were_timed = time.monotonic(), False
        while not self._is_closed:
            now = time.monotonic()
            is_new = not socket.is_greeted
            if is_new:
                # A reply that was awaited is lost with the connection.
                self._asked_at = None
            # The first timers go at once: a short run wants to know its bottleneck too.
            if is_new or now >= next_beat or (self.timers and not were_timed):
                timers = dict(self.timers)
                if socket.greet([pack(Heartbeat(self._session, {**timers, **hang_now()}))]):
                    were_timed = bool(timers)
                    next_beat = now + self._heartbeat_s
                else:
                    next_beat = now + CONNECT_POLL_S
            wait_s = self._ask(socket, now) if socket.is_greeted else CONNECT_POLL_S
            if socket.wait(min(wait_s, next_beat - now), self._wake_fd):
                os.eventfd_read(self._wake_fd)
            for _ in range(MAX_AT_ONCE):
                if (frames := socket.receive(0)) is None:
                    break
                self._take(frames)

    def _ask(self, socket: Dealer, now: float) -> float:
        """Send the pull that is due; in how many seconds to look again."""
        is_waiting = self._asked_at is not None and now - self._asked_at <= self._reply_timeout_s
        if not is_waiting and (self._have == NO_VERSION or self.is_behind):
            if now < self._not_before:
                return self._not_before - now
            was_sent = socket.send([pack(Get(self._session, *self._have))])
            self._asked_at = now if was_sent else None
            return self._reply_timeout_s if was_sent else CONNECT_POLL_S
        return self._reply_timeout_s

    def _take(self, frames: Sequence[Frame]) -> None:
        message = read(frames[0], self._log)
        if message is None:
            return
        self.last_heard, self.has_heard = time.monotonic(), True
        if isinstance(message, Grant):
            self._grants.append(message)
            named = Version(message.epoch, message.update)
            if named > self._named:
                self._named, self._not_before = named, -math.inf
        elif isinstance(message, WeightsReply):
            self._take_weights(message, frames)
        elif isinstance(message, NotModified):
            none = "none yet" if self._have == NO_VERSION else "none that are newer"
            if (message.epoch, message.update) > self._have:
                none = f"{message.epoch}.{message.update}, but none for us yet"
            self.answer = f"it says that it has {none}"
            if self._have == NO_VERSION:
                # Nothing is published yet, but soon will be.
                self._ask_later()
            elif not self.is_behind:
                self._asked_at = None
        elif isinstance(message, Reject):
            self.answer = f"it refuses: {message.text}"
            self.is_session_over |= message.code == REJECT_CODES.index("hello_again")
            self._arrived.set()

    def _take_weights(self, reply: WeightsReply, frames: Sequence[Frame]) -> None:
        layout = self._layouts.get(reply.layout_digest)
        if layout is None:
            raise MismatchError(
                "the learner's model differs from the one built here from its settings: install "
                "the same release of impala-async on both sides"
            )
        try:
            weights = decode_weights(reply, frames)
            if misfit := layout.misfit(weights.buffer):
                text = f"weights {reply.epoch}.{reply.update} are damaged: {misfit}"
                raise ProtocolError("damaged_weights", text)
        except ProtocolError as error:
            self._log.warning("%s: asking again", error)
            self.answer = "what it sends is damaged"
            self._ask_later()
            return
        # Within a run an older epoch is a learner that should be dead.
        if weights.version <= self._have:
            self.answer = f"it sends {reply.epoch}.{reply.update}, which is not newer"
            self._ask_later()
        else:
            self._asked_at, self._pause_s = None, FIRST_PAUSE_S
            self.answer = "it has not answered"
            self._have = weights.version
            self._newest.append(weights)
            self._arrived.set()

    def _ask_later(self) -> None:
        self._asked_at = None
        self._not_before = self.last_heard + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
