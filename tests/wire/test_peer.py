"""What one session may send: its window, gaps, and credit for which no room is kept any longer."""

import pytest

from impala_async.wire.peer import WINDOW, Peer
from impala_async.wire.watermark import Watermark
from tests.wire.tables import NOW


@pytest.fixture
def peer() -> Peer:
    return Peer(b"s" * 16, b"a" * 16, 0, Watermark(), 0.0, b"route", columns=4, is_brisk=True)


def test_room_is_kept_for_what_was_granted_and_has_not_lapsed(peer: Peer) -> None:
    peer.granted = 3
    assert (peer.kept_columns, peer.num_lapsed) == (12, 0)
    peer.lapsed = 2
    assert (peer.kept_columns, peer.num_lapsed) == (4, 2)
    peer.watermark.settle(0)
    assert (peer.kept_columns, peer.num_lapsed) == (4, 1)
    peer.watermark.settle(1)
    peer.watermark.settle(2)
    assert (peer.kept_columns, peer.num_lapsed) == (0, 0)


def test_a_window_is_one_message_until_it_is_earned(peer: Peer) -> None:
    assert peer.window == WINDOW
    peer.streams = 3
    assert peer.window == 3 * WINDOW
    peer.is_brisk = False
    assert peer.window == 1
    peer.extend()
    assert not peer.may_have_more


def test_one_more_message_is_one_that_is_still_to_come(peer: Peer) -> None:
    peer.watermark.settle(1)
    peer.extend()
    assert peer.granted == 1
    peer.extend()
    assert peer.granted == 3
    assert peer.grant(NOW).granted == 3
