"""Lockstep: every batch holds one trajectory of every actor, each in its actor's own place.

So neither the order of arrival nor the pace of a process changes what is trained. It takes the
part of `SlotFiller` when `pace.mode` is "lockstep": places go by rank, a batch is complete when
everybody who is expected is in it, and batches are submitted, and episodes counted, in order.

    rank 0: columns 0 to C-1    rank 1: columns C to 2C-1    ...    of every batch

Runs on: event loop
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from impala_async.errors import ProtocolError
from impala_async.layout import Bytes2D
from impala_async.learner.slots import Arrival, Count, Episodes, Slot, Submit
from impala_async.metrics.window import WindowStat
from impala_async.weights import Version
from impala_async.wire.session import Peer, SessionTable

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Open:
    """A batch that is filling: who is in it, and the episodes that they brought."""

    slot: Slot
    episodes: dict[int, Episodes | None] = field(default_factory=dict)


class LockstepFiller:
    """Puts the columns of rank r into place r. At most `lag + 1` batches are open at once.

    `on_loss` is told when an actor that was waited for is gone. Batches are complete without it
    then; the columns of its place are not filled.
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
        on_loss: Callable[[], None],
    ) -> None:
        self.batch_columns = len(slots[0].obs)
        self._slots = slots
        self._submit = submit
        self._count = count
        self._on_loss = on_loss
        self._width = self.batch_columns // num_ranks
        self._max_open = lag + 1
        # The smallest that the first batch may have acted with.
        self._first_update = first_update - lag
        self._idle = deque(slot.index for slot in slots)
        self._open: deque[_Open] = deque()
        # The first batch waits for everybody.
        self._expected = set(range(num_ranks))
        self._num_batches = 0
        self._idle_depth = WindowStat("depth")

    @property
    def free_columns(self) -> int:
        """Columns that can still come in before a slot must be released."""
        return self._width * sum(self._num_allowed(rank) for rank in self._expected)

    def deal(self, table: SessionTable) -> list[Peer]:
        """Give everybody credit for the batches that are open or can be opened."""
        self._expect({peer.rank for peer in table if peer.columns})
        dealt = []
        for peer in table:
            num_more = self._num_allowed(peer.rank) - peer.outstanding_messages
            if peer.columns and num_more > 0:
                for _ in range(num_more):
                    peer.extend()
                dealt.append(peer)
        return dealt

    def judge(self, rank: int, version: Version) -> str | None:
        """Who acted with weights that are too old for the next batch is late, and skips it."""
        batch = self._batch_of(rank)
        index = self._num_batches + self._open.index(batch)
        return "stale" if version.update < self._first_update + index else None

    def obs_target(self, num_columns: int, rank: int) -> Bytes2D:
        """Where the observations of the next message of a rank are to be received."""
        if num_columns != self._width:
            raise ProtocolError(
                "wrong_size", f"{num_columns} columns, in lockstep an actor has {self._width}"
            )
        return self._batch_of(rank).slot.obs[self._place(rank)]

    def commit(self, arrival: Arrival) -> None:
        """Take in a message whose observations are in the `obs_target` asked for just before."""
        batch, place = self._batch_of(arrival.rank), self._place(arrival.rank)
        batch.slot.small[place] = arrival.small
        batch.slot.updates_B[place] = arrival.version.update
        batch.slot.valid_rows_B[place] = arrival.valid_rows
        batch.slot.filled_B[place] = True
        # They lie in memory that the next message will use.
        episodes = None if arrival.episodes is None else arrival.episodes.copy()
        batch.episodes[arrival.rank] = episodes
        self._submit_complete()

    def skip(self, rank: int) -> None:
        """A message of this rank was refused for good: its place stays empty."""
        self._batch_of(rank).episodes[rank] = None
        self._submit_complete()

    def release(self, index: int) -> None:
        """A slot is empty again."""
        self._idle.append(index)

    def report(self) -> dict[str, object]:
        """The numbers of the idle queue. Nobody waits for it: without a slot there is no credit."""
        return {
            "queue/idle_put_wait_ms": 0.0,
            "queue/idle_get_wait_ms": 0.0,
            "queue/idle_depth_quantiles": self._idle_depth.summary().quantiles,
            "queue/idle_capacity": len(self._slots),
        }

    def _place(self, rank: int) -> slice:
        return slice(rank * self._width, (rank + 1) * self._width)

    def _expect(self, joined: set[int]) -> None:
        """After the first batch nobody is waited for who is not there."""
        if not self._num_batches or joined == self._expected:
            return
        gone = self._expected - joined
        self._expected = joined
        if gone:
            logger.warning("lockstep: going on without actors %s", sorted(gone))
            self._on_loss()
        self._submit_complete()

    def _num_allowed(self, rank: int) -> int:
        """How many messages of a rank have a place to go to."""
        num_new = min(len(self._idle), self._max_open - len(self._open))
        return sum(rank not in batch.episodes for batch in self._open) + num_new

    def _batch_of(self, rank: int) -> _Open:
        """The first batch that this rank is not in."""
        for batch in self._open:
            if rank not in batch.episodes:
                return batch
        assert self._idle, "columns without a credit"
        assert len(self._open) < self._max_open, "columns without a credit"
        self._idle_depth.push(len(self._idle))
        slot = self._slots[self._idle.popleft()]
        slot.filled_B.fill(False)
        slot.valid_rows_B.fill(0)
        self._open.append(_Open(slot))
        return self._open[-1]

    def _submit_complete(self) -> None:
        while self._open and self._expected and self._expected <= self._open[0].episodes.keys():
            batch = self._open.popleft()
            self._num_batches += 1
            batch.slot.batch = self._num_batches
            self._submit(batch.slot)
            for _, episodes in sorted(batch.episodes.items()):
                if episodes is not None:
                    self._count(episodes)
