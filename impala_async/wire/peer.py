"""One session of one actor, as the learner knows it: what it may send, and what is settled."""

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from impala_async.weights import Version
from impala_async.wire.messages import NO_SEQ, Grant


class Watermark:
    """Settled seqs, in memory bounded by the actor's window. Pure; used by one thread."""

    def __init__(self, below: int = 0, above: tuple[int, ...] = ()) -> None:
        self.below = below
        # In order.
        self._above = sorted(set(above))
        self._close_gaps()

    @property
    def above(self) -> tuple[int, ...]:
        """Settled seqs over a gap."""
        return tuple(self._above)

    def num_unsettled_below(self, seq: int) -> int:
        """How many seqs under this one are still to come."""
        # Asked for every actor whenever credit is dealt; mostly there is nothing above.
        num_settled = bisect_left(self._above, seq) if self._above else 0
        return max(0, seq - self.below) - num_settled

    def is_settled(self, seq: int) -> bool:
        if seq < self.below or not self._above:
            return seq < self.below
        place = bisect_left(self._above, seq)
        return place < len(self._above) and self._above[place] == seq

    def settle(self, seq: int) -> None:
        """Admit or refuse a seq for good. Idempotent."""
        if seq == self.below:
            self.below += 1
            self._close_gaps()
        elif not self.is_settled(seq):
            insort(self._above, seq)

    def raise_to(self, seq: int) -> None:
        """The actor holds nothing below this seq any more, so none of it will ever come."""
        if seq > self.below:
            self.below = seq
            del self._above[: bisect_left(self._above, seq)]
            self._close_gaps()

    def _close_gaps(self) -> None:
        num_closed = 0
        for seq in self._above:
            if seq != self.below:
                break
            self.below += 1
            num_closed += 1
        del self._above[:num_closed]


# Messages under way of each that an actor writes: one travels while the next is unrolled.
WINDOW = 2


@dataclass(slots=True, eq=False)
class Peer:
    """One session of one actor. Without columns it has not said yet what it will send."""

    session: bytes
    actor: bytes
    rank: int
    watermark: Watermark
    last_heard: float
    data_route: bytes
    build: str = ""
    opened_at: float = 0.0
    weights_route: bytes = b""
    columns: int = 0
    streams: int = 1
    # Whether it sends again what came when there was no room, once it is told that there is.
    gives_way: bool = False
    # Whether its former session ended because there was no room for what it sent.
    is_owed_room: bool = False
    granted: int = 0
    # Below this seq, no room is kept for what it has not sent.
    lapsed: int = 0
    # How long it usually has credit before it uses it: a newcomer has to show it first.
    usual_s: float = math.inf
    # How many messages show that; and whether that time is short, and nothing is late now.
    num_used: int = 0
    is_brisk: bool = False
    dealt_at: int = 0
    used_at: float = 0.0
    # The seqs that came when there was no room for them.
    turned_away: set[int] = field(default_factory=set)
    # The seq that was turned away and is to come again, whether room is still kept for it, and
    # whether the actor has been told.
    called_back: int = NO_SEQ
    has_call_room: bool = False
    is_called: bool = False
    # Whether it came when it was called the last time.
    heeds_calls: bool = False
    verdicts: list[list[int]] = field(default_factory=list)
    # In lockstep: the update of its first weights, once it is decided.
    begins_at: int | None = None

    @property
    def outstanding_messages(self) -> int:
        return self.watermark.num_unsettled_below(self.granted)

    @property
    def num_lapsed(self) -> int:
        """Messages that it may still send, and that find room or do not."""
        return self.watermark.num_unsettled_below(self.lapsed) - self.has_call_room

    @property
    def window(self) -> int:
        """Messages that may be under way at once."""
        return WINDOW * self.streams if self.is_brisk else 1

    @property
    def kept_columns(self) -> int:
        """Columns for which room is kept."""
        return (self.outstanding_messages - self.num_lapsed) * self.columns

    @property
    def may_have_more(self) -> bool:
        """Whether its window has room. A seq that never comes must not let the others run away:
        what is settled above a gap is memory."""
        reach = self.granted - self.watermark.below
        return self.outstanding_messages < self.window and reach < 2 * self.window

    @property
    def is_waiting(self) -> bool:
        """Whether it would take room, if there were any. It is called back for one at a time, as
        a grant names one."""
        return not self.has_call_room if self.turned_away else self.may_have_more

    @property
    def is_newcomer(self) -> bool:
        """Whether nothing is known of it yet."""
        return self.usual_s == math.inf

    @property
    def may_come_without_room(self) -> bool:
        """Whether it has credit without room, where there is little: it is known to be slow, and
        gives way."""
        return self.gives_way and not self.is_newcomer and not self.is_brisk

    def extend(self) -> None:
        """Allow one more message; seqs that are settled already do not count."""
        self.granted += 1
        while self.watermark.is_settled(self.granted - 1):
            self.granted += 1

    def lapse(self) -> None:
        """Room is kept for nothing that it has not sent."""
        self.lapsed = self.granted
        self.has_call_room = False

    def call_back(self) -> None:
        """There is room now for the first of what was turned away."""
        self.called_back = min(self.turned_away)
        self.turned_away.remove(self.called_back)
        self.has_call_room = self.is_called = True

    def keeps_room_for(self, seq: int) -> bool:
        return seq >= self.lapsed or (self.has_call_room and seq == self.called_back)

    def note_settled(self, seq: int) -> None:
        """It has been admitted, or refused for good."""
        self.turned_away.discard(seq)
        self.is_owed_room = False
        if seq == self.called_back:
            self.has_call_room = False

    def grant(self, version: Version) -> Grant:
        """Return what this peer may do now, and what became of what it sent.

        Verdicts are said once and lost with a grant that does not arrive: they are for people.
        The actor acts on `settled`, which is said again in every grant. It sends again by itself
        what it shall send again, once that is overdue.
        """
        verdicts, self.verdicts = self.verdicts, []
        again = self.called_back if self.is_called else NO_SEQ
        self.is_called = False
        settled = self.watermark.below
        return Grant(self.session, self.granted, settled, *version, verdicts, again)
