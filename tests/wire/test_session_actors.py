"""Whom a learner knows: ranks, sessions without a Spec, and what outlives a session."""

import json
import time

import pytest

from impala_async.weights import Lineage, Version
from impala_async.wire import session
from impala_async.wire.messages import REJECT_CODES, Reject
from impala_async.wire.peer import Peer
from impala_async.wire.session import (
    MAX_OVER_ONE_CONNECTION,
    MAX_STRANGERS,
    WATERMARK_LIFE_S,
)
from tests.wire.tables import LEASE_S, NOW, actor_id, greet, hello_of, join, new_table, send


def work(table, actor, now=0.0):
    """An actor that is remembered, as something of it was settled."""
    peer = join(table, actor, now=now)
    table.deal(len(table), now=now)
    assert send(table, peer, peer.watermark.below) is None
    return peer


def is_full(table, actor):
    answer = table.hello(hello_of(actor), b"route", 0.0)
    return isinstance(answer, Reject) and answer.code == REJECT_CODES.index("full")


# -------------------- ranks


def test_every_actor_that_worked_has_a_rank_of_its_own_and_none_comes_again(table):
    peers = [work(table, actor) for actor in range(3)]
    assert [peer.rank for peer in peers] == [0, 1, 2]
    table.end(peers[1])
    assert join(table, 7).rank == 3
    assert join(table, 1).rank == 1
    # Strangers use up none.
    for stranger in range(100, 200):
        table.end(greet(table, stranger))
    assert join(table, 8).rank == 4


def test_an_actor_has_the_number_that_its_starter_gave_it(table):
    alone = greet(table, 0)
    # Who has no number was here first; the others are called as their starter calls them.
    numbered = [greet(table, actor, number=number) for actor, number in ((1, 3), (2, 0), (3, 1))]
    assert [alone.rank, *(peer.rank for peer in numbered)] == [0, 3, 2, 1]
    # Started again, before it is known that its former life is over; or a stranger claims it.
    assert [greet(table, actor, number=3).rank for actor in range(4, 10)] == [3] * 6
    assert greet(table, 10).rank == 4
    table.end(alone)
    assert greet(table, 11, number=0).rank == 0


def test_a_rank_is_found_as_fast_however_many_actors_are_remembered(table):
    table.restore_watermarks({f"{actor:032x}": [actor, 1] for actor in range(1, 10_000)}, 0.0)
    assert greet(table, 20_000, now=0.0).rank == 10_000
    began = time.process_time()
    for actor in range(20_001, 20_101):
        greet(table, actor, now=0.0)
    assert time.process_time() - began < 0.04


def test_where_ranks_are_places_that_of_a_lost_one_is_free():
    table = new_table(num_ranks=3)
    peers = [work(table, actor) for actor in range(3)]
    assert is_full(table, 7)
    # One that is here may say hello again.
    again = join(table, 1)
    assert (again.rank, again.begins_at) == (1, None)
    assert again.session != peers[1].session
    for peer in (peers[0], again, peers[2]):
        table.end(peer)
    # The former place, if nobody else has it; else the first that is free.
    assert [join(table, actor).rank for actor in (2, 7, 1)] == [2, 0, 1]
    assert is_full(table, 0)


def test_a_hello_takes_no_place_from_who_joins():
    table = new_table(num_ranks=2)
    for stranger in range(100, 200):
        greet(table, stranger)
    early, other, late = greet(table, 0), greet(table, 1), greet(table, 2)
    assert len({early.rank, other.rank, late.rank}) == 2
    assert table.join(late, 4, 1)
    twin, unlike = (early, other) if early.rank == late.rank else (other, early)
    assert not table.join(twin, 4, 1), "its place is another's by now"
    assert table.join(unlike, 4, 1)
    assert is_full(table, 3)


@pytest.mark.parametrize("arrivals", [(0, 1, 2), (2, 1, 0), (5, 0, 6)])
def test_a_resumed_learner_has_places_for_old_and_new(arrivals):
    former = new_table(num_ranks=3)
    for actor in range(3):
        join(former, actor)
    table = new_table(num_ranks=3)
    table.restore_watermarks(former.watermarks(), 0.0)
    ranks = [join(table, actor).rank for actor in arrivals]
    assert sorted(ranks) == [0, 1, 2]
    # Old ones first, if they come first.
    assert max(arrivals) > 2 or ranks == list(arrivals)


# -------------------- strangers


def test_whatever_is_done_often_passes_strangers_by(table):
    actor, num_strangers = join(table, 0), 3 * MAX_STRANGERS
    for stranger in range(1, 1 + num_strangers):
        greet(table, stranger)
    assert len(table) == MAX_STRANGERS + 1
    assert table.num_given_way == num_strangers - MAX_STRANGERS
    assert list(table.joined) == [actor]
    assert table.silent(LEASE_S, 0.0) == [actor]
    assert table.deal(100, now=0.0) == [actor]
    for now in (0.0, 4.0, 8.0):
        table.find(actor.session, now)
        table.expire(now)
    assert len(table.expire(LEASE_S + 0.1)) == MAX_STRANGERS
    assert list(table) == [actor]


def test_the_oldest_stranger_gives_way_and_comes_again(table, monkeypatch):
    monkeypatch.setattr(session, "MAX_STRANGERS", 2)
    here, builder, other = join(table, 0), greet(table, 7, number=7), greet(table, 2)
    newest = greet(table, 3)
    assert list(table) == [here, other, newest]
    # Its Spec is of no session; it says hello again, and its number is its own.
    assert table.find(builder.session, 1.0) is None
    assert greet(table, 7, number=7).rank == builder.rank == 7


@pytest.mark.parametrize("joins", [False, True])
def test_over_one_connection_come_only_so_many(table, joins):
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
    # An actor that comes again is no other.
    again = join(table, 0)
    assert (again.rank, again in table, table.num_given_way) == (actor.rank, True, 84)


# -------------------- what outlives a session


def test_settled_seqs_outlive_their_sessions(table):
    former = join(table, 1)
    table.deal(4, now=0.0)
    assert send(table, former, 1) is None
    table.end(greet(table, 1))
    peer = join(table, 1)
    assert peer.grant(NOW).settled == 0
    table.deal(4, now=0.0)
    assert send(table, peer, 1) == "duplicate"
    assert send(table, peer, 0) is None
    assert peer.grant(NOW).settled == 2


def test_watermarks_are_saved_and_restored(table):
    first, second = join(table, 1), join(table, 2)
    table.deal(8, now=0.0)
    for peer, seq in ((first, 0), (first, 1), (second, 1)):
        assert send(table, peer, seq) is None
    saved = json.loads(json.dumps(table.watermarks()))
    assert saved == {actor_id(1).hex(): [0, 2], actor_id(2).hex(): [1, 0, 1]}

    resumed = new_table(Lineage(4))
    resumed.restore_watermarks(saved, 100.0)
    # It is known even if it never joins.
    resumed.end(greet(resumed, 1))
    assert resumed.watermarks() == saved
    again = join(resumed, 2)
    assert (again.rank, again.granted) == (1, 0)
    resumed.deal(8, now=0.0)
    assert send(resumed, again, 1, Version(4, 0)) == "duplicate"
    assert greet(resumed, 3).rank == 2
    assert greet(resumed, 1, lowest_unsettled=9).granted == 9


def test_actors_long_gone_are_forgotten_and_too_many_sooner(table, monkeypatch):
    here = work(table, 0)
    for number in (1, 2, 3):
        table.end(work(table, number, now=float(number)))

    def remembered(now):
        table.find(here.session, now)
        table.expire(now)
        return [number for number in range(4) if actor_id(number).hex() in table.watermarks()]

    for now in range(0, int(WATERMARK_LIFE_S), 4):
        assert remembered(now) == [0, 1, 2, 3]
    assert remembered(WATERMARK_LIFE_S + 1.0) == [0, 2, 3]
    monkeypatch.setattr(session, "MAX_GONE", 1)
    assert remembered(WATERMARK_LIFE_S + 1.5) == [0, 3]


@pytest.mark.parametrize("changes", [{}, {"lowest_unsettled": 5}, {"run_id": bytes(16)}])
@pytest.mark.parametrize("joins", [False, True])
def test_who_never_sent_anything_leaves_nothing_behind(table, changes, joins):
    for number in range(100):
        peer = greet(table, number, now=number, **changes)
        assert not joins or table.join(peer, 1, 1)
        table.expire(number)
    for now in range(100, 112):
        table.expire(now)
    assert (len(table), table.watermarks()) == (0, {})
    assert not any(held for held in vars(table).values() if isinstance(held, dict | set))
    assert greet(table, 200).rank == 0
