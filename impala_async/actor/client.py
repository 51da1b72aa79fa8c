"""The actor's connection to its learner: sessions, credit, trajectories up, and coming back.

    connect ─► Welcome + settings ─► join(schema) ─► send / take ... ─► leave
       ▲                                                 │
       └────────── the learner is lost, or wants a new hello

It owns the data socket, the outbox and the message buffers. A buffer is written to again only
when the learner has settled what it held.

Runs on: sampler thread
"""

import logging
import os
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from impala_async import __version__
from impala_async.actor.greeting import best_urls, greet, raise_if_final
from impala_async.actor.link import Link
from impala_async.actor.unroll import Finished, MessageBuffer
from impala_async.config import ActorSettings
from impala_async.errors import UnreachableError
from impala_async.spec import Schema
from impala_async.weights import NO_VERSION, Version, Weights, WeightsLayout
from impala_async.wire.codec import Frame, encode_data
from impala_async.wire.messages import (
    BYE_REASONS,
    PROTOCOL,
    REJECT_CODES,
    VERDICTS,
    Bye,
    ByeOk,
    Data,
    Grant,
    Hello,
    Message,
    Reject,
    Spec,
    Welcome,
    pack,
    unpack,
)
from impala_async.wire.outbox import Outbox
from impala_async.wire.session import WINDOW
from impala_async.wire.sockets import Context, Dealer

logger = logging.getLogger(__name__)

HELLO_EVERY_S = 1.0
POLL_S = 0.1
BYE_OK_S = 0.5
SLOWEST_BYTES_PER_S = 200_000
NO_RUN = bytes(16)


class RunFinished(Exception):
    """There is nothing left to do: the learner reached its goal, or this actor was told to end."""


class NewRun(Exception):
    """The learner at this address runs something else now: build everything anew."""


@dataclass(frozen=True)
class Offer:
    """What this actor runs, as Spec tells it."""

    schema: Schema
    layout: WeightsLayout
    columns: int
    streams: int


class Client:
    """One actor's side of the protocol."""

    def __init__(
        self, context: Context, url: str, *, should_stop: Callable[[], bool], connect_s: float
    ) -> None:
        self.actor_id = os.urandom(16)
        self._context = context
        self._url = url
        self._should_stop = should_stop
        self._connect_s = connect_s
        self._data = Dealer(context, url)
        self._welcome: Welcome | None = None
        self._settings: ActorSettings | None = None
        self._offer: Offer | None = None
        self._link: Link | None = None
        self._outbox: Outbox[Finished] = Outbox()
        self._free: deque[MessageBuffer] = deque()
        self._version = NO_VERSION
        self._named = NO_VERSION
        self._last_heard = time.monotonic()
        self._timers: Mapping[str, float] = {}
        self._send_wait_s = 0.0
        self._weights_wait_s = 0.0

    @property
    def rank(self) -> int:
        """This actor's number in the run."""
        return self.welcome.rank

    @property
    def welcome(self) -> Welcome:
        assert self._welcome is not None, "connect comes first"
        return self._welcome

    @property
    def settings(self) -> ActorSettings:
        assert self._settings is not None, "connect comes first"
        return self._settings

    @property
    def offer(self) -> Offer:
        assert self._offer is not None, "join comes first"
        return self._offer

    @property
    def link(self) -> Link:
        assert self._link is not None, "join comes first"
        return self._link

    def connect(self) -> ActorSettings:
        """Say hello until a learner answers; what it wants to be run.

        Raises:
            UnreachableError: nobody answered within `connect_s` (later: `actor.reconnect_s`).
            MismatchError, NotAllowedError: this learner refuses this actor for good.
            NewRun: another run is at this address now.
        """
        give_up_at = time.monotonic() + self._connect_s
        while True:
            self._check_stop()
            until = time.monotonic() + HELLO_EVERY_S * random.uniform(0.5, 1.0)
            answer = greet(self._data, self._hello(), until=until, should_stop=self._should_stop)
            if answer is not None:
                return self._accept(*answer)
            if time.monotonic() > give_up_at:
                raise UnreachableError(
                    f"no learner answered at {self._url} within {self._connect_s:.0f} s: is it "
                    "running, and is this the address that it printed?"
                )

    def begin_new_run(self) -> ActorSettings:
        """After NewRun: forget the old run; what the new one wants to be run."""
        self._outbox.on_new_run()
        self._version = NO_VERSION
        return self.settings

    def join(self, offer: Offer) -> None:
        """Tell the learner what this actor runs; from then on credit comes."""
        self._offer = offer
        num_buffers = offer.streams * (WINDOW + 1)
        self._free = deque(MessageBuffer(offer.schema, offer.columns) for _ in range(num_buffers))
        self._open_session()

    def take(self, num_columns: int) -> MessageBuffer:
        """A buffer to write to, once everything finished is under way.

        To unroll further without credit would only make the data older.
        """
        assert num_columns == self.offer.columns
        before = time.perf_counter()
        while self._outbox.num_unsent or not self._free:
            self.pump(POLL_S)
        self._send_wait_s += time.perf_counter() - before
        return self._free.popleft()

    def send(self, finished: Finished) -> None:
        """Hand over a trajectory; it goes as soon as there is credit."""
        self._outbox.put(finished)
        self.pump(0)

    def newest(self) -> Weights | None:
        """Newer weights, at a trajectory boundary. Waits only for the first, or at max_lag."""
        before = time.perf_counter()
        weights = self.link.take_newest()
        while weights is None and self._must_wait_for_weights():
            self.link.wait_for_weights(POLL_S)
            self.pump(0)
            weights = self.link.take_newest()
        self._weights_wait_s += time.perf_counter() - before
        if weights is not None:
            self._version = weights.version
        return weights

    def take_waits(self) -> tuple[float, float]:
        """Seconds spent waiting for credit and for weights since the last call."""
        waits = self._send_wait_s, self._weights_wait_s
        self._send_wait_s = self._weights_wait_s = 0.0
        return waits

    def set_timers(self, timers: Mapping[str, float]) -> None:
        """Where the time goes, for the next heartbeat."""
        self._timers = timers
        self.link.timers = timers

    def pump(self, timeout_s: float) -> None:
        """Take what came in, send what may go, and find out whether the learner is still there."""
        self._check_stop()
        frames = self._data.receive(timeout_s)
        while frames is not None:
            self._last_heard = time.monotonic()
            self._take_message(unpack(frames[0]))
            frames = self._data.receive(0)
        for grant in self.link.take_grants():
            self._take_grant(grant)
        silent_s = time.monotonic() - max(self._last_heard, self.link.last_heard)
        if self.link.is_session_over or silent_s > self._patience_s:
            self._come_back()
        self._send_all()

    def leave(self) -> None:
        """Say goodbye, wait a moment for the answer, close everything."""
        if self._welcome is not None:
            bye = Bye(self._welcome.session, BYE_REASONS.index("leaving"))
            give_up_at = time.monotonic() + BYE_OK_S if self._data.send([pack(bye)]) else 0.0
            while (left_s := give_up_at - time.monotonic()) > 0:
                frames = self._data.receive(left_s)
                if frames is not None and isinstance(unpack(frames[0]), ByeOk | Reject):
                    break
        if self._link is not None:
            self._link.close()
        self._data.close()

    @property
    def _patience_s(self) -> float:
        """How long the learner may be silent: weights on a thin line hold up everything else."""
        return self.welcome.lease_s + self.offer.layout.num_bytes / SLOWEST_BYTES_PER_S

    def _check_stop(self) -> None:
        if self._should_stop():
            raise RunFinished

    def _hello(self) -> Hello:
        known = self._welcome
        return Hello(
            protocol=PROTOCOL,
            actor=self.actor_id,
            build=__version__,
            run_id=known.run_id if known else NO_RUN,
            epoch=known.epoch if known else 0,
            lowest_unsettled=self._outbox.lowest_unsettled,
        )

    def _accept(self, welcome: Welcome, settings: ActorSettings) -> ActorSettings:
        former, self._welcome, self._settings = self._welcome, welcome, settings
        self._connect_s = settings.actor.reconnect_s
        self._last_heard = time.monotonic()
        if former is not None and former.run_id != welcome.run_id:
            raise NewRun
        return settings

    def _open_session(self) -> None:
        """Move to the fastest way to this learner, send Spec, start the link."""
        welcome, offer = self.welcome, self.offer
        data_url, weights_url = best_urls(welcome, self._url)
        if data_url != self._url:
            self._data.close()
            self._data = Dealer(self._context, data_url)
        self._link = Link(
            self._context,
            weights_url,
            session=welcome.session,
            layout_digest=offer.layout.digest,
            have=self._version,
            heartbeat_s=welcome.heartbeat_s,
            reply_timeout_s=self._patience_s,
        )
        self._link.timers = self._timers
        self._named = NO_VERSION
        spec = Spec(
            welcome.session, offer.schema.digest, offer.layout.digest, offer.columns, offer.streams
        )
        give_up_at = time.monotonic() + welcome.lease_s
        while not self._data.send([pack(spec), offer.schema.to_json()]):
            if time.monotonic() > give_up_at:
                raise UnreachableError(f"lost the learner at {data_url} right after its welcome")
            self._check_stop()
            time.sleep(0.005)
        self._last_heard = time.monotonic()

    def _take_message(self, message: Message) -> None:
        if isinstance(message, Grant):
            self._take_grant(message)
        elif isinstance(message, Reject):
            raise_if_final(message)
            if message.code == REJECT_CODES.index("hello_again"):
                self._come_back()
            else:
                logger.warning("the learner refused a message: %s", message.text)
        elif isinstance(message, Bye):
            self._data.send([pack(ByeOk(message.session))])
            logger.info("the learner says goodbye: %s", BYE_REASONS[message.reason])
            if message.reason == BYE_REASONS.index("finished"):
                raise RunFinished
            self._come_back()

    def _take_grant(self, grant: Grant) -> None:
        if grant.session != self.welcome.session:
            return
        for seq, verdict in grant.verdicts:
            logger.debug("trajectory %d was refused: %s", seq, VERDICTS[verdict])
        self._free.extend(finished.buffer for finished in self._outbox.on_grant(grant))
        self._named = max(self._named, Version(grant.epoch, grant.update))
        self.link.want(self._named)

    def _send_all(self) -> None:
        now = time.monotonic()
        self._outbox.resend_overdue(now, self.welcome.lease_s)
        while (next_one := self._outbox.sendable()) is not None:
            seq, finished = next_one
            if not self._data.send(self._encode(seq, finished)):
                return
            self._outbox.mark_sent(seq, now)

    def _encode(self, seq: int, finished: Finished) -> list[Frame]:
        buffer = finished.buffer
        data = Data(
            session=self.welcome.session,
            seq=seq,
            epoch=finished.version.epoch,
            update=finished.version.update,
            rows=self.offer.schema.rows,
            columns=buffer.num_columns,
            codec=0,
            num_episodes=0,
            body=None,
        )
        return encode_data(data, buffer.obs, buffer.small, finished.episodes)

    def _must_wait_for_weights(self) -> bool:
        if self._version == NO_VERSION:
            return True
        return self._named.update - self._version.update >= self.settings.max_lag

    def _come_back(self) -> None:
        """A new session with whoever is at the address now; what is not settled goes again."""
        logger.info("looking for the learner at %s again", self._url)
        self.link.close()
        self._data.close()
        self._data = Dealer(self._context, self._url)
        self.connect()
        self._outbox.on_new_session()
        self._open_session()
        logger.info("back at work")
