"""Which rank an actor works for, without sockets and clocks: that with the fewest. All say hello to
rank 0, which sends some on; and where a rank has none, the one with most lets one go.

An actor that was started with a number is of its starter's rank, and stays there.

Runs on: event loop
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

from impala_async.config.ranks import Place

# An actor that was sent to a rank counts there until it has had the time to come.
UNDER_WAY_S = 3.0
# One that comes back within this time has not found that rank, and stays here.
LOST_S = 30.0
# Strangers may say hello under any name.
MOST_SENT = 1024
LET_GO_AFTER_S = 2.0


class Placement:
    """Where actors belong, by the counts of all ranks as this one knows them."""

    def __init__(self, place: Place | None = None, most: int | None = None) -> None:
        """`most` actors have a place at each rank, if that is limited."""
        self._place, self._most = place or Place(), most
        self._urls: Sequence[str] = ()
        self._counts = [0] * self._place.count
        # The rank that each actor was sent to, and when.
        self._sent: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        self._lacking_since: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether it is known where other ranks listen."""
        return self._place.count == 1 or bool(self._urls)

    def open(self, urls: Sequence[str]) -> None:
        self._urls = urls

    def note(self, counts: Sequence[int]) -> None:
        """The ranks have so many actors."""
        self._counts = list(counts)

    def send(self, actor: bytes, num_own: int, now: float) -> str | None:
        """The address to which an actor is to go, that is told at its hello; None: here."""
        if self._place.count == 1 or not self._place.is_first:
            return None
        number, at = self._sent.pop(actor, (0, -math.inf))
        if now - at > LOST_S:
            number = self._emptiest(num_own, now)
        elif now - at > UNDER_WAY_S:
            number = 0
        self._sent[actor] = number, now
        if len(self._sent) > MOST_SENT:
            self._sent.popitem(last=False)
        return None if number == 0 else self._urls[number]

    def forget(self, actor: bytes) -> None:
        """It is let go: when it comes again it may go anywhere."""
        self._sent.pop(actor, None)

    def is_to_let_go(self, now: float) -> bool:
        """Whether this rank has most, and another one has had none for a while. Asked regularly."""
        counts = self._counts
        most = max(counts)
        if self._place.count == 1 or min(counts) > 0 or most < 2 or self._most is not None:
            self._lacking_since = None
            return False
        if self._lacking_since is None:
            self._lacking_since = now
        is_due = now - self._lacking_since >= LET_GO_AFTER_S
        if is_due:
            self._lacking_since = now
        return is_due and counts.index(most) == self._place.number

    def _emptiest(self, num_own: int, now: float) -> int:
        counts: list[float] = [num_own, *self._counts[1:]]
        for number, at in self._sent.values():
            if number > 0 and now - at <= UNDER_WAY_S:
                counts[number] += 1
        if self._most is not None:
            # Where all are full, rank 0 says so.
            counts = [count if count < self._most else math.inf for count in counts]
        return min(range(len(counts)), key=counts.__getitem__)
