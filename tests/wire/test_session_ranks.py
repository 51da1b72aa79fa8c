"""Ranks: every actor its own; in lockstep there are only so many, and a lost one's is free."""

import pytest

from impala_async.wire import session
from impala_async.wire.messages import REJECT_CODES, Reject
from impala_async.wire.peer import Peer
from impala_async.wire.session import SessionTable
from tests.wire.tables import LEASE_S, greet, hello_of, join, new_table, send

FULL = REJECT_CODES.index("full")


def join_and_send(table: SessionTable, actor: int) -> Peer:
    """Of whom something was settled, so that it is remembered."""
    peer = join(table, actor)
    table.deal(4, now=0.0)
    assert send(table, peer, 0) is None
    return peer


def test_every_actor_has_a_rank_of_its_own_and_none_comes_again() -> None:
    table = new_table()
    peers = [join_and_send(table, actor) for actor in range(3)]
    assert [peer.rank for peer in peers] == [0, 1, 2]
    table.end(peers[1])
    assert join(table, 7).rank == 3
    assert join(table, 1).rank == 1


def test_where_ranks_are_places_that_of_a_lost_one_is_free() -> None:
    table = new_table(num_ranks=3)
    peers = [join(table, actor) for actor in range(3)]
    assert [peer.rank for peer in peers] == [0, 1, 2]
    table.end(peers[1])
    assert join(table, 7).rank == 1
    # Its former one is taken, so it gets the first that is free.
    table.end(peers[0])
    assert join(table, 1).rank == 0


def test_who_comes_back_has_its_former_place_if_nobody_else_has_it() -> None:
    table = new_table(num_ranks=3)
    for peer in [join_and_send(table, actor) for actor in range(3)]:
        table.end(peer)
    assert [join(table, actor).rank for actor in (2, 0, 1)] == [2, 0, 1]


def test_a_new_session_of_the_same_actor_keeps_its_place() -> None:
    table = new_table(num_ranks=2)
    join(table, 0)
    former = join(table, 1)
    again = join(table, 1)
    assert again.rank == former.rank == 1
    assert again.session != former.session
    assert again.begins_at is None
    assert table.peer_of(former.session) is None
    assert table.peer_of(again.session) is again


def test_who_has_no_place_is_told_to_come_again() -> None:
    table = new_table(num_ranks=2)
    join(table, 0)
    join(table, 1)
    refusal = table.hello(hello_of(2), b"route", 0.0)
    assert isinstance(refusal, Reject)
    assert refusal.code == FULL
    assert "already has its 2 actors" in refusal.text
    assert refusal.retry_after_s > 0
    # One that is here may say hello again, and one whose lease is over makes room.
    assert greet(table, 1).rank == 1
    table.expire(0.0)
    table.expire(4.0)
    table.expire(8.0)
    table.expire(LEASE_S + 1)
    assert join(table, 2, now=LEASE_S + 1).rank == 0


def test_a_hello_takes_no_place_from_who_joins() -> None:
    table = new_table(num_ranks=2)
    for stranger in range(100, 200):
        greet(table, stranger)
    assert sorted(join(table, actor).rank for actor in range(2)) == [0, 1]


def test_a_place_that_another_took_meanwhile_is_asked_for_again() -> None:
    table = new_table(num_ranks=2)
    early, other, late = greet(table, 0), greet(table, 1), greet(table, 2)
    assert (early.rank, other.rank, late.rank) == (0, 1, 0)
    assert table.join(late, 4, 1)
    assert not table.join(early, 4, 1)
    table.end(early)
    table.end(other)
    assert join(table, 0).rank == 1


def test_strangers_use_up_no_numbers_of_actors() -> None:
    table = new_table()
    for stranger in range(100, 200):
        table.end(greet(table, stranger))
    assert [join(table, actor).rank for actor in range(3)] == [0, 1, 2]


def test_nobody_gives_way_where_all_places_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_SESSIONS", 3)
    table = new_table(num_ranks=2)
    actors = [greet(table, actor) for actor in range(2)]
    greet(table, 100)
    assert all(table.join(actor, 1, 1) for actor in actors)
    refusal = table.hello(hello_of(101), b"route", 0.0)
    assert isinstance(refusal, Reject)
    assert refusal.code == FULL


@pytest.mark.parametrize("arrivals", [(0, 1, 2), (2, 1, 0), (5, 0, 6)])
def test_a_resumed_learner_has_places_for_old_and_new(arrivals: tuple[int, ...]) -> None:
    former = new_table(num_ranks=3)
    for actor in range(3):
        join(former, actor)
    table = new_table(num_ranks=3)
    table.restore_watermarks(former.watermarks(), 0.0)
    ranks = [join(table, actor).rank for actor in arrivals]
    assert sorted(ranks) == [0, 1, 2]
    # Old ones first, if they come first.
    if max(arrivals) < 3:
        assert ranks == list(arrivals)
