"""One session of one actor: what is known of it, and the credit that it is dealt. Pure.

Credits are counts, not places: the columns for which room is kept, over all sessions, never exceed
those that free slots can hold. docs/protocol.md tells for whom it is kept.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count

from impala_async.weights import NO_VERSION, Version
from impala_async.wire.messages import NO_SEQ, Grant

# Messages under way of each that an actor writes: one travels while the next is unrolled.
WINDOW = 2
# Seqs settled above a gap are memory, here and in checkpoints: so many more than a window.
MOST_ABOVE = 256
# Credit unused for so long is taken back while somebody waits for some, unless that is usual.
UNUSED_S = 1.5
# A message is late if it takes so many times the usual time: of all, or of the peer itself.
PATIENCE = 4.0
LEAST_USUAL_S = 0.01
LEAST_OWN_S = 0.0125
# The usual time is that of the fastest quarter of all: a few slow messages do not make it long.
STEP_UP = 1.2
# Messages after which somebody is believed to go on like that.
PROVEN = 16
# For whoever is not expected while one that gives way waits for its room; and how long it is,
# after one has let its moment pass, until others have theirs.
MOMENT_S = 0.1
PAUSE_S = 1.0
# A version that was lost, or came damaged, goes once more after so long.
PULL_AGAIN_S = 1.0
# Versions that a peer gets as it asks for them, since it has sent something.
FREE_PULLS = 3
# After these it gets one in such a share of the time that it usually takes for a message,
PULL_SHARE = 1 / 8
# and in so long if it never sent one, or is long overdue.
LONGEST_PULL_PAUSE_S = 10.0
# If nobody has called `take_back` for so long, the learner itself stood still.
STOOD_STILL_S = 1.0


class Watermark:
    """Settled seqs, in memory bounded by the actor's window."""

    def __init__(self, below: int = 0, above: Iterable[int] = ()) -> None:
        self.below = below
        self.above = sorted(set(above))
        """Settled seqs over a gap, in order."""
        self.raise_to(below)

    def num_unsettled_below(self, seq: int) -> int:
        """How many seqs under this one are still to come."""
        return max(0, seq - self.below) - bisect_left(self.above, seq)

    def is_settled(self, seq: int) -> bool:
        place = bisect_left(self.above, seq)
        return seq < self.below or self.above[place : place + 1] == [seq]

    def settle(self, seq: int) -> None:
        """Admit or refuse a seq for good. Idempotent."""
        if seq == self.below:
            self.raise_to(seq + 1)
        elif not self.is_settled(seq):
            insort(self.above, seq)

    def raise_to(self, seq: int) -> None:
        """The actor holds nothing below this seq any more, so none of it will ever come."""
        self.below = max(self.below, seq)
        num_closed = 0
        for settled in self.above:
            if settled > self.below:
                break
            self.below = max(self.below, settled + 1)
            num_closed += 1
        del self.above[:num_closed]


@dataclass(slots=True, eq=False)
class Peer:
    """One session of one actor. Without columns it has not said yet what it will send."""

    session: bytes
    actor: bytes
    number: int
    watermark: Watermark
    last_heard: float
    data_route: bytes = b""
    # Whether anything of it was settled in this learner, or in the one that was saved.
    has_settled: bool = False
    # Whether it is the number that its starter gave it.
    is_numbered: bool = False
    build: str = ""
    opened_at: float = 0.0
    weights_route: bytes = b""
    # That of the connection before, over which something may still come.
    left_route: bytes = b""
    columns: int = 0
    streams: int = 1
    # Whether it sends again what came when there was no room, once it is told that there is.
    gives_way: bool = False
    # Whether its former session ended because there was no room for what it sent.
    is_owed_room: bool = False
    # Whether anything of it was admitted, in this learner, or in the one that was saved.
    has_delivered: bool = False
    granted: int = 0
    # Below this seq, no room is kept for what it has not sent.
    lapsed_below: int = 0
    # How long it usually has credit before it uses it: a newcomer has to show it first.
    usual_s: float = math.inf
    # How many messages show that; and whether that time is short, and nothing is late now.
    num_used: int = 0
    is_brisk: bool = False
    dealt_at: int = 0
    used_at: float = 0.0
    # The seqs that came when there was no room for them.
    turned_away: set[int] = field(default_factory=set)
    # The seq that was turned away and is to come again; if room is kept; if the actor was told.
    called_back: int = NO_SEQ
    has_call_room: bool = False
    is_called: bool = False
    # Whether it came when it was called the last time.
    heeds_calls: bool = False
    # Whether it has credit, no room for it, and is slow: until it sends, no deal changes that.
    is_resting: bool = False
    verdicts: list[list[int]] = field(default_factory=list)
    # The last that it told: when, its timers; since when an environment hangs, as a line that is a
    # function of the seconds. And when the next such line may be told.
    beat_at: float = 0.0
    timers: dict[str, float] = field(default_factory=dict)
    hang: tuple[float, Callable[[float], str]] | None = None
    hang_due: float = 0.0
    # The newest weights that it was sent, when, and how many since it has sent something.
    pulled: Version = NO_VERSION
    pulled_at: float = -math.inf
    num_pulled: int = 0
    # In lockstep: the update of its first weights, once it is decided.
    begins_at: int | None = None
    # In lockstep: the seq that others wait for, and that it is to cut.
    cut: int = NO_SEQ

    @property
    def outstanding_messages(self) -> int:
        mark = self.watermark
        # At each deal all peers are asked, and where there are many most have none.
        return mark.num_unsettled_below(self.granted) if self.granted > mark.below else 0

    @property
    def kept_columns(self) -> int:
        """Columns for which room is kept; none is for lapsed messages, which may find some free."""
        below = self.lapsed_below
        num_lapsed = self.watermark.num_unsettled_below(below) if below else 0
        return (self.outstanding_messages - num_lapsed + self.has_call_room) * self.columns

    @property
    def is_waiting(self) -> bool:
        """Whether it would take room. It is called back for one message at a time; and a seq that
        never comes must not let the others run away."""
        if self.turned_away:
            return not self.has_call_room
        window = WINDOW * self.streams if self.is_brisk else 1
        reach = self.granted - self.watermark.below
        return self.outstanding_messages < window and reach < window + min(window, MOST_ABOVE)

    @property
    def is_newcomer(self) -> bool:
        return self.usual_s == math.inf

    @property
    def may_come_without_room(self) -> bool:
        """Whether it gives way and is known to be slow."""
        return self.gives_way and not self.is_newcomer and not self.is_brisk

    def may_pull(self, version: Version, now: float) -> bool:
        """Whether it gets a version now: one that asks again and again may throw away what it gets,
        and costs much for little."""
        pause_s = 0.0 if version > self.pulled else PULL_AGAIN_S
        if self.num_pulled >= FREE_PULLS:
            overdue_s = PATIENCE * max(self.usual_s, LEAST_OWN_S)
            has_credit = self.outstanding_messages > 0 and not self.turned_away
            is_overdue = has_credit and now - self.used_at > overdue_s
            share_s = math.inf if is_overdue else PULL_SHARE * self.usual_s
            pause_s = max(pause_s, min(share_s, LONGEST_PULL_PAUSE_S))
        return now >= self.pulled_at + pause_s

    def note_pull(self, version: Version, now: float) -> None:
        self.pulled, self.pulled_at = max(version, self.pulled), now
        self.num_pulled += 1

    def extend(self) -> None:
        """Allow one more message; seqs that are settled already do not count."""
        self.granted += 1
        while self.watermark.is_settled(self.granted - 1):
            self.granted += 1

    def lapse(self) -> None:
        """Room is kept for nothing that it has not sent."""
        self.lapsed_below = self.granted
        self.has_call_room = False

    def grant(self, version: Version) -> Grant:
        """Tell what this peer may do now, and what became of what it sent. Verdicts and a call are
        said once: nothing hangs on a verdict, and what is overdue comes again by itself."""
        verdicts, self.verdicts = self.verdicts, []
        again = self.called_back if self.is_called else NO_SEQ
        self.is_called = False
        settled = self.watermark.below
        cut = self.cut if self.cut >= settled else NO_SEQ
        return Grant(self.session, self.granted, settled, *version, verdicts, again, cut)


# Messages under way, whether it is last of those, when it got one, a number, and whose turn it is.
_Turn = tuple[int, bool, int, int, Peer]


@dataclass(slots=True)
class _Line:
    """Those who stand for room, the columns kept for them, those wanted for who has nothing yet."""

    turns: list[_Turn] = field(default_factory=list)
    kept: int = 0
    wanted: int = 0

    @property
    def is_short(self) -> bool:
        """Whether one waits that has sent something, and that would give way itself."""
        return any(p.gives_way and p.is_waiting and not p.is_newcomer for *_, p in self.turns)


class Credit:
    def __init__(self) -> None:
        self._num_dealt = 0
        # Those who got some in this deal.
        self._dealt: dict[bytes, Peer] = {}
        # From a credit to its use, over all that are admitted.
        self._usual_s = LEAST_USUAL_S
        self._next_moment_at = -math.inf
        self._num_first_turns = 0
        self._looked_at = -math.inf

    def deal(
        self, peers: Collection[Peer], free_columns: int, most_ahead: int, now: float
    ) -> list[Peer]:
        """Give out credit for free columns; those who got some."""
        self._dealt = {}
        expected, others = self._line_up(peers, most_ahead, now)
        # Columns set aside for others are waited for; those who were brisk may hold another batch.
        aside = max(0, min(most_ahead - others.kept, others.wanted))
        free_beside = free_columns - (0 if now < self._next_moment_at else aside)
        self._hand_out(expected, free_beside - others.kept, most_ahead, now)
        if others.turns:
            is_short = expected.is_short
            if (is_short or others.is_short) and self._lapse_idle(others, now):
                self._hand_out(expected, free_beside - others.kept, most_ahead, now)
            self._hand_out(others, free_columns - expected.kept, most_ahead, now)
            for *_, peer in others.turns if is_short else ():
                if peer.outstanding_messages == 0 and peer.may_come_without_room:
                    self._extend(peer, now)
                    peer.lapse()
        return list(self._dealt.values())

    def note_use(self, peer: Peer, seq: int, *, was_admitted: bool) -> None:
        # A message that came again was measured when it came first.
        if seq == peer.called_back:
            peer.heeds_calls, peer.has_call_room = True, False
        elif was_admitted:
            self._measure(peer)
        elif peer.is_newcomer:
            # As one that lets its moment pass: the longer it held its room, the longer others wait.
            held_s = min(peer.last_heard - peer.used_at, MOMENT_S) if peer.kept_columns else 0.0
            over_at = peer.last_heard + PAUSE_S / MOMENT_S * held_s
            self._next_moment_at = max(self._next_moment_at, over_at)
        else:
            # It has held credit for so long, but shows nothing by that.
            peer.usual_s = max(peer.usual_s, peer.last_heard - peer.used_at)
        if was_admitted:
            peer.num_used += 1
        else:
            # It takes room from others, and is no use to anybody.
            peer.num_used, peer.heeds_calls = 0, False
        peer.turned_away.discard(seq)
        peer.is_owed_room = peer.is_resting = False
        peer.used_at, peer.num_pulled = peer.last_heard, 0

    def turn_away(self, peer: Peer, seq: int) -> None:
        """There is no room for a message, just heard of: it waits for some, ahead of credit."""
        # Overdue, it comes again while it waits: then it is we who are slow.
        if seq != peer.called_back and seq not in peer.turned_away:
            self._measure(peer)
        peer.turned_away.add(seq)
        peer.is_resting, peer.num_pulled = False, 0

    def take_back(self, peers: Collection[Peer], now: float) -> list[Peer]:
        """Keep no room for what does not come, though others wait; whose credit it was."""
        stood_still, self._looked_at = now - self._looked_at > STOOD_STILL_S, now
        awake = [peer for peer in peers if stood_still or not peer.is_resting]
        waiting = [peer for peer in awake if peer.is_waiting]
        patience_s = max(UNUSED_S, PATIENCE * self._usual_s)
        found = []
        for peer in awake:
            if stood_still:
                # The silence was our own.
                peer.used_at, peer.is_resting = now, False
            unused_s = now - peer.used_at
            if unused_s > patience_s and peer.kept_columns and any(p is not peer for p in waiting):
                peer.lapse()
                peer.usual_s = max(peer.usual_s, unused_s)
                found.append(peer)
        return found

    def _line_up(self, peers: Collection[Peer], most: int, now: float) -> tuple[_Line, _Line]:
        expected, others = _Line(), _Line()
        num_new_columns = 0
        patience_s = PATIENCE * self._usual_s
        is_pause = now < self._next_moment_at
        # For the sake of those that do not give way nobody is put to the test.
        num_needed = PROVEN if any(peer.gives_way for peer in peers) else 1
        known: list[Peer] = []
        unknown: deque[Peer] = deque()
        for peer in peers:
            if not peer.is_resting:
                has_had_none = peer.usual_s == math.inf and not peer.dealt_at
                (unknown if has_had_none else known).append(peer)
        # The number keeps those in order that never had a turn. Thousands may join and never send.
        for number, peer in enumerate(chain(known, self._by_turns(unknown))):
            if number >= len(known):
                if num_new_columns >= most:
                    break  # no more than that is handed out
                num_new_columns += peer.columns
            under_way, usual_s = peer.outstanding_messages, peer.usual_s
            is_brisk = usual_s <= patience_s
            if under_way and is_brisk:
                overdue_s = min(PATIENCE * max(usual_s, LEAST_OWN_S), patience_s)
                is_brisk = now - peer.used_at <= overdue_s
            peer.is_brisk = is_brisk
            is_proven = is_brisk and peer.num_used >= num_needed
            if peer.has_call_room and now - peer.used_at > MOMENT_S:
                peer.heeds_calls = False
            is_called = peer.heeds_calls and (peer.has_call_room or peer.turned_away)
            line = expected if is_proven or is_called else others
            kept = peer.kept_columns if peer.lapsed_below else under_way * peer.columns
            peer.is_resting = bool(under_way) and not (kept or is_brisk or peer.turned_away)
            line.kept += kept
            first = -1 if peer.turned_away else under_way
            if line is others and first <= 0 and (first or not peer.may_come_without_room):
                line.wanted += peer.columns
            is_last = is_pause and peer.is_newcomer
            line.turns.append((first, is_last, peer.dealt_at, number, peer))
        return expected, others

    def _by_turns(self, newcomers: deque[Peer]) -> Iterator[Peer]:
        """The one that came last, then the one that waits longest: hundreds that never send
        anything may have come before, or come after."""
        for turn in count(self._num_first_turns):
            if not newcomers:
                return
            yield newcomers.popleft() if turn % 2 else newcomers.pop()

    def _hand_out(self, line: _Line, free_columns: int, most: int, now: float) -> None:
        """Give room in turns; those who still want some stay in line. The peer with the least under
        way comes first; among equals, the one that got none for longest. If it has nothing under
        way, all wait until there is room for it: none starves, however wide its messages are."""
        turns, waiting = line.turns, []
        room = min(free_columns, most) - line.kept
        if room > 0:
            heapq.heapify(turns)
        while turns and room > 0:
            under_way, is_last, _, number, peer = turns[0]
            if peer.columns <= room and peer.is_waiting:
                room -= peer.columns
                line.kept += peer.columns
                self._extend(peer, now)
                turn = peer.outstanding_messages, is_last, peer.dealt_at, number, peer
                heapq.heapreplace(turns, turn)
                continue
            if under_way <= 0 and peer.is_waiting:
                # The peers after this one must not take the room that it waits for.
                break
            waiting.append(heapq.heappop(turns))
        turns += waiting

    def _extend(self, peer: Peer, now: float) -> None:
        if peer.turned_away or peer.outstanding_messages == 0:
            peer.used_at = now
        if peer.turned_away:
            peer.called_back = min(peer.turned_away)
            peer.turned_away.remove(peer.called_back)
            peer.has_call_room = peer.is_called = True
        else:
            peer.extend()
        if not peer.dealt_at:
            self._num_first_turns += 1
        self._num_dealt += 1
        peer.dealt_at = self._num_dealt
        self._dealt[peer.session] = peer

    def _lapse_idle(self, others: _Line, now: float) -> bool:
        """Keep no room any longer for who has had a moment; whether that leaves some."""
        kept_before = others.kept
        for *_, peer in others.turns:
            if now - peer.used_at > MOMENT_S and not peer.is_owed_room and peer.kept_columns:
                others.kept -= peer.kept_columns
                if peer.is_newcomer:
                    self._next_moment_at = now + PAUSE_S
                peer.lapse()
        return others.kept < kept_before

    def _measure(self, peer: Peer) -> None:
        used_s = peer.last_heard - peer.used_at
        peer.usual_s = used_s if peer.is_newcomer else (peer.usual_s + used_s) / 2
        step = STEP_UP if used_s > self._usual_s else STEP_UP**-3
        self._usual_s = max(LEAST_USUAL_S, self._usual_s * step)
