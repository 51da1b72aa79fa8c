"""Actors go to the rank with the fewest, and a rank that has none gets one."""

import math

from impala_async.config.ranks import Place
from impala_async.learner.loop.placement import (
    BUILD_S,
    LET_GO_AFTER_S,
    LOST_S,
    MOST_PLACED,
    SAME_ADDRESS,
    SILENT_S,
    SILENT_TIMES,
    STOOD_STILL_S,
    UNDER_WAY_S,
    Placement,
)

URLS = ("tcp://a:1", "tcp://b:2", "tcp://c:3")


def placement(number=0, most=None, joined=None):
    made = Placement(Place(number, len(URLS)), most)
    assert not made.is_known
    made.open(URLS)
    assert made.is_known
    if joined:
        made.note((joined, joined))
    return made


def name(number):
    return bytes([number]) * 16


def test_newcomers_are_spread_before_any_has_joined():
    ranks = placement()
    sent = [ranks.send(name(number), num_own=0, now=0.1 * number) for number in range(7)]
    assert sent == [None, "tcp://b:2", "tcp://c:3"] * 2 + [None]


def test_before_the_ranks_have_met_nobody_is_forgotten():
    """They meet when each has heard of an environment from an actor."""
    ranks = placement()
    sent = [ranks.send(name(number), num_own=0, now=60.0 * number) for number in range(3)]
    assert sent == [None, "tcp://b:2", "tcp://c:3"]


def test_counts_of_the_ranks_decide_and_who_asks_again_hears_the_same():
    ranks = placement(joined=(1, 5, 3))
    assert ranks.send(name(1), num_own=4, now=0.0) == "tcp://c:3"
    ranks.note(((1, 5, 9), (1, 5, 9)))
    assert ranks.send(name(1), num_own=4, now=UNDER_WAY_S) == "tcp://c:3"
    # So soon it comes back from where it was not let in, and goes anywhere else.
    ranks.note(((1, 5, 0), (1, 5, 0)))
    assert ranks.send(name(1), num_own=4, now=UNDER_WAY_S + 0.1) is None
    assert ranks.send(name(1), num_own=9, now=LOST_S) == "tcp://b:2"
    assert ranks.send(name(1), num_own=4, now=LOST_S + 0.1) == "tcp://c:3"


def test_one_that_builds_its_environments_counts_for_a_while():
    ranks = placement(joined=(2, 1, 2))
    assert ranks.send(name(1), num_own=2, now=0.0) == "tcp://b:2"
    assert ranks.send(name(2), num_own=2, now=BUILD_S - 0.1) is None
    assert ranks.send(name(3), num_own=2, now=BUILD_S + 0.1) == "tcp://b:2"


def test_one_that_was_let_go_and_has_come_counts_once():
    ranks = placement(joined=(2, 0, 2))
    ranks.let_go(name(1), 0.0)
    assert ranks.send(name(1), num_own=1, now=0.1) == "tcp://b:2"
    ranks.note(((1, 1, 2), (1, 1, 2)))
    late = [ranks.send(name(number), num_own=1, now=5.0) for number in (2, 3, 4)]
    assert late == [None, "tcp://b:2", None]


def test_places_are_limited_in_lockstep_and_one_that_gets_free_is_taken_at_once():
    ranks = placement(most=2, joined=(2, 2, 1))
    assert ranks.send(name(1), num_own=2, now=0.0) == "tcp://c:3"
    ranks.note(((2, 2, 2), (2, 2, 2)))
    # Rank 0 says that all are full, again and again.
    for now in (0.1, 2.1, 4.1):
        assert ranks.send(name(2), num_own=2, now=now) is None
    ranks.note(((2, 1, 2), (2, 2, 2)))
    assert ranks.send(name(2), num_own=2, now=6.1) == "tcp://b:2"
    # One that has just lost its place there may have it again.
    ranks.note(((2, 2, 1), (2, 2, 1)))
    assert ranks.send(name(1), num_own=2, now=6.2) == "tcp://c:3"
    for now in (9.0, 99.0):
        assert not ranks.is_to_let_go(now)


def test_strangers_neither_fill_the_memory_nor_keep_actors_from_a_rank():
    ranks = placement(joined=(1, 1, 1))
    for number in range(2 * MOST_PLACED):
        ranks.send(number.to_bytes(16), num_own=1, now=0.0)
    assert len(ranks._placed) == MOST_PLACED
    found = {ranks.send(name(number), num_own=1, now=0.1) for number in range(201, 231)}
    assert found == {None, "tcp://b:2", "tcp://c:3"}


def look(ranks, start, seconds, admitted=0, usual_s=math.inf, is_waiting=True):
    """Look each second for so long; after how many of them it was silent, None for never."""
    silent_after = None
    for second in range(int(seconds) + 1):
        ranks.note_admitted(admitted, usual_s, start + second, is_waiting=is_waiting)
        if ranks.is_silent and silent_after is None:
            silent_after = second
    return silent_after


def test_where_nothing_comes_of_those_who_have_joined_they_do_not_count():
    ranks = placement(joined=(5, 1, 1))
    assert look(ranks, 1000.0, 2 * SILENT_S) == SILENT_S + 1
    # It is as slow as the others, unless one of them has said that it waits for this one.
    assert ranks.send(name(1), num_own=5, now=1040.0) == "tcp://b:2"
    ranks.note(((0, 1, 1), (5, 1, 1)))
    assert ranks.send(name(2), num_own=5, now=1060.0) is None
    # One message is enough, and a rank that has no room waits for none.
    assert look(ranks, 1041.0, SILENT_S, admitted=16) is None
    assert look(ranks, 1062.0, 2 * SILENT_S, admitted=16, is_waiting=False) is None
    # Nobody is blamed where the learner itself stood still.
    ranks.note_admitted(16, math.inf, 1102.0 + SILENT_S + STOOD_STILL_S, is_waiting=True)
    assert not ranks.is_silent


def test_slow_ones_are_waited_for_in_a_new_session_too():
    ranks = placement()
    assert look(ranks, 0.0, 5 * 60, usual_s=60.0) == SILENT_TIMES * 60 + 1
    assert look(ranks, 301.0, 5 * 60, admitted=16) == SILENT_TIMES * 60 + 1


def test_only_rank_0_sends_actors_on_and_nobody_where_two_have_one_address(caplog):
    ranks = placement(number=1, joined=(0, 5, 0))
    assert ranks.send(name(1), num_own=5, now=0.0) is None
    alone = Placement()
    assert alone.is_known
    assert not alone.can_send
    assert alone.send(name(1), num_own=5, now=0.0) is None
    assert not alone.is_to_let_go(99.0)
    assert caplog.messages == []
    alike = Placement(Place(0, 2))
    alike.open(["tcp://127.0.0.1:5555"] * 2)
    assert alike.is_known
    assert not alike.can_send
    assert caplog.messages == [f"no actor is sent to another rank: {SAME_ADDRESS}"]
    alike.note(((5, 0), (5, 0)))
    assert alike.send(name(1), num_own=5, now=0.0) is None
    assert not any(alike.is_to_let_go(now) for now in (0.0, 99.0))


def test_the_fullest_lets_one_go_for_a_rank_that_has_had_none_for_a_while():
    first, second = placement(0, joined=(3, 3, 0)), placement(1, joined=(3, 3, 0))
    for ranks in (first, second):
        assert not ranks.is_to_let_go(0.0)
        assert not ranks.is_to_let_go(LET_GO_AFTER_S / 2)
    # One of them, and not again before it can have come.
    assert first.is_to_let_go(LET_GO_AFTER_S)
    assert not second.is_to_let_go(LET_GO_AFTER_S)
    assert not first.is_to_let_go(LET_GO_AFTER_S + 0.1)
    # While somebody is there who may be making environments, it is waited for longer.
    first.note(((3, 3, 0), (3, 3, 1)))
    assert not first.is_to_let_go(2 * LET_GO_AFTER_S)
    assert first.is_to_let_go(LET_GO_AFTER_S + SILENT_S)
    # As long again as its own actors would take for a trajectory, however long that is.
    look(first, 50.0, 1.0, usual_s=60.0)
    assert not first.is_to_let_go(SILENT_TIMES * 60)
    assert first.is_to_let_go(LET_GO_AFTER_S + SILENT_S + SILENT_TIMES * 60)
    first.note(((2, 3, 1), (2, 3, 1)))
    assert not first.is_to_let_go(999 * LET_GO_AFTER_S)
    # One that has an actor alone keeps it, and the clock begins anew.
    first.note(((1, 1, 0), (1, 1, 0)))
    assert not first.is_to_let_go(1000 * LET_GO_AFTER_S)
    assert not first.is_to_let_go(2000 * LET_GO_AFTER_S)


def test_who_is_let_go_is_told_where_to_go_at_whichever_rank_it_asks():
    for number in (0, 1):
        ranks = placement(number, joined=(3, 4, 0))
        ranks.let_go(name(1), now=5.0)
        assert ranks.send(name(1), num_own=2, now=5.1) == "tcp://c:3"
    # It reads that between two steps of its environments, which may take long.
    for late_s in (UNDER_WAY_S + 0.1, LOST_S - 1):
        for number in (0, 1):
            ranks = placement(number, joined=(3, 4, 0))
            ranks.let_go(name(1), now=5.0)
            asked_at = 5.0 + late_s
            assert ranks.send(name(1), num_own=2, now=asked_at) == "tcp://c:3"
            # From then on it is as any other that was sent there.
            assert ranks.send(name(1), num_own=2, now=asked_at + UNDER_WAY_S) == "tcp://c:3"
            later = ranks.send(name(1), num_own=2, now=asked_at + UNDER_WAY_S + 0.1)
            assert later != "tcp://c:3"
    # At an address that was given for this rank alone it may come back later.
    assert ranks.send(name(1), num_own=2, now=5.0 + 3 * LOST_S) is None
