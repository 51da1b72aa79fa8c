"""Credit is earned by sending, and taken back where it lies unused: who only waits costs nobody
anything. How it is dealt among those at work is in test_session_credit.py."""

import pytest

from impala_async.wire.credit import UNUSED_S
from impala_async.wire.peer import WINDOW, Peer
from impala_async.wire.session import SessionTable
from tests.wire.tables import NOW, data_of, join, new_table, newcomer, send

BATCH = 16
NUM_SLOTS = 4


@pytest.fixture
def table() -> SessionTable:
    return new_table()


def test_a_newcomer_has_one_message_of_credit_until_it_has_sent(table: SessionTable) -> None:
    peer = newcomer(table, 1, columns=2, streams=3)
    table.deal(64, BATCH)
    assert (peer.granted, peer.window) == (1, 1)
    send(table, peer, 0)
    table.deal(64, BATCH)
    assert peer.outstanding_messages == peer.window == 3 * WINDOW


def test_what_is_refused_earns_nothing(table: SessionTable) -> None:
    peer = newcomer(table, 1)
    table.deal(64, BATCH)
    table.settle(peer, 0, "nonfinite")
    table.deal(64, BATCH)
    assert peer.outstanding_messages == peer.window == 1


def test_newcomers_share_one_batch_beside_what_the_others_have(table: SessionTable) -> None:
    strangers = [newcomer(table, 100 + i, columns=BATCH) for i in range(4)]
    worker = join(table, 1, columns=8)
    table.deal(NUM_SLOTS * BATCH, BATCH)
    assert [peer.granted for peer in strangers] == [1, 0, 0, 0]
    assert worker.granted == WINDOW
    assert table.outstanding_columns == 2 * BATCH


def test_credit_that_lies_unused_is_taken_back_while_others_wait(table: SessionTable) -> None:
    idle, busy = join(table, 1, columns=8), join(table, 2, columns=8)
    table.deal(16)
    assert (idle.granted, busy.granted) == (1, 1)
    assert table.take_back(0.0) == table.take_back(UNUSED_S) == []
    busy.last_heard = busy.used_at = UNUSED_S
    assert table.take_back(UNUSED_S + 0.1) == [idle]
    assert table.outstanding_columns == 8
    assert table.deal(16) == [busy]
    # It has credit that it has not used: it waits for none, and has none to be taken back.
    assert (idle.granted, idle.may_have_more) == (1, False)
    assert table.take_back(1000.0) == []
    # What it sends late is still allowed, and is a newcomer's first.
    assert send(table, idle, 0) is None
    assert (idle.num_lapsed, idle.window) == (0, 1)
    table.deal(32)
    assert send(table, idle, 1) is None
    assert idle.window == WINDOW


def test_nobody_takes_back_what_nobody_else_wants(table: SessionTable) -> None:
    join(table, 1, columns=8)
    table.deal(8)
    assert table.take_back(1000.0) == []
    join(table, 2, columns=8)
    table.deal(32)
    assert table.take_back(1000.0) == []


def test_where_all_are_slow_nobody_is_hurried(table: SessionTable) -> None:
    peers = [join(table, actor, columns=8) for actor in range(3)]
    found: list[Peer] = []
    for now in range(600):
        table.deal(24)
        for number, peer in enumerate(peers):
            table.find(peer.session, now)
            if peer.outstanding_messages and now % 12 == 4 * number:
                send(table, peer, peer.watermark.below)
        late = table.take_back(now)
        found += late if now > 150 else []
    assert found == []


def test_a_learner_that_stood_still_takes_nothing_back(table: SessionTable) -> None:
    for actor in (1, 2):
        join(table, actor, columns=8)
    table.deal(8)
    for now in (0, 1, 600, 601):
        table.expire(now)
        assert table.take_back(now) == []


# -------------------- a minute with strangers


class Minute:
    """One actor at work that answers a credit after a while, a learner that trains a batch after
    another, and strangers, who do nothing but hold what they are given."""

    STEP_S = 0.01

    def __init__(self, takes_s: float, update_s: float) -> None:
        self.table = new_table()
        self.worker = join(self.table, 1, columns=8)
        self.free, self.full, self.now = NUM_SLOTS * BATCH, 0, 0.0
        self.takes_s, self.update_s = takes_s, update_s
        self.num_sent = 0
        self.ready_at, self.trained_at = 0.0, update_s

    def run(self, seconds: float, join_every_s: float, num_strangers: int) -> int:
        """How many messages came through."""
        strangers = 0
        for _ in range(int(seconds / self.STEP_S)):
            self.now += self.STEP_S
            if strangers < num_strangers and self.now >= (strangers + 1) * join_every_s:
                strangers += 1
                newcomer(self.table, 100 + strangers, columns=BATCH, now=self.now)
            self._step()
        return self.num_sent

    def _step(self) -> None:
        for peer in self.table:
            self.table.find(peer.session, self.now)  # all have heartbeats
        if self.full >= BATCH and self.now >= self.trained_at:
            self.full, self.free = self.full - BATCH, self.free + BATCH
            self.trained_at = self.now + self.update_s
        if self.worker.outstanding_messages and self.now >= self.ready_at:
            assert send(self.table, self.worker, self.worker.watermark.below) is None
            self.ready_at = self.now + self.takes_s
            self.free, self.full, self.num_sent = self.free - 8, self.full + 8, self.num_sent + 1
        if round(self.now / self.STEP_S) % 100 == 0:
            self.table.take_back(self.now)
        self.table.deal(self.free, BATCH)
        assert self.table.outstanding_columns <= self.free


@pytest.mark.parametrize(
    ("takes_s", "update_s"), [(0.02, 0.01), (0.02, 0.1)], ids=["actor", "learner"]
)
@pytest.mark.parametrize(
    ("join_every_s", "num_strangers"), [(0.1, 4), (1.0, 60)], ids=["four", "always another"]
)
def test_who_takes_credit_and_never_uses_it_costs_the_others_little(
    takes_s: float, update_s: float, join_every_s: float, num_strangers: int
) -> None:
    alone = Minute(takes_s, update_s).run(60.0, 1.0, 0)
    beset = Minute(takes_s, update_s).run(60.0, join_every_s, num_strangers)
    assert beset >= 0.95 * alone > 500


def test_a_late_message_needs_room_that_nobody_else_has(table: SessionTable) -> None:
    late, other = join(table, 1, columns=8), join(table, 2, columns=8)
    table.deal(8)
    table.find(other.session, 5.0)
    assert table.take_back(5.0) == [late]
    table.deal(8)
    assert (late.kept_columns, other.kept_columns) == (0, 8)
    # Whoever takes messages in looks whether there is any: by its credit it may come.
    assert table.reserve(late, data_of(late, 0), NOW) is None
    assert late.lapsed == 1
