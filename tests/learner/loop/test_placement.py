"""Actors go to the rank with the fewest, and a rank that has none gets one."""

from impala_async.config.ranks import Place
from impala_async.learner.loop.placement import (
    LET_GO_AFTER_S,
    LOST_S,
    MOST_SENT,
    UNDER_WAY_S,
    Placement,
)

URLS = ("tcp://a:1", "tcp://b:2", "tcp://c:3")


def placement(number=0, most=None):
    made = Placement(Place(number, len(URLS)), most)
    assert not made.is_known
    made.open(URLS)
    assert made.is_known
    return made


def name(number):
    return bytes([number]) * 16


def test_newcomers_are_spread_before_any_has_arrived():
    ranks, num_own = placement(), 0
    sent = []
    for number in range(7):
        url = ranks.send(name(number), num_own, now=0.1 * number)
        num_own += url is None
        sent.append(url)
    assert sent == [None, "tcp://b:2", "tcp://c:3"] * 2 + [None]


def test_counts_of_the_ranks_decide_and_who_asks_again_hears_the_same():
    ranks = placement()
    ranks.note((1, 5, 3))
    assert ranks.send(name(1), num_own=4, now=0.0) == "tcp://c:3"
    ranks.note((1, 5, 9))
    assert ranks.send(name(1), num_own=4, now=UNDER_WAY_S) == "tcp://c:3"
    # So soon it comes back from where it was not let in, whatever else there is.
    ranks.note((1, 5, 0))
    later = 2 * UNDER_WAY_S + 0.1
    assert ranks.send(name(1), num_own=4, now=later) is None
    assert ranks.send(name(1), num_own=4, now=later + LOST_S + 0.1) == "tcp://c:3"


def test_places_are_limited_in_lockstep_and_where_all_are_full_rank_0_says_so():
    ranks = placement(most=2)
    ranks.note((2, 2, 1))
    assert ranks.send(name(1), num_own=2, now=0.0) == "tcp://c:3"
    assert ranks.send(name(2), num_own=2, now=0.1) is None
    ranks.note((2, 0, 2))
    assert not ranks.is_to_let_go(9.0)
    assert not ranks.is_to_let_go(99.0)


def test_strangers_do_not_fill_the_memory():
    ranks = placement()
    for number in range(2 * MOST_SENT):
        ranks.send(number.to_bytes(16), num_own=0, now=0.0)
    assert len(ranks._sent) == MOST_SENT


def test_only_rank_0_sends_actors_on():
    ranks = placement(number=1)
    ranks.note((0, 5, 0))
    assert ranks.send(name(1), num_own=5, now=0.0) is None
    alone = Placement()
    assert alone.is_known
    assert alone.send(name(1), num_own=5, now=0.0) is None
    assert not alone.is_to_let_go(99.0)


def test_the_fullest_lets_one_go_for_a_rank_that_has_had_none_for_a_while():
    first, second = placement(0), placement(1)
    for ranks in (first, second):
        ranks.note((3, 3, 0))
        assert not ranks.is_to_let_go(0.0)
        assert not ranks.is_to_let_go(LET_GO_AFTER_S / 2)
    # One of them, and not again before it can have come.
    assert first.is_to_let_go(LET_GO_AFTER_S)
    assert not second.is_to_let_go(LET_GO_AFTER_S)
    assert not first.is_to_let_go(LET_GO_AFTER_S + 0.1)
    first.note((2, 3, 1))
    assert not first.is_to_let_go(3 * LET_GO_AFTER_S)
    # Who has one alone keeps it, and the clock begins anew.
    first.note((1, 1, 0))
    assert not first.is_to_let_go(4 * LET_GO_AFTER_S)
    assert not first.is_to_let_go(9 * LET_GO_AFTER_S)
