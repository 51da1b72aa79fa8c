"""What outlives a session: watermarks, for as long as they matter, and nothing of strangers."""

import json

import pytest

from impala_async.weights import Lineage, Version
from impala_async.wire import session
from impala_async.wire.session import WATERMARK_LIFE_S, SessionTable
from tests.wire.tables import NOW, RUN, actor_id, greet, join, new_table, send


@pytest.fixture
def table() -> SessionTable:
    return new_table()


def test_settled_seqs_outlive_the_session(table: SessionTable) -> None:
    former = join(table, 1)
    table.deal(4, now=0.0)
    assert send(table, former, 1) is None
    peer = join(table, 1)
    assert peer.grant(NOW).settled == 0
    table.deal(4, now=0.0)
    assert send(table, peer, 1) == "duplicate"
    assert send(table, peer, 0) is None
    assert peer.grant(NOW).settled == 2


def test_a_gap_outlives_a_session_that_never_came_to_work(table: SessionTable) -> None:
    former = join(table, 1)
    table.deal(4, now=0.0)
    assert send(table, former, 1) is None
    table.end(former)
    table.end(greet(table, 1))
    peer = join(table, 1)
    table.deal(4, now=0.0)
    assert send(table, peer, 1) == "duplicate"


def test_watermarks_are_saved_and_restored(table: SessionTable) -> None:
    first, second = join(table, 1), join(table, 2)
    table.deal(8, now=0.0)
    for peer, seq in ((first, 0), (first, 1), (second, 1)):
        assert send(table, peer, seq) is None
    saved = json.loads(json.dumps(table.watermarks()))
    assert saved == {actor_id(1).hex(): [0, 2], actor_id(2).hex(): [1, 0, 1]}

    resumed = new_table(Lineage(4))
    resumed.restore_watermarks(saved, 100.0)
    assert resumed.watermarks() == saved
    again = join(resumed, 2)
    assert (again.rank, again.granted) == (1, 0)
    resumed.deal(8, now=0.0)
    assert send(resumed, again, 1, Version(4, 0)) == "duplicate"
    assert greet(resumed, 3).rank == 2
    assert greet(resumed, 1, lowest_unsettled=9).granted == 9


def test_an_actor_that_was_saved_is_known_even_if_it_never_joins(table: SessionTable) -> None:
    table.restore_watermarks({actor_id(1).hex(): [0, 7]}, 0.0)
    table.end(greet(table, 1))
    assert table.watermarks() == {actor_id(1).hex(): [0, 7]}


def test_actors_long_gone_are_forgotten(table: SessionTable) -> None:
    gone, here = join(table, 1), join(table, 2)
    table.deal(4, now=0.0)
    send(table, gone, 0)
    table.end(gone)
    for now in range(0, int(WATERMARK_LIFE_S), 4):
        table.find(here.session, now)
        table.expire(now)
    assert actor_id(1).hex() in table.watermarks()
    table.find(here.session, WATERMARK_LIFE_S)
    table.expire(WATERMARK_LIFE_S)
    assert list(table.watermarks()) == [actor_id(2).hex()]


@pytest.mark.parametrize("changes", [{}, {"lowest_unsettled": 5}, {"run_id": bytes(16)}])
def test_strangers_leave_nothing_behind(table: SessionTable, changes: dict[str, object]) -> None:
    for number in range(100):
        greet(table, number, now=number, **changes)
        for peer in table.expire(number):
            table.end(peer)
    for now in range(100, 112):
        table.expire(now)
    assert len(table) == 0
    assert table.watermarks() == {}
    assert not any(v for v in vars(table).values() if isinstance(v, dict | set))
    assert greet(table, 200).rank == 0
    assert max(greet(table, number).rank for number in range(201, 220)) == 19


def test_the_run_of_a_table_does_not_change(table: SessionTable) -> None:
    greet(table, 1, run_id=bytes(16))
    assert table.run_id == RUN


def test_whoever_never_sent_anything_is_forgotten_whatever_it_claims(table: SessionTable) -> None:
    """Known by its hello to this run, joined, and gone."""
    peer = greet(table, 1, lowest_unsettled=1)
    table.join(peer, 1, 1)
    table.end(peer)
    assert table.watermarks() == {}


def test_so_many_are_remembered_at_most(table: SessionTable, monkeypatch) -> None:
    monkeypatch.setattr(session, "MAX_GONE", 2)
    for number in range(4):
        peer = join(table, number, now=float(number))
        table.deal(1, now=0.0)
        send(table, peer, 0)
        if number != 1:
            table.end(peer)
    table.expire(4.0)
    assert sorted(table.watermarks()) == [actor_id(number).hex() for number in (1, 2, 3)]
