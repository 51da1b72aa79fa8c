"""The learner's side of the protocol as a pure state machine: sessions, numbers, leases, watermarks
and the verdict on every trajectory; who may send is decided in peer.py."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import chain, count

from impala_async.errors import ProtocolError, plain
from impala_async.weights import Lineage, Version
from impala_async.wire import messages as wire
from impala_async.wire.peer import Credit, Peer, Watermark

MAX_SESSIONS = 10_000
# At most so many sessions have said no Spec yet.
MAX_STRANGERS = 1000
MAX_OVER_ONE_CONNECTION = 16
FULL_RETRY_S = 2.0
LOOK_EVERY_S = 0.25
# One that was heard this lately is at work. One that is started again in its place imports torch
# before it says hello, which takes longer.
AT_WORK_S = 0.5
# Actors that are gone are remembered for so long, and so many of them with so many seqs that are
# settled above their marks: the last ones. A checkpoint has as many of all actors.
WATERMARK_LIFE_S = 3600.0
MAX_GONE = 10_000
MOST_ABOVE_ALL = 100_000


def reject(code: str, text: str, retry_after_s: float = -1.0) -> wire.Reject:
    """A refusal; without a retry it is for ever. The text is made to fit: it may quote a peer."""
    fitting = plain(text).encode()[: wire.MAX_TEXT_BYTES].decode(errors="ignore")
    return wire.Reject(wire.REJECT_CODES.index(code), fitting, retry_after_s)


@dataclass(eq=False, kw_only=True)
class SessionTable:
    run_id: bytes
    lineage: Lineage
    lease_s: float
    max_lag: int
    new_id: Callable[[], bytes]
    num_actors: int | None = None

    def __post_init__(self) -> None:
        # Those who joined. Strangers are apart, oldest first: what is done often passes them by.
        self._peers: dict[bytes, Peer] = {}
        self._strangers: dict[bytes, Peer] = {}
        # The sessions that were asked for over each connection.
        self._asked: dict[bytes, list[bytes]] = {}
        self.num_opened = self.num_given_way = 0
        # The session of each actor, or its last; those that are gone in the order of their going.
        self._known: dict[bytes, Peer] = {}
        # How many have each number.
        self._numbers = Counter[int]()
        # Above all those of who has ever sent anything.
        self._beyond = 0
        # Where all places are taken: when one that is of no use is looked for again.
        self._look_at = 0.0
        self._credit = Credit()
        self._last_expiry: float | None = None

    def __len__(self) -> int:
        return len(self._peers) + len(self._strangers)

    def __iter__(self) -> Iterator[Peer]:
        return iter((*self._peers.values(), *self._strangers.values()))

    @property
    def joined(self) -> Collection[Peer]:
        return self._peers.values()

    @property
    def outstanding_columns(self) -> int:
        """Columns for which room is kept, as they may still arrive."""
        return sum(peer.kept_columns for peer in self._peers.values() if not peer.is_resting)

    def hello(self, hello: wire.Hello, route: bytes, now: float) -> Peer | wire.Reject:
        if hello.protocol != wire.PROTOCOL:
            return reject(
                "protocol",
                f"protocol: this learner speaks version {wire.PROTOCOL}, the actor "
                f"{hello.protocol}: install the same release of impala-async on both sides",
            )
        known = self._known.get(hello.actor)
        limit = self.num_actors or MAX_SESSIONS
        is_full = not self.is_here(hello.actor) and len(self._peers) >= limit
        if is_full and not self._end_one_of_no_use(now):
            return reject("full", f"this learner already has its {limit} actors", FULL_RETRY_S)
        if known is not None and known.session in self._strangers:
            # The same hello again, because our answer was slow: one session is enough. Or it has
            # given up what it held, as its settings are others.
            known.data_route, known.last_heard = route, now
            self._take_mark(known, hello)
            return known
        if known is not None:
            self.end(known)
            # A checkpoint does not say whether it had it from its starter.
            known.is_numbered |= known.number == hello.number
        self._make_way(route)
        if known is None:
            number = self._new_number(hello.number, now)
            is_wanted = number == hello.number
            known = Peer(b"", hello.actor, number, Watermark(), now, is_numbered=is_wanted)
        self._take_mark(known, hello)
        return self._open(hello, known, route, now)

    def join(self, peer: Peer, columns: int, streams: int, *, gives_way: bool = False) -> bool:
        """Agree on what a peer sends: from now on it has its number, and may have credit. False if
        its place is another's by now: it must say hello again."""
        others = (other.number for other in self._peers.values() if other is not peer)
        if self.num_actors is not None and peer.number in others:
            return False
        peer.columns, peer.streams, peer.gives_way = columns, streams, gives_way
        if self._strangers.pop(peer.session, None) is not None:
            self._peers[peer.session] = peer
        return True

    def is_here(self, actor: bytes) -> bool:
        known = self._known.get(actor)
        return known is not None and self.peer_of(known.session) is not None

    def peer_of(self, session: bytes) -> Peer | None:
        return self._peers.get(session) or self._strangers.get(session)

    def find(self, session: bytes, now: float) -> Peer | None:
        """The peer of a live session; being heard renews its lease."""
        peer = self.peer_of(session)
        if peer is not None:
            peer.last_heard = now
        return peer

    def reserve(self, peer: Peer, data: wire.Data, version_now: Version) -> str | None:
        """May this trajectory come in? None, or the reason why it is refused for good. Without a
        credit for it that is a ProtocolError, and nothing is settled."""
        if peer.watermark.is_settled(data.seq):
            return "duplicate"
        if data.seq >= peer.granted or data.columns > peer.columns:
            raise ProtocolError("not_allowed_now", f"seq {data.seq} of {data.columns} columns")
        version = Version(data.epoch, data.update)
        if version > version_now or version.epoch < 1:
            return "invalid"
        if not self.lineage.is_ancestor(version):
            return "dead_branch"
        if version_now.update - version.update > self.max_lag:
            return "stale"
        return None

    def settle(self, peer: Peer, seq: int, verdict: str | None) -> None:
        """A seq is admitted (None) or refused for good; its credit comes back."""
        if verdict is not None and len(peer.verdicts) < wire.MAX_VERDICTS:
            peer.verdicts.append([seq, wire.VERDICTS.index(verdict)])
        self._credit.note_use(peer, seq, was_admitted=verdict is None)
        peer.watermark.settle(seq)
        peer.has_settled, self._beyond = True, max(self._beyond, peer.number + 1)
        peer.has_delivered |= verdict is None
        peer.granted = max(peer.granted, peer.watermark.below)

    def deal(self, free_columns: int, most_ahead: int | None = None, *, now: float) -> list[Peer]:
        """Give out credit for free columns; returns those who got some. Peers that are expected
        soon have no more than `most_ahead` columns under way."""
        ahead = free_columns if most_ahead is None else most_ahead
        return self._credit.deal(self._peers.values(), free_columns, ahead, now)

    def has_room(self, peer: Peer, data: wire.Data, free_columns: int) -> bool:
        """Whether a trajectory that is allowed can be taken in. If not, it waits for room, ahead
        of all credit, and its actor is told when to send it again: then there will be some."""
        is_called = data.seq == peer.called_back
        if data.seq >= peer.lapsed_below or (is_called and peer.has_call_room):
            return True
        short = data.columns - (free_columns - self.outstanding_columns)
        # It came on a slow line, its room had lapsed: that of who has had some longest is its own.
        for other in sorted(self._peers.values(), key=lambda p: p.used_at) if is_called else ():
            if short > 0 and other.kept_columns:
                short -= other.kept_columns
                other.lapse()
        if short > 0 and peer.gives_way:
            self._credit.turn_away(peer, data.seq)
        elif short > 0:
            # It sends this again in a new session, where its room waits for a slow line.
            peer.turned_away.add(data.seq)
            self.end(peer)
        return short <= 0

    def take_back(self, now: float) -> list[Peer]:
        """Those who have left their credit unused, though others wait. Asked regularly."""
        return self._credit.take_back(self._peers.values(), now)

    def expire(self, now: float) -> list[Peer]:
        """End the sessions whose lease is over. If we stood still, everybody gets a fresh one."""
        stood_still = self._last_expiry is not None and now - self._last_expiry > self.lease_s / 2
        self._last_expiry = now
        if stood_still:
            for peer in self:
                peer.last_heard = peer.used_at = now
            return []
        expired = [peer for peer in self if now - peer.last_heard > self.lease_s]
        for peer in expired:
            self.end(peer)
        asked = self._asked.items()
        self._asked = {route: each for route, each in asked if any(map(self.peer_of, each))}
        gone = [peer for peer in self._known.values() if self.peer_of(peer.session) is None]
        num_above = 0
        for number, peer in enumerate(reversed(gone)):
            num_above += len(peer.watermark.above)
            are_many = number >= MAX_GONE or num_above > MOST_ABOVE_ALL
            if are_many or now - peer.last_heard >= WATERMARK_LIFE_S:
                self._forget(peer.actor)
        return expired

    def end(self, peer: Peer) -> None:
        """End a session: its credit is free again; its watermark stays. Idempotent."""
        if self._peers.pop(peer.session, None) or self._strangers.pop(peer.session, None):
            self._forget(peer.actor)
            # A stream of those that never send anything must not fill the memory.
            if peer.has_settled or peer.turned_away:
                self._remember(peer)

    def watermarks(self) -> dict[str, list[int]]:
        """For a checkpoint, by actor: its number, its mark, and the seqs settled above it. Where
        all are too many to be read again, actors that have the most lose theirs."""
        num_above, fitting = 0, set[bytes]()
        for peer in sorted(self._known.values(), key=lambda each: len(each.watermark.above)):
            num_above += len(peer.watermark.above)
            if num_above <= MOST_ABOVE_ALL:
                fitting.add(peer.actor)
        return {
            actor.hex(): [
                *(peer.number, peer.watermark.below),
                *(peer.watermark.above if actor in fitting else ()),
            ]
            for actor, peer in self._known.items()
        }

    def restore_watermarks(self, saved: dict[str, list[int]], now: float) -> None:
        """Continue from a checkpoint: what it had settled is never taken in again."""
        for actor, (number, below, *above) in saved.items():
            mark = Watermark(below, above)
            known = Peer(b"", bytes.fromhex(actor), number, mark, now)
            known.has_settled = known.has_delivered = True
            self._remember(known)

    def _make_way(self, route: bytes) -> None:
        """A connection is one actor's: of those that come over it, and of those who have said no
        Spec, there are so many at most. The oldest goes: an actor that it was comes again."""
        asked = [session for session in self._asked.get(route, ()) if self.peer_of(session)]
        self._asked[route] = asked
        former = None
        if len(asked) >= MAX_OVER_ONE_CONNECTION:
            former = self.peer_of(asked.pop(0))
        elif len(self._strangers) >= MAX_STRANGERS:
            former = next(iter(self._strangers.values()))
        if former is not None:
            self.end(former)
            self.num_given_way += 1

    def _end_one_of_no_use(self, now: float) -> bool:
        """Where all places are taken: that of who has had one for a while and sent nothing that
        was any use. In lockstep each is waited for."""
        if self.num_actors is not None or now < self._look_at:
            return False
        at_most = now - FULL_RETRY_S
        idle = (each for each in self._peers.values() if not each.has_delivered)
        former = next((each for each in idle if each.opened_at <= at_most), None)
        if former is None:
            # To look at ten thousand takes half a millisecond.
            self._look_at = now + LOOK_EVERY_S
            return False
        self.end(former)
        self.num_given_way += 1
        return True

    def _remember(self, peer: Peer) -> None:
        self._known[peer.actor] = peer
        self._numbers[peer.number] += 1

    def _forget(self, actor: bytes) -> None:
        if (known := self._known.pop(actor, None)) is not None:
            self._numbers[known.number] -= 1
            if not self._numbers[known.number]:
                del self._numbers[known.number]

    def _take_mark(self, peer: Peer, hello: wire.Hello) -> None:
        if hello.run_id == self.run_id:
            peer.watermark.raise_to(hello.lowest_unsettled)
            peer.granted = max(peer.granted, peer.watermark.below)

    def _new_number(self, wanted: int, now: float) -> int:
        """The number that its starter gave it, if there is one, and nobody uses it who was started
        by itself, or has used it in this start. Another one who has it and was not heard of late
        may be the former life of this one, whose lease is not over."""

        def is_at_work(peer: Peer) -> bool:
            return not peer.is_numbered or (peer.columns > 0 and now - peer.last_heard < AT_WORK_S)

        # One that a checkpoint remembers, and that has not come yet, had other seeds.
        worked = (each for each in self._known.values() if each.has_settled and each.data_route)
        unnumbered = (each for each in worked if not each.is_numbered)
        others = chain(filter(is_at_work, self), unnumbered)
        if wanted >= 0 and all(each.number != wanted for each in others):
            return wanted
        # At a thousand hellos a second nobody can look at all numbers. One that was at work may be
        # forgotten: whoever had its number would step the same environments.
        first = max(len(self._numbers), self._beyond)
        return next(each for each in count(first) if each not in self._numbers)

    def _open(self, hello: wire.Hello, known: Peer, route: bytes, now: float) -> Peer:
        number = known.number
        if self.num_actors is not None:
            # The place of nobody who joined that the fewest hope for; among those the former one.
            taken = {peer.number for peer in self.joined}
            hopes = Counter(peer.number for peer in self)
            free = [each for each in range(self.num_actors) if each not in taken]
            number = min(free, key=lambda each: (hopes[each], each != known.number, each))
        former = known.watermark, now, route, known.has_settled, known.is_numbered, hello.build
        peer = Peer(self.new_id(), hello.actor, number, *former, opened_at=now, used_at=now)
        peer.has_delivered = known.has_delivered
        peer.is_owed_room = bool(known.turned_away) and not known.gives_way
        peer.granted = known.watermark.below
        # A hello over the one before makes no weights cheaper, but those that were lost with it.
        peer.pulled_at, peer.num_pulled = known.pulled_at, known.num_pulled
        self._forget(hello.actor)
        self._remember(peer)
        self.num_opened += 1
        self._strangers[peer.session] = peer
        self._asked[route].append(peer.session)
        return peer
