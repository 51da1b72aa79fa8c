"""What one session may send: its window, gaps, and credit for which no room is kept any longer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.wire.peer import WINDOW, Peer, Watermark
from tests.wire.tables import NOW

seqs = st.integers(0, 30)
steps = st.lists(st.tuples(st.booleans(), seqs), max_size=40)


@settings(deadline=None)
@given(steps)
def test_it_is_the_set_of_settled_seqs(steps):
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
        assert watermark.below == below
        assert watermark.above == sorted(s for s in settled if s > below)
        again = Watermark(watermark.below, watermark.above)
        assert (again.below, again.above) == (watermark.below, watermark.above)
        for until in range(33):
            assert watermark.num_unsettled_below(until) == len(set(range(until)) - settled)


def test_what_is_restored_is_put_in_order():
    watermark = Watermark(3, (7, 1, 3, 4, 7))
    assert (watermark.below, watermark.above) == (5, [7])


@pytest.fixture
def peer():
    return Peer(b"s" * 16, b"a" * 16, 0, Watermark(), 0.0, b"route", columns=4, is_brisk=True)


def test_room_is_kept_for_what_was_granted_and_has_not_lapsed(peer):
    peer.granted = 3
    assert peer.kept_columns == 12
    peer.lapsed = 2
    assert peer.kept_columns == 4
    peer.watermark.settle(0)
    assert peer.kept_columns == 4
    peer.watermark.settle(1)
    peer.watermark.settle(2)
    assert peer.kept_columns == 0


def test_a_window_is_one_message_until_it_is_earned(peer):
    for streams, is_brisk, window in ((1, True, WINDOW), (3, True, 3 * WINDOW), (3, False, 1)):
        peer.streams, peer.is_brisk = streams, is_brisk
        peer.granted = window - 1
        assert peer.is_waiting
        peer.extend()
        assert not peer.is_waiting


def test_one_more_message_is_one_that_is_still_to_come(peer):
    peer.watermark.settle(1)
    peer.extend()
    assert peer.granted == 1
    peer.extend()
    assert peer.granted == 3
    assert peer.grant(NOW).granted == 3
