"""Lockstep: every batch holds one trajectory of every actor, each in its actor's own place.

So neither the order of arrival nor the pace of a process changes what is trained. It takes the
part of `SlotFiller` when `pace.mode` is "lockstep": places go by rank, a batch is complete when
everybody who is expected is in it, and batches are submitted, and episodes counted, in order.

    rank 0: columns 0 to C-1    rank 1: columns C to 2C-1    ...    of every batch

Batch b, from 0, is trained by update b + 1 of this start, and every message of a session is for
the batch after that of the one before it. So its version follows: the newest at which its first
batch can be trained, kept for `lag` more batches, and then one more with each.

Runs on: event loop
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from impala_async.errors import ProtocolError
from impala_async.learner.loop.filler import Arrival, Count, IdleSlots, Submit
from impala_async.learner.slots import Episodes, Region, Slot
from impala_async.weights import Version
from impala_async.wire.peer import Peer
from impala_async.wire.session import SessionTable

logger = logging.getLogger(__name__)

MAX_NAMED = 3


@dataclass(slots=True, eq=False)
class _Open:
    """A batch that is filling: who is in it, and the episodes that they brought."""

    slot: Slot
    episodes: dict[int, Episodes | None] = field(default_factory=dict)


class _Member(NamedTuple):
    """Who has a rank, and the update of the first weights of its session."""

    session: bytes
    begins_at: int


class LockstepFiller:
    """Puts the columns of rank r into place r. At most `lag + 1` batches are open at once.

    Everybody is waited for until all have been there at once; from then on whoever is there. When
    a session ends, `on_loss` is called if there is one, and nothing is submitted any more; else
    batches are complete without it, and the columns of its place are empty.
    """

    def __init__(
        self,
        slots: list[Slot],
        submit: Submit,
        count: Count,
        *,
        num_ranks: int,
        lag: int,
        first_update: int,
        on_loss: Callable[[], None] | None,
    ) -> None:
        self.batch_columns = len(slots[0].obs)
        self._submit = submit
        self._count = count
        self._on_loss = on_loss
        self._num_ranks = num_ranks
        self._width = self.batch_columns // num_ranks
        self._lag = lag
        self._first_update = first_update
        self._idle = IdleSlots(slots)
        self._open: deque[_Open] = deque()
        self._members: dict[int, _Member] = {}
        self._was_whole = False
        self._expected = set(range(num_ranks))
        self._num_batches = 0
        self._newest = first_update
        self._uncounted: deque[tuple[int, list[Episodes]]] = deque()

    @property
    def free_columns(self) -> int:
        """Columns that can still come in before a slot must be released."""
        return self._width * sum(self._num_allowed(rank) for rank in self._expected)

    def deal(self, table: SessionTable, now: float) -> list[Peer]:
        """Give everybody credit for the batches that are open or can be opened."""
        self._call_the_roll(list(table.joined))
        dealt = []
        for rank, member in self._members.items():
            peer = table.peer_of(member.session)
            if peer is None:
                continue  # the run ends for its loss
            peer.begins_at = member.begins_at
            num_more = self._num_allowed(rank) - peer.outstanding_messages
            if num_more > 0:
                for _ in range(num_more):
                    peer.extend()
                dealt.append(peer)
        return dealt

    def judge(self, rank: int, version: Version) -> str | None:
        """Each message has one version that it can have acted with."""
        lagged = self._first_update + self._next_batch(rank) - self._lag
        wanted = max(lagged, self._members[rank].begins_at)
        if version.update == wanted:
            return None
        return "stale" if version.update < wanted else "invalid"

    def assign(self, num_columns: int, rank: int) -> Region:
        """Where to receive the next message of a rank; there is no other until it is committed."""
        if num_columns != self._width:
            raise ProtocolError(
                "wrong_size", f"{num_columns} columns, in lockstep an actor has {self._width}"
            )
        slot, columns = self._batch_of(rank).slot, self._columns(rank)
        return Region(slot.obs[columns], slot.small[columns])

    def commit(self, arrivals: Sequence[Arrival]) -> None:
        """Take in the message that was given room just before, unless it is refused."""
        for arrival in arrivals:
            batch, columns = self._batch_of(arrival.rank), self._columns(arrival.rank)
            batch.slot.updates_B[columns] = arrival.version.update
            batch.slot.ranks_B[columns] = arrival.rank
            batch.slot.valid_rows_B[columns] = arrival.valid_rows
            batch.slot.filled_B[columns] = True
            batch.episodes[arrival.rank] = arrival.episodes
            self._submit_complete()

    def skip(self, rank: int) -> None:
        """A message of this rank was refused for good: its place stays empty."""
        self._batch_of(rank).episodes[rank] = None
        self._submit_complete()

    def release(self, index: int) -> None:
        """A slot is empty again."""
        self._idle.release(index)

    def note_version(self, update: int) -> None:
        """A version is published: the batch that is trained next may be counted.

        Never sooner, and nothing after the end: so what is counted at the end are the batches
        that were trained, however many more were complete by then.
        """
        self._newest = update
        self._count_due()

    def report(self) -> dict[str, object]:
        """Beside the slots: how many have done their part of the next batch, and who has not."""
        done = self._open[0].episodes.keys() if self._open else set()
        members = self._members.keys()
        missing = sorted(self._expected - done, key=lambda rank: (rank in members, rank))
        names = [
            f"actor {rank}{'' if rank in members else ' (not joined)'}"
            for rank in missing[:MAX_NAMED]
        ]
        more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
        return {
            **self._idle.report(),
            "lockstep/num_done": len(done),
            "lockstep/waits_for": f"{', '.join(names)}{more}" or None,
        }

    def _columns(self, rank: int) -> slice:
        return slice(rank * self._width, (rank + 1) * self._width)

    def _call_the_roll(self, peers: list[Peer]) -> None:
        """Who has joined and who is gone since the last time."""
        sessions = {peer.rank: peer.session for peer in peers}
        former = {rank: member.session for rank, member in self._members.items()}
        if sessions == former:
            return
        is_loss = any(sessions.get(rank) != session for rank, session in former.items())
        if is_loss and self._on_loss is not None:
            self._on_loss()
            return
        for rank, session in sessions.items():
            if former.get(rank) != session:
                begins_at = self._first_update + self._next_batch(rank)
                self._members[rank] = _Member(session, begins_at)
        gone = former.keys() - sessions.keys()
        for rank in gone:
            del self._members[rank]
        self._was_whole |= len(sessions) == self._num_ranks
        if self._was_whole:
            self._expected = set(sessions)
            if gone:
                logger.warning("lockstep: going on without actors %s", sorted(gone))
            self._submit_complete()

    def _num_allowed(self, rank: int) -> int:
        """How many messages of a rank have a place to go to."""
        num_new = min(len(self._idle), self._lag + 1 - len(self._open))
        return sum(rank not in batch.episodes for batch in self._open) + num_new

    def _next_batch(self, rank: int) -> int:
        """The number of the first batch that this rank is not in, whether it is open or not."""
        is_in = [rank in batch.episodes for batch in self._open]
        return self._num_batches + (is_in.index(False) if False in is_in else len(is_in))

    def _batch_of(self, rank: int) -> _Open:
        """The first batch that this rank is not in."""
        number = self._next_batch(rank) - self._num_batches
        if number == len(self._open):
            assert self._idle, "columns without a credit"
            assert number <= self._lag, "columns without a credit"
            slot = self._idle.take()
            slot.filled_B.fill(False)
            slot.valid_rows_B.fill(0)
            self._open.append(_Open(slot))
        return self._open[number]

    def _submit_complete(self) -> None:
        while self._open and self._expected and self._expected <= self._open[0].episodes.keys():
            batch = self._open.popleft()
            self._clear_empty(batch.slot)
            by_rank = [episodes for _, episodes in sorted(batch.episodes.items())]
            self._uncounted.append((self._num_batches, [e for e in by_rank if e is not None]))
            self._num_batches += 1
            batch.slot.batch = self._num_batches
            self._submit(batch.slot)
        # Only now: a goal that is reached closes the doors.
        self._count_due()

    def _clear_empty(self, slot: Slot) -> None:
        """Empty columns go through the network with the rest: they must be finite there."""
        is_empty_B = ~slot.filled_B
        if is_empty_B.any():
            slot.obs[is_empty_B] = 0
            slot.small[is_empty_B] = 0

    def _count_due(self) -> None:
        while self._uncounted and self._first_update + self._uncounted[0][0] <= self._newest:
            for episodes in self._uncounted.popleft()[1]:
                self._count(episodes)
