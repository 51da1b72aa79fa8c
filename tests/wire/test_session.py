"""Hello, leases and verdicts. Beside this: test_session_actors.py, test_session_credit.py, and
whole networks in test_session_network.py."""

import pytest

from impala_async.errors import ProtocolError
from impala_async.weights import NO_VERSION, Version
from impala_async.wire import session as session_module
from impala_async.wire.messages import (
    MAX_TEXT_BYTES,
    MAX_VERDICTS,
    REJECT_CODES,
    VERDICTS,
    Reject,
    pack,
    plain,
    unpack,
)
from impala_async.wire.peer import Peer
from impala_async.wire.session import reject
from tests.wire.tables import (
    LEASE_S,
    MAX_LAG,
    NOW,
    RUN,
    actor_id,
    data_of,
    greet,
    hello_of,
    join,
    send,
)


def rejection(answer):
    assert isinstance(answer, Reject)
    return REJECT_CODES[answer.code], answer.text, answer.retry_after_s


# -------------------- hello


def test_each_actor_gets_a_session_and_a_rank(table):
    peers = [greet(table, actor) for actor in range(3)]
    assert [peer.rank for peer in peers] == [0, 1, 2]
    assert len({peer.session for peer in peers}) == 3
    assert list(table) == peers
    assert len(table) == 3
    first = peers[0]
    assert (first.actor, first.data_route) == (actor_id(0), b"route-0")
    assert (first.granted, first.columns, first.verdicts) == (0, 0, [])
    assert table.find(first.session, 0.0) is first
    assert table.find(b"nobody" + bytes(10), 0.0) is None


def test_another_protocol_is_refused_with_both_numbers(table):
    code, text, retry = rejection(table.hello(hello_of(1, protocol=2), b"r", 0.0))
    assert code == "protocol"
    assert text.startswith("protocol: this learner speaks version 1, the actor 2")
    assert retry < 0
    assert len(table) == 0


def test_the_same_hello_twice_is_one_session(table):
    first = greet(table, 1, now=0.0)
    again = table.hello(hello_of(1), b"another route", 4.0)
    assert again is first
    assert (first.data_route, first.last_heard) == (b"another route", 4.0)
    assert len(table) == 1


def test_a_new_hello_ends_a_session_that_was_at_work(table):
    former = join(table, 1, columns=4)
    table.deal(8, now=0.0)
    send(table, former, 0)
    assert table.outstanding_columns == 4
    peer = greet(table, 1)
    assert peer is not former
    assert peer.session != former.session
    assert table.outstanding_columns == 0
    assert table.find(former.session, 0.0) is None
    assert (peer.rank, peer.granted) == (former.rank, 1)
    assert list(table) == [peer]


def test_too_many_actors_are_asked_to_wait(table, monkeypatch):
    monkeypatch.setattr(session_module, "MAX_SESSIONS", 2)
    first = join(table, 1)
    join(table, 2)
    code, _, retry = rejection(table.hello(hello_of(3), b"r", 0.0))
    assert (code, retry > 0) == ("full", True)
    # One that has a session already does not need another place.
    assert isinstance(table.hello(hello_of(1), b"r", 0.0), Peer)
    table.end(first)
    assert len(table) == 2


def test_a_resumed_run_counts_on_where_the_actor_stands_and_another_starts_at_zero(table):
    for actor, run_id, granted in ((1, RUN, 57), (2, b"other" + bytes(11), 0)):
        peer = greet(table, actor, run_id=run_id, lowest_unsettled=57)
        assert (peer.granted, peer.grant(NOW).settled) == (granted, granted)


@pytest.mark.parametrize("text", ["a\ud800b", "é" * 2000, "x" * 5000, "\ud800" * 3000])
def test_any_text_can_be_a_refusal(text):
    answer = unpack(pack(reject("mismatch", text)))
    assert isinstance(answer, Reject)
    assert len(answer.text.encode()) <= MAX_TEXT_BYTES
    assert answer.text[:1] == plain(text[0])[:1]
    assert reject("full", "as it is", 5.0) == Reject(1, "as it is", 5.0)


# -------------------- leases


def test_a_silent_actor_loses_its_session_and_its_credit(table):
    silent, loud = join(table, 1, columns=4), join(table, 2, columns=4)
    table.deal(8, now=0.0)
    for now in range(1, 11):
        assert table.expire(now) == []
        table.find(loud.session, now)
    assert table.silent(LEASE_S, 9.0) == [silent]
    assert table.expire(LEASE_S) == []
    assert table.expire(LEASE_S + 0.001) == [silent]
    assert list(table) == [loud]
    assert table.outstanding_columns == 4
    assert table.find(silent.session, 11.0) is None


@pytest.mark.parametrize("pause_s", [5.1, 60.0, 100_000.0])
def test_a_learner_that_stood_still_blames_nobody(table, pause_s):
    peer = join(table, 1)
    for now in range(9):
        assert table.expire(now) == []
    assert table.expire(8 + pause_s) == []
    assert peer.last_heard == 8 + pause_s
    # From then on the silence is the actor's own.
    for i in range(10):
        assert table.expire(8 + pause_s + i) == []
    assert table.expire(8 + pause_s + 10.1) == [peer]


def test_a_session_that_is_over_can_end_again(table):
    stranger, worker = greet(table, 1), join(table, 2)
    for peer in (stranger, worker, stranger, worker):
        table.end(peer)
    assert len(table) == 0
    successor = greet(table, 2)
    table.end(worker)
    assert list(table) == [successor]


# -------------------- verdicts


def judge(table, peer, version, now=NOW):
    return table.reserve(peer, data_of(peer, 0, version), now)


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        (Version(3, 1000), None),
        (Version(3, 1000 - MAX_LAG), None),
        (Version(3, 1000 - MAX_LAG - 1), "stale"),
        (Version(3, 1001), "invalid"),
        (Version(4, 0), "invalid"),
        (Version(0, 1000), "invalid"),
        (NO_VERSION, "invalid"),
        (Version(2, 990), "dead_branch"),
        (Version(1, 901), "dead_branch"),
        (Version(1, 900), "stale"),
    ],
)
def test_verdict_by_version(table, version, verdict):
    peer = join(table, 1)
    table.deal(4, now=0.0)
    assert judge(table, peer, version) == verdict


def test_an_ancestor_of_an_earlier_epoch_is_welcome(table):
    peer = join(table, 1)
    table.deal(4, now=0.0)
    assert judge(table, peer, Version(1, 895), now=Version(3, 905)) is None


def test_a_second_copy_is_a_duplicate_whatever_it_says(table):
    peer = join(table, 1)
    table.deal(4, now=0.0)
    assert send(table, peer, 1) is None
    assert send(table, peer, 1) == "duplicate"
    assert send(table, peer, 1, Version(9, 9)) == "duplicate"
    assert send(table, peer, 0) is None
    assert [send(table, peer, seq) for seq in (0, 1)] == ["duplicate"] * 2


def test_what_was_not_granted_is_not_allowed_and_not_settled(table):
    peer = join(table, 1, columns=4)
    table.deal(8, now=0.0)
    assert table.reserve(peer, data_of(peer, 0, columns=3), NOW) is None
    for seq, columns in ((2, 4), (3, 4), (2**62, 4), (0, 5)):
        with pytest.raises(ProtocolError) as caught:
            table.reserve(peer, data_of(peer, seq, columns=columns), NOW)
        assert caught.value.reason == "not_allowed_now"
        assert not peer.watermark.is_settled(seq)


def test_a_refusal_settles_and_is_told_once(table):
    peer = join(table, 1)
    table.deal(4, now=0.0)
    assert send(table, peer, 0, Version(3, 1)) == "stale"
    grant = peer.grant(NOW)
    assert (grant.settled, grant.verdicts) == (1, [[0, VERDICTS.index("stale")]])
    assert (grant.session, grant.epoch, grant.update) == (peer.session, *NOW)
    assert peer.grant(NOW).verdicts == []


def test_more_verdicts_than_fit_are_left_out(table):
    peer = join(table, 1)
    for seq in range(MAX_VERDICTS + 5):
        table.settle(peer, seq, "invalid")
    grant = peer.grant(NOW)
    assert len(grant.verdicts) == MAX_VERDICTS
    assert grant.settled == MAX_VERDICTS + 5
    assert unpack(pack(grant)) == grant
