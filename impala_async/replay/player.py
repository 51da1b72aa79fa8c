"""Plays a recording into a learner, over the wire as an actor would, in one session.

For a benchmark each message is stamped with the newest version that was heard of. Exactly: it keeps
its own version, in the order of admission, and goes only when the learner has published that. Then
the learner's batches are those of the recording, column for column and lag for lag.
"""

import logging
import time
from collections.abc import Callable

from impala_async.config.run import ActorSettings
from impala_async.errors import MismatchError, RecordingError
from impala_async.policy import build_policy
from impala_async.replay.client import POLL_S, ReplayClient, RunOver
from impala_async.replay.index import RecordingIndex
from impala_async.weights import Version
from impala_async.wire.codec import body_sizes, encode_again
from impala_async.wire.messages import Data
from impala_async.wire.peer import WINDOW
from impala_async.wire.recording import Recorded
from impala_async.wire.sockets import new_context

logger = logging.getLogger(__name__)

NEWS_EVERY_S = 10.0
# When no version has come for so long, a learner that has all messages has made what it could:
# seconds, and times the longest that any version took.
STILL_S = 5.0
# One that should go on is given more time.
STUCK_S = 60.0
STILL_GAPS = 3.0


class Player:
    """Plays a recording once, or looped until it is told to stop."""

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
        self._index = index
        self._is_exact, self._is_looped = is_exact, is_looped
        self._context = new_context()
        self.client = ReplayClient(self._context, url, should_stop=should_stop, connect_s=connect_s)
        self._began_at = 0.0
        self._say_at = 0.0

    def run(self) -> None:
        """Until all is played and settled, the learner says goodbye, or this process is to end."""
        try:
            self._join(self.client.connect())
            self._began_at = time.monotonic()
            self._say_at = self._began_at + NEWS_EVERY_S
            self._play_all()
        except RunOver:
            pass
        finally:
            self.client.leave()
            self._context.term()

    def describe(self) -> str:
        """One line."""
        seconds = max(self.seconds, 1e-9)
        refused = sorted(self.client.refused.items())
        return (
            f"played {self.num_messages:,} messages, "
            f"{self.num_messages / len(self._index):.1f} times the recording, in {seconds:.1f} s: "
            f"{self.num_columns / seconds:,.0f} trajectories/s, "
            f"{self.num_body_bytes / 1e6 / seconds:,.1f} MB/s"
            + ("; refused: " if refused else "")
            + ", ".join(f"{count} {reason}" for reason, count in refused)
        )

    def _join(self, settings: ActorSettings) -> None:
        schema, most_columns = self._index.schema, self._index.most_columns
        policy = build_policy(schema, settings.model, settings.policies, seed=settings.seed)
        # Together they are a batch, which is all that a learner ever grants.
        streams = max(1, -(-self.client.welcome.max_columns // (WINDOW * most_columns)))
        self.client.join(schema, policy.layout.digest, columns=most_columns, streams=streams)

    def _play_all(self) -> None:
        seq, num_messages = 0, len(self._index)
        while seq < num_messages or self._is_looped:
            message = self._index.message(seq % num_messages)
            self._wait(seq, message.data)
            self._send(seq, message)
            seq += 1
        while self.client.settled < seq:
            self._pump()
        since = time.monotonic()
        # The learner may have a goal, and say goodbye; else until it has made all that it can.
        while self._is_exact and not self._stands_still(since, STILL_S):
            self._pump()

    def _wait(self, seq: int, data: Data) -> None:
        """For credit, and for its version."""
        client = self.client
        while seq >= client.granted:
            self._pump()
        since = time.monotonic()
        while self._is_exact and client.newest.update < data.update:
            self._pump()
            if self._stands_still(since, STUCK_S):
                raise MismatchError(
                    f"--exact: the learner stands at update {client.newest.update}, but with the "
                    f"same messages the recorded one had made {data.update}: its release differs"
                )

    def _send(self, seq: int, message: Recorded) -> None:
        client, data = self.client, message.data
        version = client.newest
        if self._is_exact:
            # A learner that is started anew has an epoch of its own.
            version = Version(client.welcome.epoch, data.update)
        data = data._replace(
            session=client.welcome.session,
            seq=seq,
            epoch=version.epoch,
            update=version.update,
        )
        sizes = body_sizes(self._index.schema.layout, data.columns, data.num_episodes)
        frames = encode_again(data, memoryview(message.body), sizes)
        while not client.send(frames):
            self._pump()
        self.num_messages += 1
        self.num_columns += data.columns
        self.num_body_bytes += len(message.body)

    def _pump(self) -> None:
        client = self.client
        if self._is_exact:
            client.ask()
        else:
            client.pull()
        client.pump(POLL_S)
        now = time.monotonic()
        self.seconds = now - self._began_at
        if self._is_exact and client.refused:
            raise RecordingError(
                f"--exact: the learner refused as {' and '.join(sorted(client.refused))} what it "
                "had admitted when it was recorded. A run that dropped stale trajectories "
                "(dropped/stale in its reports) cannot be replayed exactly: what was late for "
                "training then may be late for admission now"
            )
        if now >= self._say_at:
            self._say_at += NEWS_EVERY_S
            logger.info("%s", self.describe())

    def _stands_still(self, since: float, patience_s: float) -> bool:
        """Whether no version has come for so long, and for longer than they take."""
        client = self.client
        patience_s = max(patience_s, STILL_GAPS * client.longest_gap_s)
        return time.monotonic() - max(since, client.newest_at) > patience_s
