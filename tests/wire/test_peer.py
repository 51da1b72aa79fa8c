"""Credit: counts that never exceed what is free, dealt so that everybody gets a turn. It is earned
by sending, and taken back where it lies unused: who only waits costs nobody anything."""

import math
import sys
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impala_async.weights import Version
from impala_async.wire.messages import NO_SEQ
from impala_async.wire.peer import FREE_PULLS, UNUSED_S, WINDOW, Peer, Watermark
from tests.matrix import first_of
from tests.wire.tables import NOW, data_of, join, new_table, newcomer, send

BATCH = 16
NUM_SLOTS = 4
PLENTY = 1000
DEAL_EVERY_S = 0.25

seqs = st.integers(0, 30)


@given(st.lists(st.tuples(st.booleans(), seqs), max_size=40))
def test_a_watermark_is_the_set_of_settled_seqs(steps):
    watermark, settled = Watermark(), set[int]()
    for is_raise, seq in steps:
        if is_raise:
            watermark.raise_to(seq)
            settled |= set(range(seq))
        else:
            watermark.settle(seq)
            settled.add(seq)
        assert {s for s in range(32) if watermark.is_settled(s)} == settled
        below = next(s for s in range(33) if s not in settled)
        above = sorted(s for s in settled if s > below)
        again = Watermark(below, [*reversed(above), *above, below - 1])
        for each in (watermark, again):
            assert (each.below, each.above) == (below, above)
        for until in range(33):
            assert watermark.num_unsettled_below(until) == len(set(range(until)) - settled)


@pytest.fixture
def peer():
    return Peer(b"s" * 16, b"a" * 16, 0, Watermark(), 0.0, b"route", columns=4, is_brisk=True)


def test_room_is_kept_for_what_was_granted_and_has_not_lapsed(peer):
    peer.granted = 3
    kept = [peer.kept_columns]
    peer.lapsed_below = 2
    kept.append(peer.kept_columns)
    for seq in (0, 1, 2):
        peer.watermark.settle(seq)
        kept.append(peer.kept_columns)
    assert kept == [12, 4, 4, 4, 0]


# -------------------- in turns


def test_credit_is_for_seqs_that_are_still_to_come(table):
    former = join(table, 1)
    table.deal(PLENTY, now=0.0)
    assert send(table, former, 1) is None
    peer = join(table, 1)
    assert table.deal(1, now=0.0) == [peer]
    assert peer.granted == 1
    # Seq 1 is settled already: the second credit is for seq 2.
    table.deal(2, now=0.0)
    assert (peer.granted, peer.outstanding_messages) == (3, 2)
    assert peer.grant(NOW).granted == 3


def test_a_seq_that_never_comes_does_not_let_memory_grow(table):
    peer = join(table, 1, streams=2)
    for _ in range(100):
        table.deal(PLENTY, now=0.0)
        for seq in range(1, peer.granted):
            send(table, peer, seq)
    assert len(peer.watermark.above) < 2 * WINDOW * peer.streams
    assert send(table, peer, 0) is None
    assert peer.watermark.above == []
    assert table.deal(PLENTY, now=0.0) == [peer]


widths = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 3)), min_size=1, max_size=5)


def deal_plainly(table, free):
    """The rule, as plainly as it can be said. One message at a time: to whom has the least under
    way, and of those to who waits longest."""
    left = free - table.outstanding_columns
    dealt = {}
    while True:
        able = [p for p in table if p.columns and p.is_waiting]
        able = [p for p in able if p.columns <= left or p.outstanding_messages == 0]
        able.sort(key=lambda p: (p.outstanding_messages, p.dealt_at))
        if not able or able[0].columns > left:
            return list(dealt)
        table._credit._extend(able[0], 0.0)
        left -= able[0].columns
        dealt[able[0].session] = None


@given(widths, st.lists(st.integers(-3, 60), max_size=40), st.randoms(use_true_random=False))
def test_credit_is_dealt_by_the_rule(shapes, frees, rng):
    tables = new_table(), new_table()
    both = [[join(t, i, *shape) for t in tables] for i, shape in enumerate(shapes)]
    for free in frees:
        under_way = tables[0].outstanding_columns
        assert [p.session for p in tables[0].deal(free, now=0.0)] == deal_plainly(tables[1], free)
        assert [p.granted for p in tables[0]] == [p.granted for p in tables[1]]
        assert tables[0].outstanding_columns <= max(free, under_way)
        for pair in rng.sample(both, rng.randint(0, len(both))):
            if pair[0].outstanding_messages:
                seq = rng.randrange(pair[0].watermark.below, pair[0].granted)
                for table, peer in zip(tables, pair, strict=True):
                    send(table, peer, seq)


# -------------------- earned, and taken back


def test_a_newcomer_has_one_message_of_credit_until_one_is_admitted(table):
    peer = newcomer(table, 1, columns=2, streams=3)
    table.deal(64, BATCH, now=0.0)
    assert peer.granted == 1
    table.settle(peer, 0, "nonfinite")
    table.deal(64, BATCH, now=0.0)
    assert peer.outstanding_messages == 1
    send(table, peer, 1)
    table.deal(64, BATCH, now=0.0)
    assert peer.outstanding_messages == 3 * WINDOW


def test_credit_that_lies_unused_is_taken_back_while_others_wait(table):
    idle, busy = join(table, 1, columns=8), join(table, 2, columns=8)
    table.deal(16, now=0.0)
    assert (idle.granted, busy.granted) == (1, 1)
    looks = every_quarter(table, until=UNUSED_S)
    assert not any(looks)
    busy.last_heard = busy.used_at = 1.75
    assert table.take_back(1.75) == [idle]
    assert table.outstanding_columns == 8
    assert table.deal(16, now=1.75) == [busy]
    # It has credit that it has not used: it waits for none, and has none to be taken back. Nobody
    # takes back what nobody else wants.
    assert (idle.granted, idle.is_waiting) == (1, False)
    assert not any(every_quarter(table, until=6.0, since=2.0))
    # A late message of it is still allowed, and is measured.
    table.find(idle.session, 5.0)
    assert send(table, idle, 0) is None
    table.deal(32, now=5.0)
    assert (idle.outstanding_messages, idle.is_brisk) == (1, False)
    assert idle.kept_columns == 8


def every_quarter(table, until, since=0.0):
    """The credit that is taken back, by a learner that never stands still."""
    looks = range(round(4 * since), round(4 * until) + 1)
    return [table.take_back(look / 4) for look in looks]


def test_many_that_joined_and_never_send_cost_a_deal_nothing_until_they_do(table):
    idle, busy = [newcomer(table, actor) for actor in range(2, 502)], join(table, 1)
    table.deal(600, now=0.0)
    send(table, busy, 0)
    # Others wait from here on: there is room for one only, and a second is wanted.
    every_quarter(table, until=2.0)
    table.deal(1, now=2.0)
    assert not busy.is_resting
    assert all(peer.is_resting for peer in idle)
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(event) if event == "call" else None)
    table.deal(1, now=2.01)
    sys.setprofile(None)
    assert len(calls) < 60
    table.find(idle[7].session, 2.02)
    send(table, idle[7], 0)
    assert table.deal(2, now=2.03) == [idle[7]]
    # So it is where the learner stood still: all have a moment again.
    table.take_back(60.0)
    assert not any(peer.is_resting for peer in idle)


def test_a_deal_looks_at_no_more_newcomers_than_it_has_room_for(table):
    crowd = [newcomer(table, actor, columns=2) for actor in range(2000)]
    looked_at = []
    sys.setprofile(lambda frame, event, arg: looked_at.append(event) if event == "call" else None)
    dealt = table.deal(16, 16, now=0.0)
    sys.setprofile(None)
    assert len(looked_at) < 300
    # The last, the first, the last but one: which of them never send nobody knows.
    assert dealt == [crowd[place] for place in (-1, 0, -2, 1, -3, 2, -4, 3)]
    assert table.outstanding_columns == 16


def test_a_learner_that_stood_still_takes_nothing_back(table):
    for actor in (1, 2):
        join(table, actor, columns=8)
    table.deal(8, now=0.0)
    assert [table.take_back(now) for now in (0, 0.2, 600, 600.2)] == [[]] * 4


def test_a_few_that_take_long_do_not_make_it_usual(table):
    fast, slow = join(table, 1), join(table, 2)
    for tick in range(1, 501):
        now = tick / 50
        table.deal(64, now=now)
        for peer in (fast, slow) if tick % 50 == 0 else (fast,):
            table.find(peer.session, now)
            send(table, peer, peer.watermark.below)
    table.deal(64, now=10.0)
    assert (fast.is_brisk, slow.is_brisk) == (True, False)


# -------------------- a minute with others


@dataclass
class Actor:
    """Sends a message each so many seconds, if it has credit, and again if it is told to."""

    takes_s: float
    columns: int = 8
    most: int = 10**9
    looks_every_s: float = 0.0
    # How often it sends again what it is told to.
    heeds: int = 10**9
    # After so many messages each takes so long, and none is fit to be trained on.
    turns_after: int = 10**9
    turned_takes_s: float = 0.0
    # So many messages at first are refused, one after the other.
    num_refused: int = 0
    next_seq: int = 0
    num_sent: int = 0
    ready_at: float = 0.0
    peer: Peer | None = None
    has_sent: bool = False


class Minute:
    """A learner that trains a batch after another, and actors that join in turn."""

    STEP_S = 0.005

    def __init__(self, update_s):
        self.table = new_table()
        self.free, self.full, self.now = NUM_SLOTS * BATCH, 0, 0.0
        self.update_s, self.trained_at, self.is_due = update_s, update_s, False

    def run(self, seconds, actors, join_every_s=0.1):
        """How many messages of the first came through."""
        for step in range(int(seconds / self.STEP_S)):
            self.now = step * self.STEP_S
            for number, actor in enumerate(actors):
                if actor.peer is None and self.now >= number * join_every_s:
                    self.is_due = True
                    actor.peer = newcomer(self.table, number, actor.columns, now=self.now)
                    actor.ready_at = self.now + actor.takes_s
                looks_every = round(actor.looks_every_s / self.STEP_S) or 1
                if actor.peer is not None and step % looks_every == 0:
                    self._act(actor, actor.peer)
            if self.full >= BATCH and self.now >= self.trained_at:
                self.full, self.free = self.full - BATCH, self.free + BATCH
                self.trained_at, self.is_due = self.now + self.update_s, True
            if step % 50 == 0:
                self.is_due |= bool(self.table.take_back(self.now))
            # As a learner does it: when something has changed, and now and then.
            if self.is_due or step % round(DEAL_EVERY_S / self.STEP_S) == 0:
                self.table.deal(self.free, BATCH, now=self.now)
            self.is_due = False
            assert self.table.outstanding_columns <= self.free
        return actors[0].num_sent

    def _act(self, actor, peer):
        self.table.find(peer.session, self.now)  # all have heartbeats
        grant = peer.grant(NOW)
        if actor.ready_at == math.inf and peer.outstanding_messages:
            actor.ready_at = self.now + actor.turned_takes_s
        seq = peer.watermark.below if actor.heeds else actor.next_seq
        if grant.again == seq:
            actor.has_sent, actor.heeds = False, actor.heeds - 1
        is_ready = self.now >= actor.ready_at and actor.num_sent < actor.most
        if not is_ready or actor.has_sent or seq >= grant.granted:
            return
        data = data_of(peer, seq)
        assert self.table.reserve(peer, data, NOW) is None
        actor.next_seq = seq + 1
        if not self.table.has_room(peer, data, self.free):
            if actor.heeds:
                actor.has_sent = True
            else:
                actor.ready_at += actor.takes_s
            return
        self.is_due = True
        if actor.num_refused:
            self.table.settle(peer, seq, "stale")
            actor.num_refused -= 1
            actor.ready_at, actor.has_sent = max(actor.ready_at + actor.takes_s, self.now), False
            return
        if actor.num_sent >= actor.turns_after:
            self.table.settle(peer, seq, "invalid")
            actor.ready_at = math.inf
            return
        self.table.settle(peer, seq, None)
        self.free, self.full = self.free - peer.columns, self.full + peer.columns
        # While it waited for credit it unrolled the next one.
        actor.ready_at = max(actor.ready_at + actor.takes_s, self.now)
        actor.num_sent, actor.has_sent = actor.num_sent + 1, False


OTHERS = {
    "four that send nothing": [Actor(0.0, BATCH, most=0) for _ in range(4)],
    "sixty that send nothing": [Actor(0.0, BATCH, most=0) for _ in range(60)],
    "forty that send one message": [Actor(0.02, most=1) for _ in range(40)],
    "forty that look seldom and send one": [
        Actor(0.02, most=1, looks_every_s=0.25) for _ in range(40)
    ],
    "forty that send five messages": [Actor(0.02, most=5) for _ in range(40)],
    "ten with a message each 4 s": [Actor(4.0) for _ in range(10)],
    "two with a message each second": [Actor(1.0) for _ in range(2)],
    "forty that never send again": [Actor(3.0, heeds=0) for _ in range(40)],
    "forty that send again once": [Actor(3.0, heeds=1) for _ in range(40)],
    "three that were quick and fall silent": [Actor(0.02, BATCH, most=22) for _ in range(3)],
    "eight that were quick, then hold all credit and send nothing fit": [
        Actor(0.02, BATCH, turns_after=22, turned_takes_s=0.9) for _ in range(8)
    ],
    "eight that were quick, then hold credit for a moment and send nothing fit": [
        Actor(0.02, BATCH, turns_after=22, turned_takes_s=0.03) for _ in range(8)
    ],
    "eight that hold credit for less than a moment and send nothing fit": [
        Actor(0.08, BATCH, turns_after=0, turned_takes_s=0.08) for _ in range(8)
    ],
    "two that hold credit for a moment and send nothing fit": [
        Actor(0.11, BATCH, turns_after=0, turned_takes_s=0.11) for _ in range(2)
    ],
}


@pytest.mark.parametrize("update_s", first_of(0.1, 0.01))
@pytest.mark.parametrize("others", OTHERS)
def test_who_does_not_use_its_credit_soon_costs_the_others_little(others, update_s):
    alone = Minute(update_s).run(30.0, [Actor(0.02)])
    company = [replace(other) for other in OTHERS[others]]
    beset = Minute(update_s).run(30.0, [Actor(0.02), *company])
    came = sum(other.num_sent * other.columns for other in company) / Actor.columns
    assert beset + came >= 0.97 * alone > 500
    if min(min(other.heeds, other.turns_after) for other in company) < 100:
        return
    # Nor do they suffer: who takes a second for each message loses hardly one, and of forty that
    # take turns one may have its own behind the end.
    able = sum(min(other.most, int(24 / max(other.takes_s, 0.02))) for other in company)
    assert sum(other.num_sent for other in company) >= able - 1


@pytest.mark.parametrize("num_slow", [2, 8])
@pytest.mark.parametrize("takes_s", [0.07, 0.11, 0.2])
def test_in_a_fleet_of_quick_and_slower_actors_as_much_comes_as_from_the_quick_alone(
    takes_s, num_slow
):
    """As where one is on the learner's host, and the others on a line of a tenth of a second."""
    # Eight of 0.07 s send most messages beside one of 0.005 s, and so they set what is usual.
    for quick_s, share in ((0.02, 0.97), (0.005, 0.7)):
        alone = Minute(0.01).run(30.0, [Actor(quick_s)])
        slower = [Actor(takes_s) for _ in range(num_slow)]
        beset = Minute(0.01).run(30.0, [Actor(quick_s), *slower])
        assert beset + sum(each.num_sent for each in slower) >= share * alone


@pytest.mark.parametrize("num_refused", [1, 2])
def test_newcomers_whose_first_messages_are_stale_do_not_keep_each_other_out(num_refused):
    """As after an outage: all of them bring what they made meanwhile."""
    quick = [Actor(0.02) for _ in range(4)]
    stale = [Actor(0.02, num_refused=num_refused) for _ in range(40)]
    Minute(0.1).run(10.0, [*quick, *stale], join_every_s=0.0)
    assert all(actor.num_sent > 0 for actor in stale)


@pytest.mark.parametrize("update_s", [0.1, 0.01])
@pytest.mark.parametrize("num_busy", [0, 1])
def test_a_newcomer_has_its_turn_soon_though_hundreds_joined_before_that_send_nothing(
    num_busy, update_s
):
    silent, late = [Actor(0.0, BATCH, most=0) for _ in range(400)], Actor(0.02)
    busy = [Actor(0.02) for _ in range(num_busy)]
    Minute(update_s).run(4.0 + 4.0, [*busy, *silent, late], join_every_s=0.01)
    assert late.num_sent > 0


def test_a_newcomer_has_its_turn_in_the_end_though_others_come_after_it_all_the_time():
    silent, late = [Actor(0.0, BATCH, most=0) for _ in range(120)], Actor(0.02)
    Minute(0.1).run(40.0, [Actor(0.02), *silent[:10], late, *silent[10:]], join_every_s=0.3)
    assert late.num_sent > 0


# -------------------- without room


@pytest.fixture
def late_and_other(table):
    """One that is known to be slow, and has credit without room."""
    late, other = join(table, 1, columns=8), join(table, 2, columns=8)
    late.usual_s = 5.0
    assert table.deal(8, now=0.0) == [other, late]
    assert (late.kept_columns, late.outstanding_messages, other.kept_columns) == (0, 1, 8)
    return late, other


def test_who_is_slow_finds_room_or_has_the_next_and_is_told_once(table, late_and_other):
    late, other = late_and_other
    data = data_of(late, 0)
    assert table.reserve(late, data, NOW) is None
    assert table.has_room(late, data, free_columns=16)
    assert not table.has_room(late, data, free_columns=8)
    assert late.grant(NOW).again == NO_SEQ
    assert table.deal(8, now=0.01) == []
    assert send(table, other, 0) is None
    assert table.deal(8, now=0.01) == [late]
    assert (late.kept_columns, late.granted) == (8, 1)
    assert [late.grant(NOW).again for _ in range(2)] == [0, NO_SEQ]
    assert table.has_room(late, data, free_columns=8)
    assert send(table, late, 0) is None
    assert table.outstanding_columns == 0


@pytest.mark.parametrize("verdict", [None, "invalid"])
def test_who_is_called_and_brings_what_is_refused_is_not_ahead_the_next_time(
    table, late_and_other, verdict
):
    late, other = late_and_other
    assert not table.has_room(late, data_of(late, 0), free_columns=8)
    send(table, other, 0)
    assert table.deal(8, now=0.01) == [late]
    table.settle(late, 0, verdict)
    assert late.heeds_calls is (verdict is None)


def test_who_waits_for_room_gets_newer_weights(table, late_and_other):
    late, _ = late_and_other
    late.num_pulled, late.pulled_at = FREE_PULLS, 99.0
    assert not late.may_pull(Version(2, 0), 100.0), "it has had credit for long"
    assert table.reserve(late, data_of(late, 0), NOW) is None
    assert not table.has_room(late, data_of(late, 0), free_columns=8)
    assert late.may_pull(Version(2, 0), 99.0)
    late.num_pulled = FREE_PULLS
    assert late.may_pull(Version(2, 0), 100.0)


def test_on_a_slow_line_it_takes_the_room_of_the_one_that_is_idle(table, late_and_other):
    late, other = late_and_other
    data = data_of(late, 0)
    assert not table.has_room(late, data, free_columns=8)
    send(table, other, 0)
    assert table.deal(8, now=1.0) == [late]
    late.lapse()
    table.find(other.session, 9.0)
    assert table.deal(8, now=9.0) == [other]
    assert table.has_room(late, data, free_columns=8)
    assert other.kept_columns == 0


def test_one_is_called_back_for_one_at_a_time_however_much_room_there_is(table):
    late, other = join(table, 1, columns=4), join(table, 2, columns=4)
    table.deal(16, now=0.0)
    late.lapse()
    assert not any(table.has_room(late, data_of(late, seq), free_columns=8) for seq in (1, 0))
    send(table, other, 0)
    # The peers behind it do not wait for the second one.
    assert table.deal(64, now=0.01) == [late, other]
    told = [late.grant(NOW).again]
    assert table.deal(64, now=0.02) == []
    send(table, late, 0)
    assert table.deal(64, now=0.02) == [late]
    told.append(late.grant(NOW).again)
    assert told == [0, 1]


def test_where_those_who_were_brisk_hold_a_batch_too_no_more_is_kept_than_is_free(table):
    join(table, 1, columns=BATCH)
    newcomer(table, 2, columns=BATCH)
    table.deal(2 * BATCH, BATCH, now=0.0)
    assert table.outstanding_columns == 2 * BATCH
    brisk = join(table, 3, columns=8, now=1.0)
    table.deal(2 * BATCH, BATCH, now=1.0)
    assert brisk.kept_columns == BATCH
    assert table.outstanding_columns <= 2 * BATCH


def test_what_comes_again_while_it_waits_for_room_says_nothing_of_its_actor(table, late_and_other):
    late, _ = late_and_other
    late.usual_s = 0.1
    for now in (1.0, 11.0, 21.0):
        table.find(late.session, now)
        assert not table.has_room(late, data_of(late, 0), free_columns=8)
    assert late.usual_s < 1.0


def test_who_cannot_be_called_back_keeps_its_room_in_the_next_session_on_a_slow_line(table):
    late, other = newcomer(table, 1, columns=8), join(table, 2, columns=8)
    late.gives_way = False
    for now in (0.0, 0.2):
        table.find(other.session, now)
        other.used_at = now
        table.deal(16, now=now)
    # The other one has all: what comes after a moment ends the session.
    assert (late.kept_columns, other.kept_columns) == (0, 16)
    assert not table.has_room(late, data_of(late, 0), free_columns=16)
    again = newcomer(table, 1, columns=8, now=2.0)
    again.gives_way = False
    for seq, now in enumerate((2.0, 2.4)):
        table.find(other.session, now)
        other.used_at = now
        send(table, other, seq)
        table.deal(16, now=now)
    assert table.has_room(again, data_of(again, 0), free_columns=16)
    assert send(table, again, 0) is None
    assert not again.is_owed_room


def test_a_cut_is_told_with_every_grant_until_its_seq_has_come(table):
    peer = join(table, 1)
    table.deal(PLENTY, now=0.0)
    assert peer.grant(NOW).cut == NO_SEQ
    peer.cut = peer.watermark.below
    assert [peer.grant(NOW).cut for _ in range(2)] == [0, 0]
    send(table, peer, 0)
    assert peer.grant(NOW).cut == NO_SEQ
