"""Who may send how much: dealt in turns, earned by sending, taken back where it lies unused. Pure.

Credits are counts, not places. The invariant: the columns for which room is kept, over all
sessions, never exceed the columns that free slots can hold.

Whoever has sent nothing yet has one message of credit, and all of those together have no more
than a batch of it, apart from what the others have: to join and to wait costs nobody anything.
"""

import heapq
from collections.abc import Collection

from impala_async.wire.peer import Peer

# Credit that has lain unused for so long is taken back while somebody waits for some, unless
# messages usually take a good part of that.
UNUSED_S = 1.5
PATIENCE = 4.0
# Messages under way, when it got the last one, a number, and whose turn it is.
_Turn = tuple[int, int, int, Peer]


class Credit:
    """Deals it to the peers of a table, in turns."""

    def __init__(self) -> None:
        self._num_dealt = 0
        # Those who could have had more at the last deal.
        self._waiting: list[_Turn] = []
        # From one message of an actor to its next, over all that are admitted.
        self._usual_s = 0.0

    def deal(self, peers: Collection[Peer], free_columns: int, most_ahead: int) -> list[Peer]:
        """Give out credit for free columns; those who got some.

        Whoever has the least under way comes first, and of those whoever got none for longest.
        One with nothing under way is waited for until what it needs is left: nobody starves,
        however few columns there are and however many of them its messages have.
        """
        # The number keeps those in order that never had a turn.
        turns: list[_Turn] = []
        left, left_earned, left_new = free_columns, most_ahead, most_ahead
        for number, peer in enumerate(peers):
            if columns := peer.columns:
                under_way = peer.outstanding_messages
                turns.append((under_way, peer.dealt_at, number, peer))
                kept = (under_way - peer.num_lapsed if peer.lapsed else under_way) * columns
                left -= kept
                if peer.has_earned:
                    left_earned -= kept
                else:
                    left_new -= kept
        self._waiting = waiting = []
        dealt: dict[bytes, Peer] = {}
        if left > 0:
            heapq.heapify(turns)
        while turns and left > 0:
            under_way, _, number, peer = turns[0]
            columns = peer.columns
            room = left_earned if peer.has_earned else left_new
            if columns <= left and columns <= room and peer.may_have_more:
                left -= columns
                if peer.has_earned:
                    left_earned -= columns
                else:
                    left_new -= columns
                self._extend(peer)
                dealt[peer.session] = peer
                heapq.heapreplace(turns, (under_way + 1, peer.dealt_at, number, peer))
                continue
            if under_way == 0:
                # Whoever comes after it must not take what it waits for.
                if columns > left:
                    break
                if peer.has_earned:
                    left_earned = 0
                else:
                    left_new = 0
            waiting.append(heapq.heappop(turns))
        waiting += turns
        return list(dealt.values())

    def note_use(self, peer: Peer, seq: int, *, was_admitted: bool) -> None:
        """A message of a peer, just heard of, is settled."""
        if was_admitted:
            self._usual_s += (peer.last_heard - peer.used_at - self._usual_s) / 16
            # One that came too late is taken, and is a newcomer's first.
            peer.has_earned = seq >= peer.lapsed
        peer.used_at = peer.last_heard

    def take_back(self, peers: Collection[Peer], now: float) -> list[Peer]:
        """Keep no room any longer for what does not come, though others wait; whose credit it was.

        A trajectory that is still to come is admitted if there is room for it then.
        """
        waiting = [peer for *_, peer in self._waiting if peer.may_have_more]
        patience_s = UNUSED_S + PATIENCE * self._usual_s
        found = []
        for peer in peers:
            if peer.outstanding_messages == 0:
                peer.used_at = now
            is_late = now - peer.used_at > patience_s and peer.kept_columns > 0
            if is_late and any(other is not peer for other in waiting):
                peer.lapsed, peer.has_earned = peer.granted, False
                found.append(peer)
        return found

    def _extend(self, peer: Peer) -> None:
        peer.extend()
        self._num_dealt += 1
        peer.dealt_at = self._num_dealt
