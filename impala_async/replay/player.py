"""Plays a recording into a learner, over the wire as an actor would, in one session.

For a benchmark each message is stamped with the newest version that was heard of. Exactly: it keeps
its own version, in the order of admission, and goes only when the learner has published that. Then
the learner's batches are those of the recording, column for column and lag for lag.

It never comes back to a learner that it has lost: what it plays makes sense only in one piece.
"""

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from impala_async.actor.client import RunFinished
from impala_async.actor.joining import SeldomLog, best_urls, find_learner, read, say_goodbye
from impala_async.errors import MismatchError, RecordingError, UnreachableError
from impala_async.policy import build_policy
from impala_async.replay.index import RecordingIndex
from impala_async.weights import NO_VERSION, Version
from impala_async.wire.actor_side import ActorSide
from impala_async.wire.codec import Frame, body_sizes, encode_again
from impala_async.wire.messages import (
    BYE_REASONS,
    MAX_MESSAGE_BYTES,
    VERDICTS,
    Bye,
    ByeOk,
    Data,
    Get,
    Grant,
    Heartbeat,
    Message,
    NotModified,
    Reject,
    WeightsReply,
    code_of,
    pack,
)
from impala_async.wire.peer import WINDOW
from impala_async.wire.recording import Recorded
from impala_async.wire.sockets import Dealer, new_context

logger = logging.getLogger(__name__)

POLL_S = 0.001
NEWS_EVERY_S = 10.0
# Nothing is newer than this: the answer to such a pull is the number of the newest version alone.
NEWER_THAN_ALL = Version(2**31, 2**62)
# An answer to a pull that is not there by then is asked for again.
ASK_AGAIN_S = 2.0
# When no version has come for so long, a learner that has all messages has made what it could:
# seconds, and times the longest that any version took.
STILL_S = 5.0
# One that should go on is given more time.
STUCK_S = 60.0
STILL_GAPS = 3.0


class Player:
    """Plays a recording once, or looped until it is told to stop. Owns both sockets."""

    def __init__(
        self,
        url: str,
        index: RecordingIndex,
        *,
        is_exact: bool,
        is_looped: bool,
        should_stop: Callable[[], bool],
        connect_s: float,
    ) -> None:
        self.num_messages = self.num_columns = self.num_body_bytes = 0
        """How much was played."""
        self.seconds = 0.0
        self.refused: Counter[str] = Counter()
        self.is_finished = False
        """Whether the learner has reached a goal of its own."""
        self.newest = NO_VERSION
        self._newest_at = time.monotonic()
        # How long any version took after the one before it.
        self._longest_gap_s = 0.0
        self._granted = self._settled = 0
        self._url, self._index = url, index
        self._is_exact, self._is_looped = is_exact, is_looped
        self._should_stop, self._connect_s = should_stop, connect_s
        self._log = SeldomLog(logger)
        self._context = new_context()
        self._sockets = [Dealer(self._context, url)]
        # Nothing is held: what is under way when the session ends is lost with it.
        self._side: ActorSide[None] = ActorSide(os.urandom(16))
        # Weights are pulled as an actor does it, and thrown away.
        self._have = NEWER_THAN_ALL if is_exact else NO_VERSION
        self._asked_at = -math.inf
        self._beat_at = self._began_at = self._say_at = 0.0

    def run(self) -> None:
        """Until all is played and settled, the learner says goodbye, or this process is to end."""
        try:
            self._join()
            self._began_at = time.monotonic()
            self._say_at = self._began_at + NEWS_EVERY_S
            self._play_all()
        except RunFinished:
            pass
        finally:
            if bye := self._side.bye():
                say_goodbye(self._sockets[0], bye, self._log)
            for each in self._sockets:
                each.close()
            self._context.term()

    def describe(self) -> str:
        """One line."""
        seconds = max(self.seconds, 1e-9)
        refused = sorted(self.refused.items())
        return (
            f"played {self.num_messages:,} messages, "
            f"{self.num_messages / len(self._index):.1f} times the recording, in {seconds:.1f} s: "
            f"{self.num_columns / seconds:,.0f} trajectories/s, "
            f"{self.num_body_bytes / 1e6 / seconds:,.1f} MB/s"
            + ("; refused: " if refused else "")
            + ", ".join(f"{count} {reason}" for reason, count in refused)
        )

    def _join(self) -> None:
        """Say hello until a learner answers, then what will come, and wait for a first version."""
        (data,), side, index = self._sockets, self._side, self._index
        welcome, settings = find_learner(
            data,
            side.handshake(time.monotonic()),
            url=self._url,
            within_s=self._connect_s,
            check_stop=self._check_stop,
            log=self._log,
        )
        side.accept(welcome, time.monotonic())
        # Nothing is computed here, and a pool of threads would only stand in the learner's way.
        torch.set_num_threads(1)
        policy = build_policy(index.schema, settings.model, settings.policies, seed=settings.seed)
        data_url, weights_url = best_urls(welcome, self._url)
        if data_url != self._url:
            data.close()
            data = Dealer(self._context, data_url)
        self._sockets = [data, Dealer(self._context, weights_url, MAX_MESSAGE_BYTES)]
        # Together they are a batch, which is all that a learner ever grants.
        streams = max(1, -(-welcome.max_columns // (WINDOW * index.most_columns)))
        # It sends nothing twice, so it cannot give way.
        digest, columns = policy.layout.digest, index.most_columns
        side.set_spec(index.schema, digest, columns, streams, gives_way=0)
        side.said_spec(time.monotonic())
        self._send(side.spec_frames())
        while self.newest == NO_VERSION:
            self._listen()

    def _play_all(self) -> None:
        seq, num_messages = 0, len(self._index)
        while seq < num_messages or self._is_looped:
            message = self._index.message(seq % num_messages)
            self._wait(seq, message.data)
            self._play(seq, message)
            seq += 1
        while self._settled < seq:
            self._pump()
        since = time.monotonic()
        # The learner may have a goal, and say goodbye; else until it has made all that it can.
        while self._is_exact and not self._stands_still(since, STILL_S):
            self._pump()

    def _wait(self, seq: int, data: Data) -> None:
        """For credit, and for its version."""
        while seq >= self._granted:
            self._pump()
        since = time.monotonic()
        while self._is_exact and self.newest.update < data.update:
            self._pump()
            if self._stands_still(since, STUCK_S):
                raise MismatchError(
                    f"--exact: the learner stands at update {self.newest.update}, but with the "
                    f"same messages the recorded one had made {data.update}: its release differs"
                )

    def _stands_still(self, since: float, patience_s: float) -> bool:
        """Whether no version has come for so long, and for longer than they take."""
        patience_s = max(patience_s, STILL_GAPS * self._longest_gap_s)
        return time.monotonic() - max(since, self._newest_at) > patience_s

    def _play(self, seq: int, message: Recorded) -> None:
        data, welcome = message.data, self._side.welcome
        version = self.newest
        if self._is_exact:
            # A learner that is started anew has an epoch of its own.
            version = Version(welcome.epoch, data.update)
        data = data._replace(
            session=welcome.session, seq=seq, epoch=version.epoch, update=version.update
        )
        sizes = body_sizes(self._index.schema.layout, data.columns, data.num_episodes)
        self._send(encode_again(data, memoryview(message.body), sizes))
        self.num_messages += 1
        self.num_columns += data.columns
        self.num_body_bytes += len(message.body)

    def _send(self, frames: Sequence[Frame]) -> None:
        """As soon as the connection takes it."""
        while not self._sockets[0].send(frames):
            self._listen()

    def _pump(self) -> None:
        """Listen, ask for versions, and say now and then how it goes."""
        now = time.monotonic()
        # A grant names the newest version only when there is credit to give.
        is_due = self._is_exact or self.newest > self._have
        if is_due and now - self._asked_at > ASK_AGAIN_S:
            get = Get(self._side.session, *self._have)
            self._asked_at = now if self._sockets[1].send([pack(get)]) else -math.inf
        self._listen()
        now = time.monotonic()
        self.seconds = now - self._began_at
        if self._is_exact and self.refused:
            raise RecordingError(
                f"--exact: the learner refused as {' and '.join(sorted(self.refused))} what it "
                "had admitted when it was recorded. A run that dropped stale trajectories "
                "(dropped/stale in its reports) cannot be replayed exactly: what was late for "
                "training then may be late for admission now"
            )
        if now >= self._say_at:
            self._say_at += NEWS_EVERY_S
            logger.info("%s", self.describe())

    def _listen(self) -> None:
        """Take what came in, and let the lease live."""
        self._check_stop()
        for socket, wait_s in zip(self._sockets, (POLL_S, 0.0), strict=True):
            frames = socket.receive(wait_s)
            while frames is not None:
                if (message := read(frames[0], self._log)) is not None:
                    self._take(message)
                frames = socket.receive(0)
        now, beat = time.monotonic(), Heartbeat(self._side.session, {})
        if now >= self._beat_at and self._sockets[1].send([pack(beat)]):
            self._beat_at = now + self._side.welcome.heartbeat_s

    def _take(self, message: Message) -> None:
        said = self._side.take(message, time.monotonic())
        if isinstance(said, Grant):
            self._granted = max(self._granted, said.granted)
            self._settled = max(self._settled, said.settled)
            self.refused.update(VERDICTS[verdict] for _, verdict in said.verdicts)
            self._note(self._side.named)
        elif isinstance(said, Reject) and code_of(said) == "hello_again":
            raise UnreachableError("the learner has ended the session: play the recording again")
        elif isinstance(said, Reject):
            self._log.warning("the learner refused a message: %s", said.text)
        elif isinstance(said, Bye):
            self._sockets[0].send_last([pack(ByeOk(said.session))])
            reason = BYE_REASONS[said.reason]
            logger.info("the learner says goodbye: %s", reason)
            self.is_finished = reason == "finished"
            raise RunFinished
        elif isinstance(message, NotModified | WeightsReply):
            version, self._asked_at = Version(message.epoch, message.update), -math.inf
            if isinstance(message, WeightsReply):
                self._have = version
            self._note(version)

    def _note(self, version: Version) -> None:
        now = time.monotonic()
        if version > self.newest:
            if self.newest != NO_VERSION:
                self._longest_gap_s = max(self._longest_gap_s, now - self._newest_at)
            self.newest, self._newest_at = version, now

    def _check_stop(self) -> None:
        if self._should_stop():
            raise RunFinished
