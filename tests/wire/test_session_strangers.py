"""Sessions without a Spec: however many there are, those at work do not feel them, and an actor
whose session gave way to others comes again."""

import pytest

from impala_async.wire import session
from impala_async.wire.peer import Peer
from impala_async.wire.session import MAX_OVER_ONE_CONNECTION, MAX_STRANGERS
from tests.wire.tables import LEASE_S, actor_id, greet, hello_of, join, new_table, send

FLOOD = 3 * MAX_STRANGERS


def test_whatever_is_done_often_passes_strangers_by() -> None:
    table = new_table()
    actor = join(table, 0)
    for stranger in range(1, FLOOD):
        greet(table, stranger)
    assert len(table) == MAX_STRANGERS + 1
    assert table.num_given_way == FLOOD - 1 - MAX_STRANGERS
    assert list(table.joined) == [actor]
    assert table.silent(LEASE_S, 0.0) == [actor]
    assert table.deal(100, now=0.0) == [actor]
    for now in (0.0, 4.0, 8.0):
        table.find(actor.session, now)
        table.expire(now)
    assert len(table.expire(LEASE_S + 0.1)) == MAX_STRANGERS
    assert list(table) == [actor]


def test_the_oldest_stranger_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_STRANGERS", 2)
    table = new_table()
    here, oldest, other = join(table, 0), greet(table, 1), greet(table, 2)
    newest = greet(table, 3)
    assert list(table) == [here, other, newest]
    assert table.peer_of(oldest.session) is None


def test_who_gave_way_while_it_built_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_STRANGERS", 2)
    table = new_table()
    builder = greet(table, 7, number=7)
    for stranger in range(100, 200):
        greet(table, stranger)
    # Its Spec is of no session; it says hello again, and its number is its own.
    assert table.find(builder.session, 1.0) is None
    again = table.hello(hello_of(7, number=7), b"route-7", 1.0)
    assert isinstance(again, Peer)
    assert again.rank == builder.rank == 7
    assert table.join(again, 1, 1)
    table.deal(4, now=0.0)
    assert send(table, again, 0) is None


@pytest.mark.parametrize("joins", [False, True])
def test_over_one_connection_come_only_so_many(joins: bool) -> None:
    table = new_table()
    actor, builder = join(table, 0), greet(table, 1)
    flood = []
    for stranger in range(100, 200):
        peer = table.hello(hello_of(stranger), b"the flood", 0.0)
        assert isinstance(peer, Peer)
        assert not joins or table.join(peer, 1, 1)
        flood.append(peer)
    # The last of them are there, and whoever came over other connections.
    assert {*table} == {actor, builder, *flood[-MAX_OVER_ONE_CONNECTION:]}
    assert table.num_given_way == 100 - MAX_OVER_ONE_CONNECTION


def test_an_actor_that_comes_again_over_its_connection_is_no_other() -> None:
    table = new_table()
    former = join(table, 1)
    again = join(table, 1)
    assert (again.rank, list(table)) == (former.rank, [again])
    assert table.num_given_way == 0


def test_who_joined_and_never_sent_anything_is_forgotten() -> None:
    table = new_table()
    worker = join(table, 1)
    table.deal(4, now=0.0)
    assert send(table, worker, 0) is None
    idle = [join(table, actor) for actor in range(100, 200)]
    for peer in (worker, *idle):
        table.end(peer)
    assert [*table.watermarks()] == [actor_id(1).hex()]


def test_a_number_that_strangers_claim_stays_its_owners() -> None:
    table = new_table()
    for stranger in range(100, 200):
        greet(table, stranger, number=3)
    assert greet(table, 3, number=3).rank == 3
    # What is nobody's number is asked for by an actor that was started by hand, and kept.
    by_hand = greet(table, 50)
    assert greet(table, 51, number=by_hand.rank).rank != by_hand.rank
    table.end(by_hand)
    assert greet(table, 52, number=by_hand.rank).rank == by_hand.rank
