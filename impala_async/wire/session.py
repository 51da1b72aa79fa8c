"""The learner's side of the protocol as a pure state machine: no socket, no clock, no thread.

It owns sessions, leases, credits, watermarks and the verdict on every trajectory. Times come in
as arguments and what to send comes out as values: a test can play any network to it.

Credits are counts, not places. The invariant: the columns granted and not yet settled, over all
sessions, never exceed the columns that free slots can hold.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from impala_async.errors import ProtocolError
from impala_async.weights import Lineage, Version
from impala_async.wire.messages import (
    MAX_TEXT_BYTES,
    MAX_VERDICTS,
    PROTOCOL,
    REJECT_CODES,
    VERDICTS,
    Data,
    Grant,
    Hello,
    Reject,
)
from impala_async.wire.watermark import Watermark

WINDOW = 2  # messages under way of each that an actor writes: one travels, one is unrolled
MAX_SESSIONS = 10_000
FULL_RETRY_S = 2.0
# Watermarks of actors that have not been heard of for so long are forgotten.
WATERMARK_LIFE_S = 3600.0


def reject(code: str, text: str, retry_after_s: float = -1.0) -> Reject:
    """A refusal; without a retry it is for ever. The text is made to fit: it may quote a peer."""
    fitting = text.encode(errors="replace")[:MAX_TEXT_BYTES].decode(errors="ignore")
    return Reject(REJECT_CODES.index(code), fitting, retry_after_s)


@dataclass(slots=True, eq=False)
class Peer:
    """One session of one actor."""

    session: bytes
    actor: bytes
    rank: int
    watermark: Watermark
    last_heard: float
    data_route: bytes
    weights_route: bytes = b""
    columns: int = 0
    streams: int = 1
    granted: int = 0
    dealt_at: int = 0
    has_sent: bool = False
    idle_since: float = 0.0
    verdicts: list[list[int]] = field(default_factory=list)
    # In lockstep: the update of its first weights, once it is decided.
    begins_at: int | None = None

    @property
    def outstanding_messages(self) -> int:
        return self.watermark.num_unsettled_below(self.granted)

    @property
    def window(self) -> int:
        """Messages that may be under way at once."""
        return WINDOW * self.streams

    @property
    def outstanding_columns(self) -> int:
        return self.outstanding_messages * self.columns

    @property
    def may_have_more(self) -> bool:
        """Whether its window has room. A seq that never comes must not let the others run away:
        what is settled above a gap is memory."""
        reach = self.granted - self.watermark.below
        return self.outstanding_messages < self.window and reach < 2 * self.window

    def extend(self) -> None:
        """Allow one more message; seqs that are settled already do not count."""
        self.granted += 1
        while self.watermark.is_settled(self.granted - 1):
            self.granted += 1

    def grant(self, version: Version) -> Grant:
        """What this peer may do now, and what became of what it sent.

        Verdicts are said once and lost with a grant that does not arrive: they are for people.
        What the actor acts on, `settled`, is said again in every grant.
        """
        verdicts, self.verdicts = self.verdicts, []
        return Grant(self.session, self.granted, self.watermark.below, *version, verdicts)


@dataclass(slots=True)
class _KnownActor:
    """What outlives a session."""

    rank: int
    watermark: Watermark
    last_heard: float
    has_joined: bool = False
    is_numbered: bool = False
    longest_idle_s: float = 0.0


class SessionTable:
    """All sessions of one learner."""

    def __init__(
        self,
        *,
        run_id: bytes,
        lineage: Lineage,
        lease_s: float,
        max_lag: int,
        new_id: Callable[[], bytes],
        num_ranks: int | None = None,
    ) -> None:
        self.run_id = run_id
        self.lineage = lineage
        self._max_lag = max_lag
        self._lease_s = lease_s
        self._new_id = new_id
        self._num_ranks = num_ranks
        self._peers: dict[bytes, Peer] = {}
        self._by_actor: dict[bytes, Peer] = {}
        self._known: dict[bytes, _KnownActor] = {}
        self._next_rank = 0
        self._num_dealt = 0
        self._last_expiry: float | None = None
        self._all_had_credit_at = 0.0

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(tuple(self._peers.values()))

    @property
    def outstanding_columns(self) -> int:
        """Columns that may still arrive under the credits given."""
        return sum(peer.outstanding_columns for peer in self._peers.values())

    def hello(self, hello: Hello, route: bytes, now: float) -> Peer | Reject:
        """Open a session; the actor's former one, if any, ends."""
        if hello.protocol != PROTOCOL:
            return reject(
                "protocol",
                f"protocol: this learner speaks version {PROTOCOL}, the actor {hello.protocol}: "
                "install the same release of impala-async on both sides",
            )
        limit = self._num_ranks or MAX_SESSIONS
        if len(self._peers) >= limit and hello.actor not in self._by_actor:
            return reject("full", f"this learner already has its {limit} actors", FULL_RETRY_S)
        if (former := self._by_actor.get(hello.actor)) is not None:
            if former.columns == 0:
                # The same hello again, because our answer was slow: one session is enough.
                former.data_route, former.last_heard = route, now
                return former
            self.end(former)
        known = self._known.get(hello.actor)
        if known is None:
            rank = self._new_rank(hello.number)
            known = _KnownActor(rank, Watermark(), now, is_numbered=rank == hello.number)
            self._known[hello.actor] = known
        if self._num_ranks is not None:
            known.rank = self._free_rank(known.rank, self._num_ranks)
        if hello.run_id == self.run_id:
            known.watermark.raise_to(hello.lowest_unsettled)
        return self._open(hello.actor, known, route, now)

    def peer_of(self, session: bytes) -> Peer | None:
        return self._peers.get(session)

    def find(self, session: bytes, now: float) -> Peer | None:
        """The peer of a live session; being heard renews its lease."""
        peer = self._peers.get(session)
        if peer is not None:
            peer.last_heard = now
        return peer

    def reserve(self, peer: Peer, data: Data, version_now: Version) -> str | None:
        """May this trajectory come in? None, or the reason why it is refused for good.

        Raises:
            ProtocolError: the peer had no credit for it; nothing is settled.
        """
        if peer.watermark.is_settled(data.seq):
            return "duplicate"
        if data.seq >= peer.granted or data.columns > peer.columns:
            raise ProtocolError("not_allowed_now", f"seq {data.seq} of {data.columns} columns")
        version = Version(data.epoch, data.update)
        if version > version_now or version.epoch < 1:
            return "invalid"
        if not self.lineage.is_ancestor(version):
            return "dead_branch"
        if version_now.update - version.update > self._max_lag:
            return "stale"
        return None

    def settle(self, peer: Peer, seq: int, verdict: str | None) -> None:
        """A seq is admitted (None) or refused for good; its credit comes back."""
        if verdict is not None and len(peer.verdicts) < MAX_VERDICTS:
            peer.verdicts.append([seq, VERDICTS.index(verdict)])
        peer.has_sent = True
        peer.watermark.settle(seq)
        peer.granted = max(peer.granted, peer.watermark.below)

    def deal(self, free_columns: int) -> list[Peer]:
        """Give out credit for free columns; those who got some.

        Whoever has the least under way comes first, and of those whoever got none for longest.
        One with nothing under way is waited for until what it needs is left: nobody starves,
        however few columns there are and however many of them its messages have.
        """
        # The number keeps those in order that never had a turn.
        turns = [
            (peer.outstanding_messages, peer.dealt_at, number, peer)
            for number, peer in enumerate(self._peers.values())
            if peer.columns
        ]
        left = free_columns - sum(under_way * peer.columns for under_way, _, _, peer in turns)
        if left <= 0:
            return []
        heapq.heapify(turns)
        dealt: dict[bytes, Peer] = {}
        while turns and left > 0:
            under_way, _, number, peer = turns[0]
            if peer.columns <= left and peer.may_have_more:
                left -= peer.columns
                peer.extend()
                self._num_dealt += 1
                peer.dealt_at = self._num_dealt
                dealt[peer.session] = peer
                heapq.heapreplace(turns, (under_way + 1, peer.dealt_at, number, peer))
            elif under_way == 0:
                break
            else:
                heapq.heappop(turns)
        return list(dealt.values())

    def silent(self, now: float, longer_than_s: float) -> list[Peer]:
        """Peers that have not been heard of for a while, though their lease still runs."""
        return [p for p in self._peers.values() if now - p.last_heard > longer_than_s]

    def hoarding(self, now: float, longer_than_s: float) -> list[Peer]:
        """Peers whose credit has lain unused for a while, though others have none.

        An environment that hangs must not keep all columns to itself. A slow one is given twice
        the longest time that its actor ever took, too. Asked regularly.
        """
        if all(peer.outstanding_messages > 0 for peer in self._peers.values() if peer.columns):
            self._all_had_credit_at = now
        wanted_s = now - self._all_had_credit_at
        found = []
        for peer in self._peers.values():
            known = self._known[peer.actor]
            idle_s = now - peer.idle_since
            if peer.has_sent or peer.outstanding_messages == 0:
                # Only while somebody wanted it: a sleep that hurt nobody is no habit.
                known.longest_idle_s = max(known.longest_idle_s, min(idle_s, wanted_s))
                peer.has_sent, peer.idle_since = False, now
            elif min(idle_s, wanted_s) > longer_than_s + 2 * known.longest_idle_s:
                # Should it come back, it is only slow, and is waited for longer then.
                known.longest_idle_s = idle_s
                found.append(peer)
        return found

    def expire(self, now: float) -> list[Peer]:
        """End the sessions whose lease is over.

        If this learner itself stood still (a suspended process, a long stall), the silence was
        its own: everybody gets a fresh lease.
        """
        stood_still = self._last_expiry is not None and now - self._last_expiry > self._lease_s / 2
        self._last_expiry = now
        if stood_still:
            for peer in self._peers.values():
                peer.last_heard = peer.idle_since = now
            return []
        expired = self.silent(now, self._lease_s)
        for peer in expired:
            self.end(peer)
        live = self._by_actor
        self._known = {
            actor: known
            for actor, known in self._known.items()
            if actor in live or now - known.last_heard < WATERMARK_LIFE_S
        }
        return expired

    def end(self, peer: Peer) -> None:
        """End a session: its credit is free again; its watermark stays. Idempotent."""
        if self._peers.pop(peer.session, None) is None:
            return
        del self._by_actor[peer.actor]
        known = self._known[peer.actor]
        known.last_heard = peer.last_heard
        known.has_joined |= peer.columns > 0
        if not known.has_joined:
            # It never sent anything: a stream of strangers must not fill the memory.
            del self._known[peer.actor]

    def watermarks(self) -> dict[str, list[int]]:
        """For a checkpoint: per actor its rank, its mark, and the seqs settled above it."""
        return {
            actor.hex(): [known.rank, known.watermark.below, *known.watermark.above]
            for actor, known in self._known.items()
        }

    def restore_watermarks(self, saved: dict[str, list[int]], now: float) -> None:
        """Continue from a checkpoint: what it had settled is never taken in again."""
        for actor, (rank, below, *above) in saved.items():
            self._known[bytes.fromhex(actor)] = _KnownActor(
                rank, Watermark(below, tuple(above)), now, has_joined=True
            )
            self._next_rank = max(self._next_rank, rank + 1)

    def _new_rank(self, number: int) -> int:
        """The number that its starter gave it, as in its former life, if nobody else has it."""
        others = {peer.rank for peer in self if not self._known[peer.actor].is_numbered}
        rank = number if number >= 0 and number not in others else self._next_rank
        self._next_rank = max(self._next_rank, rank + 1)
        return rank

    def _free_rank(self, former: int, num_ranks: int) -> int:
        """A place among so many: the former one if nobody has it, else the first that is free."""
        taken = {peer.rank for peer in self._peers.values()}
        free = [rank for rank in range(num_ranks) if rank not in taken]
        return former if former in free else free[0]

    def _open(self, actor: bytes, known: _KnownActor, route: bytes, now: float) -> Peer:
        peer = Peer(
            session=self._new_id(),
            actor=actor,
            rank=known.rank,
            watermark=known.watermark,
            last_heard=now,
            data_route=route,
            granted=known.watermark.below,
            idle_since=now,
        )
        self._peers[peer.session] = peer
        self._by_actor[actor] = peer
        return peer
