"""Lockstep: every batch holds one trajectory of every actor, each in its actor's own place, so that
neither the order of arrival nor the pace of a process changes what is trained.

Runs on: event loop
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from impala_async.errors import ProtocolError
from impala_async.learner.slots import Arrival, Episodes, Slot, SlotFiller
from impala_async.output import SeldomLog
from impala_async.weights import Version
from impala_async.wire.messages import Data, Spec
from impala_async.wire.peer import Peer
from impala_async.wire.session import SessionTable

logger = logging.getLogger(__name__)

MAX_NAMED = 3

_Open = tuple[Slot, dict[int, Episodes | None]]
"""A batch that is filling: who is in it, by number, and the episodes that they brought."""


@dataclass(eq=False, kw_only=True)
class LockstepFiller(SlotFiller):
    """Puts the `width` columns of actor n into place n. At most `lag + 1` batches are open at once.

    Everybody is waited for until all have been there at once; from then on whoever is there. When
    a session ends, `on_loss` is called if there is one, and nothing is submitted any more; else
    batches are complete without it, and the columns of its place are empty.

    Batch b, from 0, is trained by update b + 1 of this start, and every message of a session is for
    the batch after that of the one before it. So its version follows: the newest at which its first
    batch can be trained, kept for `lag` more batches, and then one more with each.
    """

    num_actors: int
    width: int
    lag: int
    first_update: int
    on_loss: Callable[[], None] | None
    is_lockstep: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._open: deque[_Open] = deque()
        # The peers by number.
        self._members: dict[int, Peer] = {}
        self._was_whole = False
        self._expected = set(range(self.num_actors))
        self._newest = self.first_update
        self._uncounted: deque[tuple[int, list[Episodes]]] = deque()
        self._num_cut = 0
        # A stranger may come and go all the time; whoever is gone is told of by name elsewhere.
        self._log = SeldomLog(logger)

    @property
    def free_columns(self) -> int:
        return self.width * sum(self._num_allowed(number) for number in self._expected)

    def deal(self, table: SessionTable, now: float) -> list[Peer]:
        peers = {peer.number: peer for peer in table.joined}
        if peers != self._members and not self._call_the_roll(peers):
            return []
        dealt = []
        for number, peer in self._members.items():
            num_more = self._num_allowed(number) - peer.outstanding_messages
            for _ in range(num_more):
                peer.extend()
            if num_more > 0:
                dealt.append(peer)
        return dealt

    def find_misfit(self, spec: Spec) -> str | None:
        if (spec.columns, spec.streams) == (self.width, 1):
            return None
        return (
            f"pace.mode lockstep wants one message of {self.width} columns from each actor, this "
            f"one has {spec.streams} of {spec.columns}: start it without --num-envs, and use "
            "actor.sampler = serial where the environment's own vectors reset in the same "
            "step; learner.batch_columns must be train.num_actors times the columns of one, "
            "and an environment has a column for each of its agents"
        )

    def may_begin(self, peer: Peer, update: int) -> bool:
        """A session begins with the weights of its first batch, and not before."""
        return peer.begins_at is not None and update >= peer.begins_at

    def judge(self, peer: Peer, version: Version) -> str | None:
        lagged = self.first_update + self._next_batch(peer.number) - self.lag
        wanted = max(lagged, peer.begins_at or 0)
        if version.update == wanted:
            return None
        return "stale" if version.update < wanted else "invalid"

    def assign(self, peer: Peer, data: Data) -> Arrival:
        """Where to receive an actor's next message; there is no other until it is committed."""
        if data.columns != self.width:
            text = f"{data.columns} columns, in lockstep an actor has {self.width}"
            raise ProtocolError("wrong_size", text)
        slot, _ = self._batch_of(peer.number)
        columns = self._columns(peer.number)
        return Arrival(peer, data, slot.obs[columns], slot.small[columns])

    def commit(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            number = arrival.peer.number
            slot, episodes = self._batch_of(number)
            columns = self._columns(number)
            slot.updates_B[columns] = arrival.data.update
            slot.actors_B[columns] = number
            slot.filled_B[columns] = True
            episodes[number] = arrival.episodes
            self._num_cut += arrival.data.num_cut * self.width
            self._submit_complete()

    def skip(self, peer: Peer) -> None:
        _, episodes = self._batch_of(peer.number)
        episodes[peer.number] = None
        self._submit_complete()

    def late_for(self, update: int) -> list[Peer]:
        if update != self.first_update + self._num_batches:
            return []  # it is complete by now
        done = self._open[0][1].keys() if self._open else set()
        return [peer for number, peer in self._members.items() if number not in done]

    def note_version(self, update: int) -> None:
        """The batch that is trained next may be counted. Never sooner, and nothing after the end:
        so at the end those are counted that were trained, however many more were complete."""
        self._newest = update
        self._count_due()

    def report(self) -> dict[str, object]:
        done = self._open[0][1].keys() if self._open else set()
        missing = self._expected - done
        names = [f"actor {r} (not joined)" for r in sorted(missing - self._members.keys())]
        names += [f"actor {r}" for r in sorted(missing & self._members.keys())]
        more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
        return {
            **super().report(),
            "lockstep/num_done": len(done),
            "lockstep/waits_for": f"{', '.join(names[:MAX_NAMED])}{more}" or None,
            "lockstep/rows_cut": self._num_cut,
        }

    def _columns(self, number: int) -> slice:
        return slice(number * self.width, (number + 1) * self.width)

    def _call_the_roll(self, peers: dict[int, Peer]) -> bool:
        """Note who has joined and who is gone since the last time; False if that ends the run."""
        former = self._members
        lost = sorted(number for number, peer in former.items() if peers.get(number) is not peer)
        # Until all have been here, nothing is trained, and who goes may come again.
        if self.on_loss and self._was_whole and lost:
            # They may be back by now, as after a learner that stood still.
            logger.error("lockstep: the session of actors %s has ended (pace.on_loss)", lost)
            self.on_loss()
            return False
        for number, peer in peers.items():
            if former.get(number) is not peer:
                peer.begins_at = self.first_update + self._next_batch(number)
        self._members = peers
        self._was_whole |= len(peers) == self.num_actors
        if self._was_whole:
            self._expected = set(peers)
            if gone := former.keys() - peers.keys():
                self._log.warning("lockstep: going on without actors %s", sorted(gone))
            self._submit_complete()
        return True

    def _num_allowed(self, number: int) -> int:
        num_new = min(len(self._idle), self.lag + 1 - len(self._open))
        return sum(number not in episodes for _, episodes in self._open) + num_new

    def _next_batch(self, number: int) -> int:
        """The number of the first batch that this actor is not in, whether it is open or not."""
        is_in = [number in episodes for _, episodes in self._open]
        return self._num_batches + (is_in.index(False) if False in is_in else len(is_in))

    def _batch_of(self, number: int) -> _Open:
        index = self._next_batch(number) - self._num_batches
        if index == len(self._open):
            assert min(len(self._idle), self.lag + 1 - index) > 0, "columns without a credit"
            slot = self._take_idle()
            slot.filled_B.fill(False)
            self._open.append((slot, {}))
        return self._open[index]

    def _submit_complete(self) -> None:
        while self._open and self._expected and self._expected <= self._open[0][1].keys():
            slot, episodes = self._open.popleft()
            # Empty columns go through the network with the rest: they must be finite there.
            slot.obs[~slot.filled_B] = 0
            slot.small[~slot.filled_B] = 0
            brought = [e for number in sorted(episodes) if (e := episodes[number]) is not None]
            self._uncounted.append((self._num_batches, brought))
            slot.returns = [total for each in brought for total in each["total"].tolist()]
            self._send_on(slot)
        # This comes last, as a goal that is reached ends the run.
        self._count_due()

    def _count_due(self) -> None:
        while self._uncounted and self.first_update + self._uncounted[0][0] <= self._newest:
            for episodes in self._uncounted.popleft()[1]:
                self.count(episodes)
