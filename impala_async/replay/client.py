"""An actor's session without an actor: hello, spec, credit, heartbeats, weights. It acts nothing.

It never comes back to a learner that it has lost: what it plays makes sense only in one piece.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence

from impala_async.actor.joining import SeldomLog, best_urls, find_learner, read, say_goodbye
from impala_async.config.run import ActorSettings
from impala_async.errors import UnreachableError
from impala_async.schema import Schema
from impala_async.weights import NO_VERSION, Version
from impala_async.wire.actor_side import ActorSide
from impala_async.wire.codec import Frame
from impala_async.wire.messages import (
    BYE_REASONS,
    MAX_MESSAGE_BYTES,
    VERDICTS,
    Bye,
    ByeOk,
    Get,
    Grant,
    Heartbeat,
    Message,
    NotModified,
    Reject,
    WeightsReply,
    Welcome,
    code_of,
    pack,
)
from impala_async.wire.sockets import Context, Dealer

logger = logging.getLogger(__name__)

POLL_S = 0.001
# Nothing is newer than this: the answer to such a pull is the number of the newest version alone.
NEWER_THAN_ALL = Version(2**31, 2**62)
# An answer to a pull that is not there by then is asked for again.
ASK_AGAIN_S = 2.0


class RunOver(Exception):
    """The learner said goodbye, or this process is to end."""


class ReplayClient:
    """Owns both sockets of one session. `pump` is to be called often, whatever is waited for."""

    def __init__(
        self, context: Context, url: str, *, should_stop: Callable[[], bool], connect_s: float
    ) -> None:
        self.granted = self.settled = 0
        self.newest = NO_VERSION
        self.newest_at = time.monotonic()
        self.longest_gap_s = 0.0
        """How long any version took after the one before it."""
        self.is_finished = False
        """Whether the learner has reached a goal of its own."""
        self.refused: Counter[str] = Counter()
        self._log = SeldomLog(logger)
        self._context = context
        self._url = url
        self._should_stop = should_stop
        self._connect_s = connect_s
        self._data = Dealer(context, url)
        self._weights: Dealer | None = None
        # Nothing is held: what is under way when the session ends is lost with it.
        self._side: ActorSide[None] = ActorSide(os.urandom(16))
        self._have = NO_VERSION
        self._asked_at: float | None = None
        self._beat_at = time.monotonic()

    @property
    def welcome(self) -> Welcome:
        return self._side.welcome

    def connect(self) -> ActorSettings:
        """Say hello until a learner answers; its settings."""
        welcome, settings = find_learner(
            self._data,
            self._side.handshake(time.monotonic()),
            url=self._url,
            within_s=self._connect_s,
            check_stop=self._check_stop,
            log=self._log,
        )
        self._side.accept(welcome, time.monotonic())
        return settings

    def join(self, schema: Schema, layout_digest: bytes, *, columns: int, streams: int) -> None:
        """Say what will come, and wait for the first grant."""
        data_url, weights_url = best_urls(self.welcome, self._url)
        if data_url != self._url:
            self._data.close()
            self._data = Dealer(self._context, data_url)
        self._weights = Dealer(self._context, weights_url, MAX_MESSAGE_BYTES)
        # It sends nothing twice, so it cannot give way.
        self._side.set_spec(schema, layout_digest, columns, streams, gives_way=0)
        self._side.said_spec(time.monotonic())
        while not self._data.send(self._side.spec_frames()):
            self._check_stop()
            time.sleep(POLL_S)
        while self.newest == NO_VERSION:
            self.pump(POLL_S)

    def send(self, frames: Sequence[Frame]) -> bool:
        """A message; False if the connection does not take it now."""
        return self._data.send(frames)

    def pump(self, timeout_s: float) -> None:
        """Take what came in, say what is due. Whoever waits for a version uses `ask` as well."""
        assert self._weights is not None, "join comes first"
        self._check_stop()
        frames = self._data.receive(timeout_s)
        while frames is not None:
            self._take(frames)
            frames = self._data.receive(0)
        while (frames := self._weights.receive(0)) is not None:
            self._take(frames)
        now = time.monotonic()
        if now >= self._beat_at and self._weights.send([pack(Heartbeat(self.welcome.session, {}))]):
            self._beat_at = now + self.welcome.heartbeat_s

    def pull(self) -> None:
        """Ask for the newest weights, as an actor does; they are thrown away."""
        if self.newest > self._have:
            self.ask(self._have)

    def ask(self, have: Version = NEWER_THAN_ALL) -> None:
        """Ask which version is the newest: a grant says so only when there is credit to give.

        Newer weights than `have` come with the answer.
        """
        assert self._weights is not None, "join comes first"
        now = time.monotonic()
        is_waiting = self._asked_at is not None and now - self._asked_at < ASK_AGAIN_S
        if not is_waiting and self._weights.send([pack(Get(self.welcome.session, *have))]):
            self._asked_at = now

    def leave(self) -> None:
        """Say goodbye and close everything."""
        if bye := self._side.bye():
            say_goodbye(self._data, bye, self._log)
        self._data.close()
        if self._weights is not None:
            self._weights.close()

    def _take(self, frames: Sequence[Frame]) -> None:
        message = read(frames[0], self._log)
        if message is None:
            return
        said = self._side.take(message, time.monotonic())
        if isinstance(said, Grant):
            self.granted = max(self.granted, said.granted)
            self.settled = max(self.settled, said.settled)
            self.refused.update(VERDICTS[verdict] for _, verdict in said.verdicts)
        elif isinstance(said, Reject) and code_of(said) == "hello_again":
            raise UnreachableError("the learner has ended the session: play the recording again")
        elif isinstance(said, Reject):
            self._log.warning("the learner refused a message: %s", said.text)
        elif isinstance(said, Bye):
            self._data.send_last([pack(ByeOk(said.session))])
            reason = BYE_REASONS[said.reason]
            logger.info("the learner says goodbye: %s", reason)
            self.is_finished = reason == "finished"
            raise RunOver
        self._note_version(message)

    def _note_version(self, message: Message) -> None:
        if isinstance(message, Grant):
            version = self._side.named
        elif isinstance(message, NotModified | WeightsReply):
            version, self._asked_at = Version(message.epoch, message.update), None
            if isinstance(message, WeightsReply):
                self._have = version
        else:
            return
        now = time.monotonic()
        if version > self.newest:
            if self.newest != NO_VERSION:
                self.longest_gap_s = max(self.longest_gap_s, now - self.newest_at)
            self.newest, self.newest_at = version, now

    def _check_stop(self) -> None:
        if self._should_stop():
            raise RunOver
