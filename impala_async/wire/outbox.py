"""The actor's side of credits as a pure state machine: what may go, is under way, or is done.

It numbers trajectories, holds each until the learner settled it, and says which to send next:
again after a lost connection, never without credit. Times come in as arguments.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from impala_async.wire.messages import NO_SEQ, Grant

Item = TypeVar("Item")


@dataclass(slots=True)
class _Held(Generic[Item]):
    item: Item
    sent_at: float | None = None


class Outbox(Generic[Item]):
    """Trajectories of one actor that are not settled yet, in the order of their seqs."""

    def __init__(self) -> None:
        self.next_seq = 0
        self._granted = 0
        self._held: dict[int, _Held[Item]] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def lowest_unsettled(self) -> int:
        return min(self._held, default=self.next_seq)

    @property
    def num_unsent(self) -> int:
        return sum(held.sent_at is None for held in self._held.values())

    def put(self, item: Item) -> int:
        """Take a finished trajectory; its seq."""
        seq = self.next_seq
        self._held[seq] = _Held(item)
        self.next_seq += 1
        return seq

    def sendable(self) -> tuple[int, Item] | None:
        """The first trajectory that has credit and is not under way."""
        for seq, held in self._held.items():
            if seq >= self._granted:
                return None
            if held.sent_at is None:
                return seq, held.item
        return None

    def mark_sent(self, seq: int, now: float) -> None:
        self._held[seq].sent_at = now

    def on_grant(self, grant: Grant) -> list[Item]:
        """Take in a grant of this session; returns what the learner is done with.

        Grants are cumulative and may be late: an older one changes nothing. What was refused
        above a gap stays until the gap is closed: what is held has none, so `lowest_unsettled`
        says all that a restarted learner must know.
        """
        self._granted = max(self._granted, grant.granted)
        if grant.again != NO_SEQ:
            self._send_again(held for seq, held in self._held.items() if seq == grant.again)
        done = [seq for seq in self._held if seq < grant.settled]
        self.next_seq = max(self.next_seq, grant.settled)
        return [self._held.pop(seq).item for seq in done]

    def on_new_session(self) -> None:
        """Credit starts again from nothing."""
        self._granted = 0
        self.on_new_connection()

    def on_new_connection(self) -> None:
        """Send all that is held again: messages that were under way may be lost."""
        self._send_again(self._held.values())

    def give_up(self) -> list[Item]:
        """Nothing that is held will ever be sent; returns it."""
        items = [held.item for held in self._held.values()]
        self._held.clear()
        self._granted = 0
        return items

    def on_new_run(self) -> list[Item]:
        """Another run wants none of this; returns what was held."""
        items = self.give_up()
        self.next_seq = 0
        return items

    def resend_overdue(self, now: float, after_s: float) -> int:
        """Send again what has not been settled for so long; how many those are."""
        overdue = [
            held
            for held in self._held.values()
            if held.sent_at is not None and now - held.sent_at > after_s
        ]
        self._send_again(overdue)
        return len(overdue)

    def _send_again(self, some: Iterable[_Held[Item]]) -> None:
        for held in some:
            held.sent_at = None
