"""The actor's side of the protocol as a pure state machine: no socket, no clock, no thread.

hello ─► Welcome ─► Spec ─► Grant ─► Data ... ─► goodbye
  ▲                            │
  └──── the learner is lost, or wants a new hello
"""

import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, takewhile
from typing import Generic, TypeVar

from impala_async import __version__
from impala_async.errors import MismatchError, NotAllowedError, ProtocolError, plain
from impala_async.schema import Schema
from impala_async.weights import NO_VERSION, Version
from impala_async.wire import messages as wire
from impala_async.wire.pulls import Pulls, doubling

HELLO_EVERY_S = 1.0
FIRST_S, LONGEST_S = 0.1, 5.0
NO_RUN = bytes(16)
# So many messages are looked at, and such a share of them is no accident.
MESSAGES_LOOKED_AT, NEARLY_ALL = 100, 0.9
# The refusals for what is in a message, and what that is.
REFUSALS = {
    "nonfinite": "an observation, a reward, an action or its log-probability in them is not finite",
    "invalid": "they have what no trajectory can have, as a row in which no action is legal",
}
# An actor that begins anew counts from what it held. Nobody settles so much beyond that.
MOST_SETTLED_AHEAD = 1 << 20

Item = TypeVar("Item")


def new_pauses() -> Iterator[float]:
    """How many seconds to wait before each try, until something succeeds: none before the first."""
    return chain((0.0,), doubling(FIRST_S, LONGEST_S))


class Handshake:
    """A hello that is said now and then, until a learner welcomes us."""

    def __init__(
        self, hello: wire.Hello, now: float, chance: Callable[[], float] = random.random
    ) -> None:
        self.hello = hello
        self.refusal = ""
        self.is_refused = False
        """Whether a refusal is all that the last hello came to."""
        self.elsewhere = ""
        """The address of another rank of the same learner, if that is to be worked for."""
        self._outdated_since = math.inf
        self.say_at = self._greet_at = now
        self._chance = chance
        self._pauses = new_pauses()

    def is_due(self, now: float, *, is_greeted: bool) -> bool:
        """Over each new connection too, but what only hangs up is not hammered at."""
        return now >= self.say_at or (now >= self._greet_at and not is_greeted)

    def said(self, now: float) -> None:
        self.is_refused = False
        self._greet_at = now + next(self._pauses)
        # Not all at once, when many actors lost the same learner.
        self.say_at = now + HELLO_EVERY_S * (1 + self._chance()) / 2

    def take(self, message: wire.Message | None, now: float) -> wire.Welcome | None:
        """Return a welcome, unless its learner should be dead: its epoch is lower than the run's.
        A learner that refuses for good is a MismatchError or a NotAllowedError."""
        if isinstance(message, wire.Reject) and wire.code_of(message) == "elsewhere":
            self.elsewhere = message.text
        elif isinstance(message, wire.Reject):
            raise_if_final(message, is_joined=False)
            self.refusal, self.is_refused = message.text, True
            self.say_at = max(self.say_at, now + message.retry_after_s)
        if not isinstance(message, wire.Welcome):
            return None
        if message.run_id != self.hello.run_id or message.epoch >= self.hello.epoch:
            return message
        self._outdated_since = min(self._outdated_since, now)
        return None

    def outdated_s(self, now: float) -> float:
        """For how long learners of lower epochs have answered, and no other one."""
        return max(now - self._outdated_since, 0.0)


class Outbox(Generic[Item]):
    """Trajectories of one actor that are not settled yet, in the order of their seqs, and which to
    send next: again after a lost connection, never without credit."""

    def __init__(self) -> None:
        self.next_seq = 0
        self._granted = 0
        self._held: dict[int, Item] = {}
        # The times at which those that are under way were sent, the oldest first.
        self._sent_at: dict[int, float] = {}
        # A heap of the others, and of some that have been sent or settled since.
        self._unsent: list[int] = []

    def __len__(self) -> int:
        return len(self._held)

    @property
    def lowest_unsettled(self) -> int:
        return min(self._held, default=self.next_seq)

    @property
    def num_unsent(self) -> int:
        return len(self._held) - len(self._sent_at)

    @property
    def has_credit(self) -> bool:
        """Whether what is put next may go at once."""
        return self.next_seq < self._granted

    def put(self, item: Item) -> None:
        self._held[self.next_seq] = item
        heappush(self._unsent, self.next_seq)
        self.next_seq += 1

    def sendable(self) -> tuple[int, Item] | None:
        """The first trajectory that has credit and is not under way."""
        unsent = self._unsent
        while unsent and (unsent[0] in self._sent_at or unsent[0] not in self._held):
            heappop(unsent)
        if not unsent or unsent[0] >= self._granted:
            return None
        return unsent[0], self._held[unsent[0]]

    def mark_sent(self, seq: int, now: float) -> None:
        assert seq in self._held
        self._sent_at[seq] = now

    def on_grant(self, grant: wire.Grant) -> list[Item]:
        """Take in a grant of this session, which may be late; returns what is settled.

        A refused message above a gap is held until the gap is closed. So there is no gap in what
        is held, and `lowest_unsettled` says all that a restarted learner must know.
        """
        self._granted = max(self._granted, grant.granted)
        if self._sent_at.pop(grant.again, None) is not None:
            heappush(self._unsent, grant.again)
        self.next_seq = max(self.next_seq, grant.settled)
        done = list(takewhile(lambda seq: seq < grant.settled, self._held))
        for seq in done:
            self._sent_at.pop(seq, None)
        return [self._held.pop(seq) for seq in done]

    def resend_all(self, *, is_new_session: bool) -> None:
        """Messages that were under way may be lost; in a new session credit starts from nothing."""
        self._sent_at.clear()
        self._unsent = [*self._held]
        self._granted = 0 if is_new_session else self._granted

    def give_up(self) -> list[Item]:
        """Never send what is held; returns it."""
        held, self._held, self._sent_at, self._unsent = self._held, {}, {}, []
        return [*held.values()]

    def resend_overdue(self, now: float, after_s: float) -> int:
        """Send again what has not been settled for so long; how many those are."""
        sent = takewhile(lambda each: now - each[1] > after_s, self._sent_at.items())
        overdue = [seq for seq, _ in sent]
        for seq in overdue:
            del self._sent_at[seq]
            heappush(self._unsent, seq)
        return len(overdue)


class ActorSide(Generic[Item]):
    """One actor, in all of its sessions; an item is a trajectory that it sends."""

    welcome: wire.Welcome
    """There from `accept` on."""

    def __init__(self, actor: bytes) -> None:
        self.actor = actor
        self.number = wire.NO_NUMBER
        """The one that its starter gave it."""
        self.session = b""
        self.outbox: Outbox[Item] = Outbox()
        self.pauses = new_pauses()
        self.has_session = False
        """Whether the learner would miss us."""
        self.is_joined = False
        """Whether it has answered our Spec."""
        self.version = NO_VERSION
        """The version of the weights that act."""
        self.named = NO_VERSION
        """The newest that was heard of in this session."""
        self.settled: list[Item] = []
        """The learner is done with these: for the shell to take away."""
        self.refused_for = ""
        """The reason for which nearly all messages of late were refused, if they were."""
        self._num_settled, self._num_bad = 0, Counter[str]()
        self.last_heard = self.told_at = self.tell_again_at = 0.0
        """The last is for Spec, over a new connection: what only hangs up is not hammered at."""
        self._unanswered_since: float | None = None
        self.run_id, self._epoch = NO_RUN, 0
        """The run that is worked for: one that was asked for, or that of the first welcome."""
        self._max_lag = 0
        self._lockstep_lag: int | None = None
        # In lockstep, so many more trajectories act with the first weights of a session.
        self._num_kept_left = 0

    def handshake(self, now: float) -> Handshake:
        """Return what to say first, or again to a learner that this actor has worked for before."""
        known, held_from = (self.run_id, self._epoch), self.outbox.lowest_unsettled
        hello = wire.Hello(wire.PROTOCOL, self.actor, __version__, *known, held_from, self.number)
        return Handshake(hello, now)

    def accept(
        self, welcome: wire.Welcome, now: float, max_lag: int = 0, lockstep_lag: int | None = None
    ) -> bool:
        """A session begins, without credit. False if of another run, which drops what was held."""
        is_same_run = self.run_id in (NO_RUN, welcome.run_id)
        if self.run_id != NO_RUN and welcome.epoch == self._epoch:
            # A run folder that was put back counts the same epoch twice, with other weights.
            is_same_run &= welcome.nonce == self.welcome.nonce
        if not is_same_run:
            self.version, self.outbox = NO_VERSION, Outbox()
        self.welcome, self.session = welcome, welcome.session
        self.run_id, self._epoch = welcome.run_id, welcome.epoch
        self._max_lag, self._lockstep_lag = max_lag, lockstep_lag
        self.has_session, self.is_joined = True, False
        self.named = NO_VERSION
        if self.version.epoch > welcome.epoch:
            # It has never published that.
            self.version = NO_VERSION
        self.last_heard, self._unanswered_since = now, None
        # Settings, and the environment with them, may be others.
        self._num_settled, self._num_bad = 0, Counter()
        self.outbox.resend_all(is_new_session=True)
        return is_same_run

    def set_spec(
        self, schema: Schema, layout: bytes, columns: int, streams: int, gives_way: bool = True
    ) -> None:
        """Set what this actor runs, in this session and in later ones; `layout` is a digest."""
        self._spec = wire.Spec(NO_RUN, schema.digest, layout, columns, streams, int(gives_way))
        self._schema_frame = schema.to_json()

    def spec_frames(self) -> list[wire.Frame]:
        """Return what is said first over each data connection of a session."""
        return [wire.pack(self._spec._replace(session=self.session)), self._schema_frame]

    def said_spec(self, now: float) -> None:
        self.told_at = self.last_heard = now

    def repeated_spec(self, now: float) -> None:
        """Over a new connection, messages go again that were sent over the one that broke."""
        self.told_at, self.tell_again_at = now, now + next(self.pauses)
        self._unanswered_since = None
        self.outbox.resend_all(is_new_session=False)

    def said(self, seq: int, now: float) -> None:
        """A trajectory is under way. The learner answers each at the data port, whatever comes of
        it."""
        self.outbox.mark_sent(seq, now)
        if self._unanswered_since is None:
            self._unanswered_since = now

    def take(self, message: wire.Message, now: float) -> wire.Grant | wire.Reject | wire.Bye | None:
        """Take a message at the data port; return it if the shell has to do something about it."""
        if not wire.is_lost_on_them(message):
            self.last_heard, self._unanswered_since = now, None
        if isinstance(message, wire.Grant):
            # The learner says this here only to those whose Spec it has.
            self.is_joined |= message.session == self.session
            return self.take_grant(message)
        if isinstance(message, wire.Reject):
            # With any other refusal the learner has ended the session.
            self.has_session &= wire.is_lost_on_them(message)
            raise_if_final(message, is_joined=self.is_joined)
            return message
        if isinstance(message, wire.Bye) and message.session == self.session:
            self.has_session = False
            return message
        return None

    def take_grant(self, grant: wire.Grant) -> wire.Grant | wire.Reject | None:
        """The same of a grant, at whichever port; None if it is of another session."""
        if grant.session != self.session:
            return None
        if grant.settled > self.outbox.next_seq + MOST_SETTLED_AHEAD:
            return self._take_another_id()
        settled = self.outbox.on_grant(grant)
        if settled:
            self.pauses = new_pauses()
        self.settled += settled
        self._count(len(settled), grant.refused)
        self.named = max(self.named, Version(grant.epoch, grant.update))
        if self.version.epoch < self.named.epoch and self.version.update > self.named.update:
            # They came after the checkpoint from which the learner went on: it has none like them.
            self.version = NO_VERSION
        return grant

    def _count(self, num_settled: int, refused: Sequence[str]) -> None:
        """Verdicts are said once, at either port: some come behind what they are of, or never."""
        self._num_settled += num_settled
        self._num_bad.update(reason for reason in refused if reason in REFUSALS)
        if self._num_settled >= MESSAGES_LOOKED_AT:
            is_bad = self._num_bad.total() >= NEARLY_ALL * self._num_settled
            self.refused_for = max(self._num_bad, key=self._num_bad.__getitem__) if is_bad else ""
            self._num_settled, self._num_bad = 0, Counter()

    def _take_another_id(self) -> wire.Reject:
        """Somebody has spoken in our name, or is no learner of ours: nothing sent by the old id
        would be taken any more. Trajectories under way may have been taken, and are given up."""
        self.actor, self.has_session = os.urandom(len(self.actor)), False
        self.settled += self.outbox.give_up()
        text = "what was never sent is settled, as if another one had said hello in our name"
        return wire.Reject(wire.REJECT_CODES.index("hello_again"), text, 0.0)

    def overdue(
        self, now: float, pulls: Pulls, weights_s: float, data_s: float
    ) -> tuple[str, float] | None:
        """Which port owes an answer, and for how many seconds, once that is too long; "" for both.

        Each has a connection of its own, which something on the way may have lost or may hold,
        though the other one lives. Weights may take `weights_s` and trajectories `data_s`, and on
        a thin line they hold up everything else. Trajectories are sent once more before."""
        lease_s = self.welcome.lease_s
        patience_s = lease_s + (weights_s if pulls.is_asking else 0)
        # Without an answer to Spec it was lost, though heartbeats may go well.
        if not self.is_joined and now - self.told_at > patience_s:
            return "", patience_s
        if pulls.silent_s > patience_s:
            is_all_silent = pulls.has_heard and now - self.last_heard > patience_s
            return "" if is_all_silent else "weights", patience_s
        patience_s = 2 * lease_s + data_s
        since = self._unanswered_since
        return ("data", patience_s) if since is not None and now - since > patience_s else None

    def lose(self) -> list[Item]:
        """The session is over. In lockstep others go on, and what was acted for it is given up."""
        self.has_session = self.is_joined = False
        if self._lockstep_lag is None:
            return []
        self.version = NO_VERSION
        return self.outbox.give_up()

    def begin_anew(self) -> int:
        """Give up all that is held, and tell how many those are. Its seqs will never come, which
        the next hello says: the learner may have settled some of them, above a gap."""
        self.version = NO_VERSION
        return len(self.outbox.give_up())

    def bye(self, why: str = "") -> wire.Bye | None:
        """End the session, with what this actor died of; None if nobody would miss us."""
        if not self.has_session:
            return None
        self.has_session = False
        reason = wire.BYE_REASONS.index("leaving")
        return wire.Bye(self.session, reason, plain(why)[: wire.MAX_WHY])

    def put(self, item: Item) -> bool:
        """Take a finished trajectory; False if in lockstep its batch was of a session before."""
        if self._lockstep_lag is not None and self.version == NO_VERSION:
            return False
        self.outbox.put(item)
        return True

    def keeps_weights(self) -> bool:
        """At a trajectory boundary: whether lockstep wants the same weights once more."""
        is_kept = self.version != NO_VERSION and self._num_kept_left > 0
        self._num_kept_left -= is_kept
        return is_kept

    @property
    def must_wait(self) -> bool:
        """Whether the next trajectory needs newer weights."""
        is_first, is_lockstep = self.version == NO_VERSION, self._lockstep_lag is not None
        lag = self.named.update - self.version.update
        return is_first or is_lockstep or lag >= self._max_lag

    def act_with(self, version: Version) -> None:
        """In lockstep the first weights of a session serve `1 + lag` trajectories, others one."""
        if self.version == NO_VERSION:
            self._num_kept_left = self._lockstep_lag or 0
        self.version = version


def raise_if_final(refusal: wire.Reject, *, is_joined: bool) -> None:
    """A refusal that no second try will change ends this actor. Once it has joined, a message that
    the learner does not understand is only one message."""
    code = wire.code_of(refusal)
    if code == "not_allowed":
        raise NotAllowedError(f"the learner does not admit this actor: {refusal.text}")
    if code == "wrong_port":
        raise MismatchError("this is the weights port of a learner: dial its data port instead")
    if code in ("mismatch", "protocol") or (refusal.retry_after_s < 0 and not is_joined):
        raise MismatchError(f"the learner refuses this actor: {refusal.text}")


def read_answer(frame: wire.Frame) -> wire.Message:
    """Read what a learner says. Raises ProtocolError if it is no message, or makes no sense."""
    message = wire.unpack(frame)
    if isinstance(message, wire.Grant) and message.settled > message.granted:
        text = f"Grant.settled = {message.settled}, beyond granted = {message.granted}"
        raise ProtocolError("malformed_header", text)
    if isinstance(message, wire.Welcome) and message.heartbeat_s > message.lease_s:
        text = f"Welcome.heartbeat_s = {message.heartbeat_s:g}, over lease_s = {message.lease_s:g}"
        raise ProtocolError("malformed_header", text)
    if isinstance(message, wire.Welcome | wire.WeightsReply) and message.epoch == 0:
        text = f"{type(message).__name__}.epoch = 0, but starts count from 1"
        raise ProtocolError("malformed_header", text)
    if isinstance(message, wire.Reject):
        text = plain(message.text.strip()) or f"it does not say why ({wire.code_of(message)})"
        return message._replace(text=text)
    return message
