"""Plays a recording into a learner as an actor does, whose trajectories come from the file.

For a benchmark each message is stamped with the newest version that was heard of. Exactly: it keeps
its own version, in the order of admission, and goes only when the learner has published that. Then
the learner's batches are those of the recording, column for column and lag for lag.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch

from impala_async.actor.client import Client, RunFinished
from impala_async.actor.unroll import Finished, MessageBuffer
from impala_async.errors import MismatchError, RecordingError
from impala_async.policy import build_policy
from impala_async.replay.index import RecordingIndex
from impala_async.schema import Bytes2D
from impala_async.weights import NO_VERSION, Version
from impala_async.wire.messages import EPISODE
from impala_async.wire.peer import WINDOW
from impala_async.wire.pulls import SHORTEST_BEAT_S
from impala_async.wire.recording import Recorded
from impala_async.wire.sockets import new_context

logger = logging.getLogger(__name__)

POLL_S = 0.001
NEWS_EVERY_S = 10.0
# When no version has come for so long, a learner that has all messages has made what it could; one
# that should go on is given more time.
STILL_S, STUCK_S = 10.0, 60.0


class _Planes(MessageBuffer):
    """Those of a recorded message, where they were read."""

    def __init__(self, obs: Bytes2D, small: Bytes2D) -> None:
        self.num_columns, self.obs, self.small = len(obs), obs, small


@dataclass(eq=False)
class Player:
    """Plays a recording once, or looped until it is told to stop."""

    learner: str
    """Its address or its run folder."""
    index: RecordingIndex
    _: KW_ONLY
    is_exact: bool
    is_looped: bool
    should_stop: Callable[[], bool]
    connect_s: float

    def __post_init__(self) -> None:
        self.num_messages = self.num_columns = self.num_body_bytes = 0
        """How much was played."""
        self.seconds = 0.0
        self.is_finished = False
        """Whether the learner has reached a goal of its own."""
        self.newest = NO_VERSION
        self._newest_at = time.monotonic()
        self._context = new_context()
        self._client = Client(
            self._context, self.learner, should_stop=self.should_stop, connect_s=self.connect_s
        )
        self.refused = self._client.refused
        self._began_at, self._say_at = self._newest_at, math.inf

    def run(self) -> None:
        """Play until all is settled, the learner says goodbye, or this process is to end."""
        try:
            self._join()
            self._began_at = time.monotonic()
            self._say_at = self._began_at + NEWS_EVERY_S
            self._play_all()
        except RunFinished:
            self.is_finished = self._client.is_finished
        finally:
            self._client.leave()
            self._context.term()

    def describe(self) -> str:
        seconds = max(self.seconds, 1e-9)
        refused = sorted(self.refused.items())
        return (
            f"played {self.num_messages:,} messages, "
            f"{self.num_messages / len(self.index):.1f} times the recording, in {seconds:.1f} s: "
            f"{self.num_columns / seconds:,.0f} trajectories/s, "
            f"{self.num_body_bytes / 1e6 / seconds:,.1f} MB/s"
            + ("; refused: " if refused else "")
            + ", ".join(f"{count} {reason}" for reason, count in refused)
        )

    def _join(self) -> None:
        client, schema, columns = self._client, self.index.schema, self.index.most_columns
        settings = client.connect()
        # Nothing is computed here, and a pool of threads would only stand in the learner's way.
        torch.set_num_threads(1)
        policy = build_policy(schema, settings.model, settings.policies, seed=settings.seed)
        welcome = client.side.welcome
        if self.is_exact:
            # A grant names the newest version only when there is credit to give, or after a beat.
            client.side.welcome = welcome._replace(heartbeat_s=SHORTEST_BEAT_S)
        # Together they are a batch, which is all that a learner ever grants.
        streams = max(1, -(-welcome.max_columns // (WINDOW * columns)))
        layouts = policy.layout, policy.coarse_layout
        # One that gives way would change the order.
        client.join(schema, layouts, columns, streams, gives_way=False)
        while self.newest == NO_VERSION:
            self._pump()

    def _play_all(self) -> None:
        outbox, num_messages = self._client.side.outbox, len(self.index)
        while self.num_messages < num_messages or self.is_looped:
            message = self.index.message(self.num_messages % num_messages)
            while not outbox.has_credit:
                self._pump()
            if self.is_exact:
                self._await_version(message.data.update)
            self._play(message)
        while len(outbox):
            self._pump()
        since = time.monotonic()
        # The learner may have a goal, and say goodbye; else until it has made all that it can.
        patience_s = STILL_S if self.index.end is None else STUCK_S
        while self.is_exact and self._still_s(since) < patience_s:
            self._pump()

    def _await_version(self, update: int) -> None:
        since = time.monotonic()
        while self.newest.update < update:
            self._pump()
            if self._still_s(since) > STUCK_S:
                raise MismatchError(
                    f"--exact: the learner stands at update {self.newest.update}, but with the "
                    f"same messages the recorded one had made {update}: its release differs"
                )

    def _still_s(self, since: float) -> float:
        return time.monotonic() - max(since, self._newest_at)

    def _play(self, message: Recorded) -> None:
        data, layout, client = message.data, self.index.schema.layout, self._client
        obs, small, tail = np.split(
            np.frombuffer(message.body, np.uint8),
            [data.columns * layout.obs_bytes, data.columns * layout.column_bytes],
        )
        planes = _Planes(obs.reshape(data.columns, -1), small.reshape(data.columns, -1))
        # A learner that is started anew has an epoch of its own.
        version = Version(client.side.welcome.epoch, data.update) if self.is_exact else self.newest
        # The memory of one that is settled is given up for it.
        client.take_buffer()
        client.send(Finished(planes, version, tail.view(EPISODE).tolist()))
        self.num_messages += 1
        self.num_columns += data.columns
        self.num_body_bytes += len(message.body)
        self._look()

    def _pump(self) -> None:
        self._client.pump(POLL_S)
        self._look()

    def _look(self) -> None:
        now, named = time.monotonic(), self._client.side.named
        self.seconds = now - self._began_at
        if named > self.newest:
            self.newest, self._newest_at = named, now
        if self.is_exact and self.refused:
            raise RecordingError(
                f"--exact: the learner refused as {' and '.join(sorted(self.refused))} what it "
                "had admitted when it was recorded. A run that dropped stale trajectories "
                "(dropped/stale in its reports) cannot be replayed exactly: what was late for "
                "training then may be late for admission now"
            )
        if now >= self._say_at:
            self._say_at += NEWS_EVERY_S
            logger.info("%s", self.describe())
