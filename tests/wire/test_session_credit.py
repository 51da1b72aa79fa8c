"""Credit: counts that never exceed what is free, dealt so that everybody gets a turn."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.weights import Version
from impala_async.wire.peer import WINDOW
from tests.wire.tables import NOW, greet, join, new_table, send

PLENTY = 1000


@pytest.mark.parametrize("streams", [1, 3])
def test_with_plenty_everybody_gets_a_window(table, streams):
    peers = [join(table, actor, columns=8, streams=streams) for actor in range(3)]
    assert table.deal(PLENTY, now=0.0) == peers
    assert [peer.granted for peer in peers] == [WINDOW * streams] * 3
    assert table.outstanding_columns == 3 * 8 * WINDOW * streams
    assert table.deal(PLENTY, now=0.0) == []


def test_nobody_gets_credit_before_its_schema_is_agreed(table):
    peer = greet(table, 1)
    assert table.deal(PLENTY, now=0.0) == []
    assert peer.granted == 0
    assert table.join(peer, 2, 1)
    assert table.deal(PLENTY, now=0.0) == [peer]


def test_few_columns_reach_as_many_actors_as_they_can(table):
    peers = [join(table, actor, columns=4) for actor in range(3)]
    for too_few in (0, 3, -5):
        assert table.deal(too_few, now=0.0) == []
    assert table.deal(8, now=0.0) == peers[:2]
    # What is under way counts against what is free.
    assert table.deal(11, now=0.0) == []
    # Nobody has a second one before everybody has a first.
    assert table.deal(16, now=0.0) == [peers[2], peers[0]]
    assert [peer.granted for peer in peers] == [2, 1, 1]


def test_every_verdict_but_a_duplicate_gives_credit_back(table):
    peer = join(table, 1, columns=4)
    for granted, version in enumerate((NOW, Version(3, 1), Version(9, 9)), start=1):
        assert table.deal(4, now=0.0) == [peer]
        assert peer.granted == granted
        send(table, peer, granted - 1, version)
        assert table.outstanding_columns == 0
    table.deal(4, now=0.0)
    assert send(table, peer, 0) == "duplicate"
    assert table.outstanding_columns == 4


def test_new_credit_is_for_seqs_that_are_still_to_come(table):
    former = join(table, 1)
    table.deal(PLENTY, now=0.0)
    assert send(table, former, 1) is None
    peer = join(table, 1)
    assert table.deal(1, now=0.0) == [peer]
    assert peer.granted == 1
    # Seq 1 is settled already: the second credit is for seq 2.
    table.deal(2, now=0.0)
    assert (peer.granted, peer.outstanding_messages) == (3, 2)


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


def test_a_wide_actor_has_its_turn_among_narrow_ones(table):
    wide = join(table, 0, columns=16)
    narrow = [join(table, actor, columns=1) for actor in range(1, 4)]
    turns = Counter()
    for i in range(400):
        table.deal(16, now=0.0)
        # The narrow ones never send all at once, so there is always something under way.
        for number, peer in ((0, wide), (1 + i % 3, narrow[i % 3])):
            if peer.outstanding_messages:
                assert send(table, peer, peer.watermark.below) is None
                turns[number] += 1
    assert min(turns[number] for number in range(4)) >= 20


# -------------------- the rule, as plainly as it can be said


widths = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 3)), min_size=1, max_size=5)


def deal_plainly(table, free):
    """One message at a time: to whom has the least under way, and of those to who waits longest."""
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


@settings(deadline=None)
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
