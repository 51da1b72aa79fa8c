"""Which rank an actor works for, without sockets and clocks: that with the fewest. All say hello to
rank 0, which sends some on; and where a rank has none, or none that sends anything, the one with
most lets one go.

An actor that was started with a number is of its starter's rank, and stays there.

Runs on: event loop
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from impala_async.config.ranks import Place

logger = logging.getLogger(__name__)

# An actor that says hello again so soon has not heard yet where it was sent.
UNDER_WAY_S = 3.0
# One that makes its environments counts for so long at the rank where it belongs.
BUILD_S = 10.0
# One that comes back within this time has not found that rank, or was let go there.
LOST_S = 30.0
# Strangers may say hello under any name.
MOST_PLACED = 1024
LET_GO_AFTER_S = 2.0
# Those who have joined do not count where nothing comes from them for so long, nor for so many
# times what the quickest of them takes for a trajectory.
SILENT_S, SILENT_TIMES = 20.0, 4.0
# If nobody has looked for so long, the learner itself stood still.
STOOD_STILL_S = 2.0
SAME_ADDRESS = (
    "two of them listen at the same address: where they are on several hosts, bind.data and "
    "bind.weights want tcp://0.0.0.0:PORT, or bind.host names each"
)


class _Placed(NamedTuple):
    """The rank where an actor belongs, since when, and how many it had before."""

    number: int
    since: float
    before: int
    was_sent: bool = True
    """False for one that was let go: it learns where to go at its next hello, which may come after
    a long step."""


class Placement:
    """Where actors belong, by the counts of all ranks as this one knows them."""

    def __init__(self, place: Place | None = None, most: int | None = None) -> None:
        """`most` actors have a place at each rank, if that is limited: in lockstep."""
        self._place, self._most = place or Place(), most
        self._urls: Sequence[str] = ()
        self.is_known = self._place.count == 1
        """Whether it is known where other ranks listen."""
        self._joined: Sequence[int] = [0] * self._place.count
        self._sessions: Sequence[int] = self._joined
        # Before the ranks have met, nobody tells what became of those who were sent.
        self._is_told = False
        # The actors that have asked of late, in the order of their asking.
        self._placed: OrderedDict[bytes, _Placed] = OrderedDict()
        self._lacking_since: float | None = None
        self.is_silent = False
        """Whether nothing has come for long from those who have joined here."""
        self._num_admitted, self._came_at, self._looked_at = -1, -math.inf, -math.inf
        self._patience_s = SILENT_S

    def open(self, urls: Sequence[str]) -> None:
        """The ranks listen there. Where two have the same address nobody is sent on."""
        self._urls = urls if len(set(urls)) == len(urls) else ()
        self.is_known = True
        if not self.can_send:
            logger.warning("no actor is sent to another rank: %s", SAME_ADDRESS)

    @property
    def can_send(self) -> bool:
        return bool(self._urls)

    @property
    def num_joined(self) -> int:
        return sum(self._joined)

    def note(self, counts: tuple[Sequence[int], Sequence[int]]) -> None:
        """The ranks have so many actors, and so many sessions: some are not actors yet."""
        self._joined, self._sessions = counts
        self._is_told = True

    def note_admitted(
        self, num_admitted: int, usual_s: float, now: float, *, is_waiting: bool
    ) -> None:
        """Decide whether this rank is silent. So much was admitted here by now; it `is_waiting` if
        some have joined who may send more, the quickest of whom takes `usual_s` for a trajectory:
        of those in sessions that are new, or have sent nothing, that is not known."""
        stood_still = now - self._looked_at > STOOD_STILL_S
        if stood_still or not is_waiting or num_admitted != self._num_admitted:
            self._num_admitted, self._came_at = num_admitted, now
        if usual_s < math.inf:
            self._patience_s = max(SILENT_S, SILENT_TIMES * usual_s)
        self._looked_at = now
        self.is_silent = now - self._came_at > self._patience_s

    def send(self, actor: bytes, num_own: int, now: float) -> str | None:
        """The address to which an actor is to go, that is told at its hello; None: here. `num_own`
        have joined here."""
        if not self._urls:
            return None
        own = self._place.number
        # Others wait for this one, if it has said that it has none.
        is_lacking = self.is_silent and not self._joined[own]
        joined = 0 if is_lacking else num_own, *self._joined[1:]
        placed = self._placed.get(actor, _Placed(own, -math.inf, 0))
        number, since = placed.number, placed.since
        within_s = UNDER_WAY_S if placed.was_sent else LOST_S
        is_asking_again = now - since <= within_s and number != own
        if self._place.is_first and not is_asking_again:
            is_back = now - since <= LOST_S and number != own and self._most is None
            if not is_back:
                self._placed.pop(actor, None)
            number = self._emptiest(joined, now, number if is_back else None)
            if not is_back:
                self._note(actor, _Placed(number, now, joined[number]))
        elif not is_asking_again:
            return None
        elif not placed.was_sent:
            self._note(actor, placed._replace(since=now, was_sent=True))
        return None if number == own else self._urls[number]

    def let_go(self, actor: bytes, now: float) -> None:
        """It is to go to a rank that has none at work, when it says hello here again."""
        number = min(range(len(self._joined)), key=self._joined.__getitem__)
        self._note(actor, _Placed(number, now, self._joined[number], was_sent=False))

    def is_to_let_go(self, now: float) -> bool:
        """Whether this rank has most, and another one has had none at work for a while. Asked
        regularly."""
        lacking = [number for number, joined in enumerate(self._joined) if not joined]
        most = max(self._joined)
        if not self._urls or not lacking or most < 2 or self._most is not None:
            self._lacking_since = None
            return False
        if self._lacking_since is None:
            self._lacking_since = now
        # One that has come there may still make its environments, or its first trajectory.
        is_empty = any(not self._sessions[number] for number in lacking)
        is_due = now - self._lacking_since >= (LET_GO_AFTER_S if is_empty else self._patience_s)
        if is_due:
            self._lacking_since = now
        return is_due and self._joined.index(most) == self._place.number

    def _note(self, actor: bytes, placed: _Placed) -> None:
        self._placed.pop(actor, None)
        self._placed[actor] = placed
        if len(self._placed) > MOST_PLACED:
            self._placed.popitem(last=False)

    def _emptiest(self, joined: Sequence[int], now: float, but: int | None) -> int:
        counts: list[float] = list(joined)
        # Those who were placed of late may have joined, or be on their way.
        expected = dict[int, int]()
        for number, since, before, _ in self._placed.values():
            if not self._is_told or now - since <= BUILD_S:
                expected[number] = expected.get(number, before) + 1
        for number, count in expected.items():
            counts[number] = max(counts[number], count)
        for number, count in enumerate(joined):
            # Where all are full rank 0 says so.
            if self._most is not None and count >= self._most:
                counts[number] = math.inf
        if but is not None:
            counts[but] = math.inf
        return min(range(len(counts)), key=counts.__getitem__)
