"""Who may send how much, and for whose messages room is kept. Pure.

Credits are counts, not places. The invariant: the columns for which room is kept, over all
sessions, never exceed the columns that free slots can hold.

Room is kept for what is expected soon: for the brisk, who use their credit about as fast as
others do, and for whoever came when there was no room, and comes when it is called. Where these
leave none, the others cost them little: newcomers have a moment now and then to show what they do,
and one that is known to be slow has credit without room, and looks for some when it comes. All this
is among actors that give way themselves: for the sake of one that does not, nobody is hurried.
"""

import heapq
import math
from collections.abc import Collection
from dataclasses import dataclass, field

from impala_async.wire.peer import Peer

# Credit that has lain unused for so long is taken back while somebody waits for some, unless that
# is usual.
UNUSED_S = 1.5
# A message is late if it takes so many times the usual time: of all, or of the peer itself.
PATIENCE = 4.0
LEAST_USUAL_S = 0.0625
LEAST_OWN_S = 0.0125
# The usual time is that of the fastest quarter of all: a few messages that take an hour do not
# make it long.
STEP_UP = 1.2
# Messages after which somebody is believed to go on like that.
PROVEN = 16
# For whoever is not expected while one that gives way waits for its room; and how long it is,
# after one has let its moment pass, until others have theirs.
MOMENT_S = 0.1
PAUSE_S = 1.0
# If nobody has called `take_back` for so long, the learner itself stood still.
STOOD_STILL_S = 1.0
# Messages under way, whether it is last of those, when it got one, a number, and whose turn it is.
_Turn = tuple[int, bool, int, int, Peer]


@dataclass(slots=True)
class _Line:
    """Those who stand for room, and the columns that are kept for them."""

    turns: list[_Turn] = field(default_factory=list)
    kept: int = 0

    @property
    def is_short(self) -> bool:
        """Whether one waits that has sent something, and that would give way itself."""
        return any(p.gives_way and p.is_waiting and not p.is_newcomer for *_, p in self.turns)


class Credit:
    """Deals it to the peers of a table, in turns."""

    def __init__(self) -> None:
        self._num_dealt = 0
        # All who stood for room at the last deal.
        self._lines = _Line(), _Line()
        # From a credit to its use, over all that are admitted.
        self._usual_s = LEAST_USUAL_S
        self._next_moment_at = -math.inf
        self._looked_at = -math.inf

    def deal(
        self, peers: Collection[Peer], free_columns: int, most_ahead: int, now: float
    ) -> list[Peer]:
        """Give out credit for free columns; those who got some."""
        expected, others = self._lines = self._line_up(peers, now)
        dealt: dict[bytes, Peer] = {}
        if not others.turns:
            self._hand_out(expected, free_columns, most_ahead, now, dealt)
            return list(dealt.values())
        aside = self._set_aside(others, most_ahead, now)
        self._hand_out(expected, free_columns - others.kept - aside, most_ahead, now, dealt)
        is_short = expected.is_short
        if (is_short or others.is_short) and self._lapse_idle(others, now):
            self._hand_out(expected, free_columns - others.kept - aside, most_ahead, now, dealt)
        self._hand_out(others, free_columns - expected.kept, most_ahead, now, dealt)
        if is_short:
            for *_, peer in others.turns:
                if peer.outstanding_messages == 0 and peer.may_come_without_room:
                    self._extend(peer, now)
                    peer.lapse()
                    dealt[peer.session] = peer
        return list(dealt.values())

    def note_use(self, peer: Peer, seq: int, *, was_admitted: bool) -> None:
        """A message of a peer, just heard of, is settled."""
        # A message that came again was measured when it came first.
        if seq == peer.called_back:
            peer.heeds_calls = True
        elif was_admitted:
            self._measure(peer)
        peer.note_settled(seq)
        peer.used_at = peer.last_heard

    def turn_away(self, peer: Peer, seq: int) -> None:
        """There is no room for a message, just heard of: it waits for some, ahead of credit."""
        # Overdue, it comes again while it waits: then it is we who are slow.
        if seq != peer.called_back and seq not in peer.turned_away:
            self._measure(peer)
        peer.turned_away.add(seq)

    def make_room(self, peers: Collection[Peer], columns: int) -> int:
        """Keep none for those who have had theirs for longest; how much that makes."""
        made = 0
        for peer in sorted(peers, key=lambda peer: peer.used_at):
            if made < columns and peer.kept_columns:
                made += peer.kept_columns
                peer.lapse()
        return made

    def take_back(self, peers: Collection[Peer], now: float) -> list[Peer]:
        """Keep no room any longer for what does not come, though others wait; whose credit it was.

        A trajectory that is still to come is admitted if there is room for it then.
        """
        stood_still, self._looked_at = now - self._looked_at > STOOD_STILL_S, now
        turns = [turn for line in self._lines for turn in line.turns]
        waiting = [peer for *_, peer in turns if peer.is_waiting]
        patience_s = max(UNUSED_S, PATIENCE * self._usual_s)
        found = []
        for peer in peers:
            if stood_still:
                # The silence was our own.
                peer.used_at = now
            unused_s = now - peer.used_at
            if unused_s <= patience_s or peer.kept_columns == 0:
                continue
            if any(other is not peer for other in waiting):
                peer.lapse()
                peer.usual_s = max(peer.usual_s, unused_s)
                found.append(peer)
        return found

    def _line_up(self, peers: Collection[Peer], now: float) -> tuple[_Line, _Line]:
        """Those whose message is expected soon, and the others."""
        expected, others = _Line(), _Line()
        patience_s = PATIENCE * self._usual_s
        is_pause = now < self._next_moment_at
        # For the sake of those that do not give way nobody is put to the test.
        num_needed = PROVEN if any(peer.gives_way for peer in peers) else 1
        # The number keeps those in order that never had a turn.
        for number, peer in enumerate(peers):
            if not (columns := peer.columns):
                continue
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
            line.kept += (under_way - peer.num_lapsed if peer.lapsed else under_way) * columns
            first = -1 if peer.turned_away else under_way
            is_last = is_pause and peer.is_newcomer
            line.turns.append((first, is_last, peer.dealt_at, number, peer))
        return expected, others

    def _set_aside(self, others: _Line, most: int, now: float) -> int:
        """Columns for those who have nothing yet, who are waited for until these are free."""
        if now < self._next_moment_at:
            return 0
        empty = (peer for under_way, *_, peer in others.turns if under_way <= 0)
        columns = sum(p.columns for p in empty if p.turned_away or not p.may_come_without_room)
        # Those who were brisk until now may hold another batch.
        return max(0, min(most - others.kept, columns))

    def _hand_out(
        self, line: _Line, free_columns: int, most: int, now: float, dealt: dict[bytes, Peer]
    ) -> None:
        """Give room in turns; those who still want some stay in line.

        Whoever has the least under way comes first, and of those whoever got none for longest.
        One with nothing under way is waited for until what it needs is left: nobody starves,
        however few columns there are and however many of them its messages have.
        """
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
                dealt[peer.session] = peer
                turn = peer.outstanding_messages, is_last, peer.dealt_at, number, peer
                heapq.heapreplace(turns, turn)
                continue
            if under_way <= 0 and peer.is_waiting:
                # The peers after this one must not take the room that it waits for.
                break
            waiting.append(heapq.heappop(turns))
        turns += waiting

    def _extend(self, peer: Peer, now: float) -> None:
        if peer.turned_away:
            peer.call_back()
            peer.used_at = now
        else:
            if peer.outstanding_messages == 0:
                peer.used_at = now
            peer.extend()
        self._num_dealt += 1
        peer.dealt_at = self._num_dealt

    def _lapse_idle(self, others: _Line, now: float) -> bool:
        """Keep no room any longer for who has had a moment; whether that leaves some."""
        kept_before = others.kept
        for *_, peer in others.turns:
            is_idle = now - peer.used_at > MOMENT_S and not peer.is_owed_room
            if is_idle and (columns := peer.kept_columns):
                peer.lapse()
                others.kept -= columns
                self._next_moment_at = now + PAUSE_S
        return others.kept < kept_before

    def _measure(self, peer: Peer) -> None:
        used_s = peer.last_heard - peer.used_at
        peer.usual_s = used_s if peer.is_newcomer else (peer.usual_s + used_s) / 2
        peer.num_used += 1
        step = STEP_UP if used_s > self._usual_s else STEP_UP**-3
        self._usual_s = max(LEAST_USUAL_S, self._usual_s * step)
