"""The actor's connection to its learner: a shell around wire/actor_side.py, which decides what is
said. It owns the data socket and the message buffers, which are written to again only when the
learner has settled what they held.

Runs on: sampler thread
"""

import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

from impala_async.actor import joining
from impala_async.actor.address import Address, check_address
from impala_async.actor.link import Link
from impala_async.actor.unroll import Finished, MessageBuffer, plan_buffers
from impala_async.config.run import ActorSettings
from impala_async.errors import MismatchError
from impala_async.output import AFTER_S, EVERY_S, SeldomLog
from impala_async.schema import Schema
from impala_async.weights import NO_VERSION, Weights, WeightsLayout
from impala_async.wire import messages as wire
from impala_async.wire.actor_side import NO_RUN, ActorSide, Handshake
from impala_async.wire.sockets import Context, Dealer

logger = logging.getLogger(__name__)

# A wait for credit that is longer is told while it lasts.
LONG_WAIT_S = 1.0
POLL_S = 0.1
# So much of the time that finished trajectories wait is waited before they are begun instead: by
# the least of some times, as a learner may stand still for once.
HOLD_SHARE = 0.8
NUM_WAITS = 4
# A shorter wait for a message would take as long.
TICK_S = 0.001
SPEC_POLL_S = 0.005
# Messages between two looks at everything else.
MAX_AT_ONCE = 100
# A rank to which we were sent may have ended since: then its first one knows another.
SENT_S = AFTER_S + 1.0
NO_CONNECTION = "there is no connection"
NO_CREDIT = "the learner at %s has granted nothing more for %.0f s"
NOTHING_NEWER = "no newer weights from %s for %.0f s: in lockstep all actors do their part first"


class RunFinished(Exception):
    """There is nothing left to do: the learner reached its goal, or this actor was told to end."""


class NewRun(Exception):
    """Another run is at this address, or an earlier state of it: nothing that was imported, built
    or learnt here is its."""


class NewSettings(Exception):
    """This run goes on with other settings: build everything anew."""


class Client:
    """One actor's connections, and the buffers that are under way over them."""

    settings: ActorSettings
    """They are there from `connect` on."""

    def __init__(
        self, context: Context, learner: str, *, should_stop: Callable[[], bool], connect_s: float
    ) -> None:
        """`learner`: its address or its run folder."""
        self.side: ActorSide[Finished] = ActorSide(os.urandom(16))
        self._context = context
        self._address = Address(learner)
        # One that was dialled: where there are several ranks, the address may send us on.
        self._url = self._address.url
        self._should_stop = should_stop
        self._connect_s = connect_s
        self._dealer: Dealer | None = None
        self._link: Link | None = None
        self.timers: dict[str, float] = {}
        """Where the time goes, for heartbeats."""
        self.refused = Counter[str]()
        """How many messages were refused, by the reason."""
        self.is_finished = False
        """Whether the learner has said that it is."""
        self._free: deque[MessageBuffer] = deque()
        self._send_wait_s = self._weights_wait_s = 0.0
        self._held_s, self._waits_s = 0.0, deque([0.0], NUM_WAITS)
        self._is_coming_back = False
        self._log = SeldomLog(logger)

    @property
    def link(self) -> Link:
        assert self._link is not None, "join comes first"
        return self._link

    @property
    def _data(self) -> Dealer:
        assert self._dealer is not None, "connect comes first"
        return self._dealer

    def connect(self) -> ActorSettings:
        """Say hello until a learner answers; what it wants to be run, which `settings` has too.

        Raises what `find_learner` does, within `connect_s` (later `actor.reconnect_s`, unless that
        was without end), and NewRun: another run is at this address now.
        """
        welcome, settings = self._find_learner()
        self.settings = settings
        if self._connect_s != math.inf:
            self._connect_s = settings.actor.reconnect_s
        lockstep_lag = settings.pace.lag if settings.pace.is_lockstep else None
        side, now = self.side, time.monotonic()
        if not side.accept(welcome, now, max_lag=settings.max_lag, lockstep_lag=lockstep_lag):
            raise NewRun
        return settings

    def _find_learner(self) -> tuple[wire.Welcome, ActorSettings]:
        """Look for it where it is now, which a run folder may tell anew meanwhile."""
        since, address, side = time.monotonic(), self._address, self.side
        give_up_at = since + self._connect_s
        address.find(give_up_at, self._check_stop)
        if side.run_id == NO_RUN:
            side.run_id = address.run_id
        sent_to = ""
        while True:
            self._url, began = sent_to or address.url, time.monotonic()
            self._dial(self._url)
            handshake = side.handshake(began)
            found = joining.find_learner(
                self._data,
                handshake,
                url=self._url,
                within_s=self._connect_s,
                since=since,
                has_moved=partial(self._is_in_vain, handshake, sent_to, began),
                check_stop=self._check_stop,
                log=self._log,
            )
            # Nobody is sent on twice.
            was_sent, sent_to = sent_to, "" if sent_to else handshake.elsewhere
            if was_sent and handshake.elsewhere:
                self._sleep(next(side.pauses))  # else it would run in circles without one
            if sent_to:
                text = f"the learner at {self._url} sends us to another rank: wants tcp://HOST:PORT"
                check_address(sent_to, text, MismatchError)
                self._log.info("the learner at %s sends us to %s", self._url, sent_to)
            if found and address.run_id in (NO_RUN, found[0].run_id):
                return found
            if found:
                address.leave_other(give_up_at, self._check_stop)

    def _is_in_vain(self, handshake: Handshake, sent_to: str, since: float) -> bool:
        """Whether to say hello somewhere else. A folder may yet tell of another key; and where a
        learner was, something else may have its port for a while."""
        if self.side.run_id == NO_RUN and not self._address.is_folder:
            joining.check_key(self._data, self._url)
        outdated_s = handshake.outdated_s(now := time.monotonic())
        # The search ends after `reconnect_s`: this must be found before.
        if outdated_s and outdated_s > self.settings.actor.reconnect_s / 2:
            # An earlier state of its folder was put back, or a stranger named a higher epoch.
            raise NewRun
        is_silent = bool(sent_to) and now - since > SENT_S
        return is_silent or bool(handshake.elsewhere) or self._address.has_moved()

    def _dial(self, url: str) -> None:
        if self._dealer is not None:
            self._dealer.close()
        self._dealer, self._data_url = Dealer(self._context, url, key=self._address.key), url

    def join(
        self,
        schema: Schema,
        layouts: Sequence[WeightsLayout],
        columns: int,
        streams: int,
        *,
        gives_way: bool = True,
    ) -> None:
        """Tell the learner what this actor runs; from then on credit comes.

        Args:
            layouts: weights may come in one of these; the first one is the policy's own.
            columns: each message has so many.
            streams: messages that are written side by side.
            gives_way: a message may have to wait for others, those behind it not.
        """
        self._schema, self._layouts = schema, layouts
        self.side.set_spec(schema, layouts[0].digest, columns, streams, gives_way)
        num_buffers, num_bytes = plan_buffers(schema, columns, streams)
        self._data_s = num_bytes / wire.SLOWEST_BYTES_PER_S
        self.side.settled.clear()  # whose buffers may be of another run
        self._free = deque(MessageBuffer(schema, columns) for _ in range(num_buffers))
        if not self._open_session():
            self._come_back(NO_CONNECTION)

    def take_buffer(self) -> MessageBuffer:
        """A buffer to write to, once everything finished is under way.

        To unroll further without credit would only make the data older.
        """
        before, usual = time.monotonic(), dict(self.timers)
        while self.side.outbox.num_unsent or not self._free:
            self._wait(POLL_S, before)
        if self.timers != usual:
            # Updates that are made from now on do not wait so long.
            self.timers.update(usual)
            self.link.beat()
        if not self.settings.pace.is_lockstep:
            self._hold_back(time.monotonic() - before)
        self._send_wait_s += time.monotonic() - before
        return self._free.popleft()

    def _hold_back(self, waited_s: float) -> None:
        """Begin later, with newer weights, where what is finished would have to wait: until there
        is credit, or so long that the next one will hardly wait."""
        self._waits_s.append(self._held_s + waited_s)
        begun_at = time.monotonic()
        over_at = begun_at + HOLD_SHARE * min(self._waits_s)
        outbox = self.side.outbox
        while not outbox.has_credit and (left_s := over_at - time.monotonic()) >= TICK_S:
            self._wait(min(left_s, POLL_S), begun_at)
        self._held_s = time.monotonic() - begun_at

    def _wait(self, timeout_s: float, since: float) -> None:
        """Wait for credit a little longer, and tell of a long wait."""
        self.pump(timeout_s)
        # Short ones are in the times of whole trajectories, and no measure of them.
        if self.timers and (wait_s := time.monotonic() - since) >= LONG_WAIT_S:
            self.timers["send_wait_ms"] = 1000 * wait_s
        # While this actor comes back, that is told.
        waited_s = time.monotonic() - max(since, self.side.told_at)
        if waited_s > EVERY_S:
            self._log.info(NO_CREDIT, self._url, waited_s)

    def send(self, finished: Finished) -> None:
        if not self.side.put(finished):
            self._free.append(finished.buffer)
        self.pump(0)

    def is_to_cut(self) -> bool:
        """Whether others wait for the trajectory that is being written."""
        return self.link.cut == self.side.outbox.next_seq

    def newest(self) -> Weights | None:
        """Newer weights, at a trajectory boundary; waits for them where this actor must."""
        if self.side.keeps_weights():
            return None
        before = time.perf_counter()
        weights = self.link.take_newest()
        while weights is None and self.side.must_wait:
            self.link.wait_for_weights(POLL_S)
            self.pump(0)
            pulls, waited_s = self.link.pulls, time.perf_counter() - before
            # In lockstep the next ones come when all others have done their part.
            is_due = self.side.version == NO_VERSION or pulls.named > pulls.have
            if is_due and waited_s > AFTER_S:
                self._log.warning(
                    "still waiting for weights from %s (%.0f s): %s",
                    *(self.link.url, waited_s, pulls.answer),
                )
            elif waited_s > EVERY_S:
                self._log.info(NOTHING_NEWER, self.link.url, waited_s)
            weights = self.link.take_newest()
        self._weights_wait_s += time.perf_counter() - before
        if weights is not None:
            self.side.act_with(weights.version)
        return weights

    def take_waits(self) -> tuple[float, float]:
        """Seconds spent waiting for credit and for weights since the last call."""
        waits = self._send_wait_s, self._weights_wait_s
        self._send_wait_s = self._weights_wait_s = 0.0
        return waits

    def pump(self, timeout_s: float) -> None:
        """Take what came in, send what may go, and find out whether the learner is still there."""
        self._check_stop()
        for number in range(MAX_AT_ONCE):
            frames = self._data.receive(0 if number else timeout_s)
            if frames is None:
                break
            message = joining.read(frames[0], self._log)
            if message is not None:
                self._follow(self.side.take(message, time.monotonic()))
        for grant in self.link.take_grants():
            self._follow(self.side.take_grant(grant))
        now = time.monotonic()
        if not self._data.is_greeted:
            self._reconnect(now)
        if not self.side.is_joined and (waited_s := now - self.side.told_at) > AFTER_S:
            self._log.warning("the learner at %s grants nothing yet (%.0f s)", self._url, waited_s)
        if self._is_coming_back and self.side.is_joined and self.link.pulls.is_serving:
            self._is_coming_back = False
            self._log.info("back at work")
        silence = self.side.overdue(now, self.link.pulls, self.link.weights_s, self._data_s)
        if over := self.link.pulls.session_over:
            self._come_back(over)
        elif silence is not None:
            port, patience_s = silence
            urls = {"data": self._data_url, "weights": self.link.url}
            where = f"its {port} port, {urls[port]}," if port else "it"
            self._come_back(f"{where} has not answered for {patience_s:.3g} s")
        if self._data.is_greeted:
            self._send_all(now)

    def leave(self, why: str = "") -> None:
        """Say goodbye, with what this actor died of, and close everything, once."""
        if bye := self.side.bye(why):
            joining.say_goodbye(self._data, bye, self._log)
        if self._link is not None:
            self._link.close()
        if self._dealer is not None:
            self._dealer.close()

    def _check_stop(self) -> None:
        if self._should_stop():
            raise RunFinished

    def _sleep(self, seconds: float) -> None:
        over_at = time.monotonic() + seconds
        self._check_stop()
        while (left_s := over_at - time.monotonic()) > 0:
            time.sleep(min(left_s, POLL_S))
            self._check_stop()

    def _open_session(self) -> bool:
        """Move to the fastest way to this learner and say Spec there; False if it is lost again."""
        welcome = self.side.welcome
        if (end := joining.end_since_welcome(self._data, self.side, self._log)) is not None:
            if isinstance(end, wire.Bye) and wire.BYE_REASONS[end.reason] == "finished":
                self.is_finished = True
                raise RunFinished
            return False
        data_url, weights_url = joining.best_urls(welcome, self._url)
        self._is_compressed = joining.is_compressed(self.settings.actor.compress, data_url)
        if data_url != self._url:
            self._dial(data_url)
        self._link = Link(
            self._context,
            weights_url,
            welcome,
            layouts=self._layouts,
            have=self.side.version,
            num_kept=1 + self.settings.pace.lag,
            timers=self.timers,
            log=self._log,
            key=self._address.key,
        )
        # Then it is told that it is looked for again.
        give_up_at = time.monotonic() + min(welcome.lease_s, EVERY_S)
        while not self._data.greet(self.side.spec_frames()):
            if time.monotonic() > give_up_at:
                self._log.warning("%s takes connections, but no messages", self._data_url)
                return False
            self._sleep(SPEC_POLL_S)
        self.side.said_spec(time.monotonic())
        return True

    def _follow(self, message: wire.Grant | wire.Reject | wire.Bye | None) -> None:
        if isinstance(message, wire.Grant):
            self.refused.update(message.refused)
            env_id, reason = self.settings.env.id, self.side.refused_for
            joining.check_refused(message.refused, env_id, self._log, reason)
            self._free.extend(finished.buffer for finished in self.side.settled)
            self.side.settled.clear()
            self.link.want(self.side.named)
        elif isinstance(message, wire.Reject) and wire.code_of(message) == "hello_again":
            self._come_back(f"it says {message.text!r}")
        elif isinstance(message, wire.Reject):
            self._log.warning("the learner refused a message: %s", message.text)
        elif isinstance(message, wire.Bye):
            self._data.send_last([wire.pack(wire.ByeOk(message.session))])
            reason = wire.BYE_REASONS[message.reason]
            self._log.info("the learner says goodbye: %s", reason)
            self.is_finished = reason == "finished"
            if self.is_finished:
                raise RunFinished
            self._come_back("it said goodbye")

    def _send_all(self, now: float) -> None:
        outbox, welcome = self.side.outbox, self.side.welcome
        # On a thin line that lives it may still be under way.
        if outbox.resend_overdue(now, after_s := welcome.lease_s + self._data_s):
            self._log.info(
                "what the learner at %s has neither taken nor refused for %.3g s is sent again",
                *(self._url, after_s),
            )
        while (next_one := outbox.sendable()) is not None:
            seq, (buffer, version, episodes, num_cut) = next_one
            shape = self._schema.rows, buffer.num_columns
            data = wire.Data(welcome.session, seq, *version, *shape, wire.PLAIN, 0, None, num_cut)
            # Big frames are views of the buffer, which must stay as it is until seq is settled.
            planes = buffer.obs, buffer.small
            frames = wire.encode_data(data, *planes, episodes, is_compressed=self._is_compressed)
            if not self._data.send(frames):
                return
            self.side.said(seq, now)

    def _reconnect(self, now: float) -> None:
        """Repeat over the next connection, at once, what was sent over the one that broke."""
        if self._data.is_local:
            # No wire broke: the learner's process is gone, and its successor's path is another.
            self._come_back(NO_CONNECTION)
        elif self._address.has_moved():
            self._come_back("its run folder names another address")
        elif now >= self.side.tell_again_at and self._data.greet(self.side.spec_frames()):
            self.side.repeated_spec(now)

    def _come_back(self, why: str) -> None:
        self._is_coming_back = True
        self._log.info("looking for the learner at %s again: %s", self._url, why)
        built_for, is_open = self.settings, False
        given_up = self.side.lose()
        if self.settings.pace.is_lockstep:
            self._log.info("lockstep: %d trajectories are given up", len(given_up))
            self._free.extend(finished.buffer for finished in given_up)
        while not is_open:
            if self._link is not None:
                self._link.close()
            # Longer each time, until something comes of a session.
            self._sleep(next(self.side.pauses))
            found = self.connect()
            if not found.pace.is_lockstep:
                # Each rank gives seeds of its own, and no other actor has those of this one.
                found = found.model_copy(update={"seed": built_for.seed})
            # As text: a number of theirs that is none differs from itself.
            if found.model_dump_json() != built_for.model_dump_json():
                if num_held := self.side.begin_anew():
                    self._log.info("other settings: %d trajectories are given up", num_held)
                self.connect()
                raise NewSettings
            is_open = self._open_session()
