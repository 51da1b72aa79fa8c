"""Plays a recording into a learner, over the wire as an actor would, in one session.

For a benchmark each message is stamped with the newest version that was heard of. Exactly: it keeps
its own version, in the order of admission, and goes only when the learner has published that. Then
the learner's batches are those of the recording, column for column and lag for lag.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from impala_async.config.load import validate_config
from impala_async.config.run import ActorSettings
from impala_async.errors import MismatchError, RecordingError
from impala_async.replay.client import POLL_S, ReplayClient, RunOver
from impala_async.replay.index import RecordingIndex
from impala_async.schema import recurrent_state
from impala_async.team import build_policy
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


@dataclass
class Played:
    """How much was played, and what came of it."""

    messages: int = 0
    columns: int = 0
    body_bytes: int = 0
    seconds: float = 0.0
    refused: dict[str, int] = field(default_factory=dict)
    is_finished: bool = False
    """Whether the learner reached a goal of its own."""


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
        self.played = Played()
        self._index = index
        self._is_exact, self._is_looped = is_exact, is_looped
        self._context = new_context()
        self._client = ReplayClient(
            self._context, url, should_stop=should_stop, connect_s=connect_s
        )
        self._began_at = 0.0
        self._say_at = 0.0

    def run(self) -> Played:
        """Until all is played and settled, the learner says goodbye, or this process is to end."""
        try:
            self._join(self._client.connect())
            self._began_at = time.monotonic()
            self._say_at = self._began_at + NEWS_EVERY_S
            self._play_all()
        except RunOver:
            pass
        finally:
            self._client.leave()
            self._context.term()
        self.played.refused = dict(self._client.refused)
        self.played.is_finished = self._client.is_finished
        return self.played

    def _join(self, settings: ActorSettings) -> None:
        schema, most_columns = self._index.schema, self._index.most_columns
        batch_columns = self._client.welcome.max_columns
        if settings.pace.is_lockstep:
            raise MismatchError(
                "pace.mode: the learner is in lockstep, and waits for actors of its own: replay "
                "into one with pace.mode = async"
            )
        if self._is_exact:
            self._check_same(settings)
        if recurrent_state(settings.model.core, settings.model.core_size) != schema.state:
            raise MismatchError(
                "model.core: the learner's network remembers something else than the recorded one: "
                "give it the same model.core and model.core_size"
            )
        policy = build_policy(schema, settings.model, settings.policies, seed=settings.seed)
        # Together they are a batch, which is all that a learner ever grants.
        streams = max(1, -(-batch_columns // (WINDOW * most_columns)))
        digest = policy.layout.digest
        self._client.join(schema, digest, columns=most_columns, streams=streams)
        if self._is_exact and self._client.newest.update != 0:
            raise MismatchError(
                f"--exact: the learner has made {self._client.newest.update} updates: start it anew"
            )

    def _check_same(self, theirs: ActorSettings) -> None:
        """As far as an actor is told; the rest is up to who started the learner."""
        recorded = validate_config(self._index.start.settings)
        ours = ActorSettings.of(recorded)
        for section in ("seed", "model", "policies", "trajectory", "max_lag"):
            if getattr(ours, section) != getattr(theirs, section):
                raise MismatchError(
                    f"--exact: {section} differs: {getattr(ours, section)} recorded, "
                    f"{getattr(theirs, section)} at the learner"
                )
        batch_columns = self._client.welcome.max_columns
        if batch_columns != recorded.learner.batch_columns:
            raise MismatchError(
                f"--exact: learner.batch_columns differs: {recorded.learner.batch_columns} "
                f"recorded, {batch_columns} at the learner"
            )

    def _play_all(self) -> None:
        seq, num_messages = 0, len(self._index)
        while seq < num_messages or self._is_looped:
            message = self._index.message(seq % num_messages)
            self._wait(seq, message.data)
            self._send(seq, message)
            seq += 1
        while self._client.settled < seq:
            self._pump()
        if self._is_exact:
            self._wait_for_the_end()

    def _wait(self, seq: int, data: Data) -> None:
        """For credit, and for its version."""
        client = self._client
        while seq >= client.granted:
            self._pump()
        since = time.monotonic()
        while self._is_exact and client.newest.update < data.update:
            client.ask()
            self._pump()
            if self._stands_still(since, STUCK_S):
                raise MismatchError(
                    f"--exact: the learner stands at update {client.newest.update}, but with the "
                    f"same messages the recorded one had made {data.update}: its settings differ, "
                    "or other actors are there too"
                )

    def _send(self, seq: int, message: Recorded) -> None:
        client, data = self._client, message.data
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
        self.played.messages += 1
        self.played.columns += data.columns
        self.played.body_bytes += len(message.body)

    def _pump(self) -> None:
        client = self._client
        client.pump(POLL_S)
        now = time.monotonic()
        self.played.seconds = now - self._began_at
        if not self._is_exact:
            client.pull()
        elif client.refused:
            self._refuse_refusal()
        if now >= self._say_at > 0:
            self._say_at += NEWS_EVERY_S
            logger.info("%s", describe(self.played, len(self._index)))

    def _refuse_refusal(self) -> None:
        reasons = " and ".join(sorted(self._client.refused))
        raise RecordingError(
            f"--exact: the learner refused as {reasons} what it had admitted when it was recorded. "
            "A run that dropped stale trajectories (dropped/stale in its reports) cannot be "
            "replayed exactly: what was late for training then may be late for admission now"
        )

    def _wait_for_the_end(self) -> None:
        """It may have a goal, and say goodbye; else until it has made all that it can."""
        client, since = self._client, time.monotonic()
        while True:
            client.ask()
            self._pump()
            if self._stands_still(since, STILL_S):
                return

    def _stands_still(self, since: float, patience_s: float) -> bool:
        """Whether no version has come for so long, and for longer than they take."""
        client = self._client
        patience_s = max(patience_s, STILL_GAPS * client.longest_gap_s)
        return time.monotonic() - max(since, client.newest_at) > patience_s


def describe(played: Played, num_messages: int) -> str:
    """One line."""
    seconds = max(played.seconds, 1e-9)
    mb = played.body_bytes / 1e6
    refused = ", ".join(f"{count} {reason}" for reason, count in sorted(played.refused.items()))
    return (
        f"played {played.messages:,} messages, {played.messages / num_messages:.1f} times the "
        f"recording, in {seconds:.1f} s: "
        f"{played.columns / seconds:,.0f} trajectories/s, {mb / seconds:,.1f} MB/s"
        + (f"; refused: {refused}" if refused else "")
    )
