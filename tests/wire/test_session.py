"""Hello, leases and verdicts; whom a learner knows: numbers, strangers, what outlives a session."""

import json

import pytest

from impala_async.errors import ProtocolError, plain
from impala_async.weights import NO_VERSION, Lineage, Version
from impala_async.wire import messages as wire
from impala_async.wire import session
from impala_async.wire.peer import WINDOW, Peer
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
    new_table,
    newcomer,
    send,
)


def refusal_of(table, actor, **changes):
    """The code and the rest of it."""
    answer = table.hello(hello_of(actor, **changes), b"route", 0.0)
    return wire.REJECT_CODES[answer.code], answer.text, answer.retry_after_s


def work(table, actor, now=0.0):
    """An actor that is remembered, as something of it was settled."""
    peer = join(table, actor, now=now)
    table.deal(len(table), now=now)
    assert send(table, peer, peer.watermark.below) is None
    return peer


# -------------------- hello


def test_each_actor_gets_a_session_and_a_number_and_the_same_hello_twice_is_one(table):
    peers = [greet(table, actor) for actor in range(3)]
    assert [peer.number for peer in peers] == [0, 1, 2]
    assert len({peer.session for peer in peers}) == 3
    first = peers[0]
    assert (first.actor, first.data_route) == (actor_id(0), b"route-0")
    assert (first.granted, first.columns, first.verdicts) == (0, 0, [])
    assert table.find(first.session, 0.0) is first
    assert table.find(b"nobody" + bytes(10), 0.0) is None
    assert table.hello(hello_of(0), b"another route", 4.0) is first
    assert (first.data_route, first.last_heard) == (b"another route", 4.0)
    assert list(table) == peers
    assert len(table) == 3


def test_another_protocol_is_refused_with_both_numbers(table):
    code, text, retry = refusal_of(table, 1, protocol=2)
    assert (code, retry) == ("protocol", -1.0)
    assert text.startswith("protocol: this learner speaks version 1, the actor 2")
    assert len(table) == 0


def test_a_new_hello_ends_a_session_that_was_at_work(table):
    former = join(table, 1, columns=4)
    table.deal(8, now=0.0)
    send(table, former, 0)
    assert table.outstanding_columns == 4
    peer = greet(table, 1)
    assert peer.session != former.session
    assert table.outstanding_columns == 0
    assert table.find(former.session, 0.0) is None
    assert (peer.number, peer.granted) == (former.number, 1)
    # A session that is over can end again.
    table.end(former)
    assert list(table) == [peer]
    for _ in range(2):
        table.end(peer)
    assert len(table) == 0


def test_too_many_actors_are_asked_to_wait(table, monkeypatch):
    monkeypatch.setattr(session, "MAX_SESSIONS", 2)
    first = join(table, 1)
    join(table, 2)
    code, _, retry = refusal_of(table, 3)
    assert (code, retry > 0) == ("full", True)
    # One that has a session already does not need another place.
    assert isinstance(table.hello(hello_of(1), b"r", 0.0), Peer)
    table.end(first)
    assert len(table) == 2


def test_where_all_places_are_taken_who_sent_nothing_of_use_gives_way(table, monkeypatch):
    monkeypatch.setattr(session, "MAX_SESSIONS", 3)
    idle, working, refused = newcomer(table, 0), work(table, 1), newcomer(table, 2)
    table.deal(9, now=0.0)
    assert send(table, refused, 0, version=Version(9, 9)) == "invalid"
    # For a while they may be about to send something.
    assert refusal_of(table, 3)[0] == "full"
    late = session.FULL_RETRY_S
    for actor, gone in ((3, idle), (4, refused)):
        comes = newcomer(table, actor, now=late)
        assert table.peer_of(comes.session) is comes
        assert table.peer_of(gone.session) is None
    assert table.num_given_way == 2
    assert table.peer_of(working.session) is working
    assert isinstance(table.hello(hello_of(5), b"route", late), wire.Reject)
    # One that has come again has not shown anew that it works, and need not.
    again = newcomer(table, 1, now=late)
    assert isinstance(table.hello(hello_of(6), b"route", late + 1), wire.Reject)
    assert isinstance(table.hello(hello_of(6), b"route", late + 9), Peer)
    assert table.peer_of(again.session) is again


def test_a_resumed_run_counts_on_where_the_actor_stands_and_another_starts_at_zero(table):
    for actor, run_id, granted in ((1, RUN, 57), (2, b"other" + bytes(11), 0)):
        peer = greet(table, actor, run_id=run_id, lowest_unsettled=57)
        assert (peer.granted, peer.grant(NOW).settled) == (granted, granted)


def test_who_says_hello_again_may_have_given_up_what_it_held(table):
    former = join(table, 1)
    former.watermark.settle(1)
    # Seq 0 has not come, and whatever is sent as seq 1 would be taken for what came.
    session = greet(table, 1, lowest_unsettled=0).session
    again = greet(table, 1, lowest_unsettled=2)
    assert (again.session, again.watermark.below, again.watermark.above) == (session, 2, [])
    # Nobody counts from what was granted before to where it stands: a stranger may say anything.
    far = greet(table, 1, lowest_unsettled=2**60)
    assert table.join(far, 1, 1)
    table.deal(4, now=0.0)
    assert far.granted == 2**60 + 1


@pytest.mark.parametrize("text", ["a\ud800b", "é" * 2000, "x" * 5000, "\ud800" * 3000])
def test_any_text_can_be_a_refusal(text):
    answer = wire.unpack(wire.pack(session.reject("mismatch", text)))
    assert len(answer.text.encode()) <= wire.MAX_TEXT_BYTES
    assert answer.text[:1] == plain(text[0])[:1]
    assert session.reject("full", "as it is", 5.0) == wire.Reject(1, "as it is", 5.0)


# -------------------- leases


def test_a_silent_actor_loses_its_session_and_its_credit(table):
    silent, loud = join(table, 1, columns=4), join(table, 2, columns=4)
    table.deal(8, now=0.0)
    for now in range(1, 11):
        assert table.expire(now) == []
        table.find(loud.session, now)
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
    # From then on the silence is the actor's own.
    for i in range(10):
        assert table.expire(8 + pause_s + i) == []
        assert peer.last_heard == 8 + pause_s
    assert table.expire(8 + pause_s + 10.1) == [peer]


# -------------------- verdicts


def test_verdict_by_version():
    for version, now, verdict in (
        *(((3, 1000), NOW, None), ((3, 1000 - MAX_LAG), NOW, None)),
        *(((3, 1000 - MAX_LAG - 1), NOW, "stale"), ((3, 1001), NOW, "invalid")),
        *(((4, 0), NOW, "invalid"), ((0, 1000), NOW, "invalid"), (NO_VERSION, NOW, "invalid")),
        *(((2, 990), NOW, "dead_branch"), ((1, 901), NOW, "dead_branch"), ((1, 900), NOW, "stale")),
        # An ancestor of an earlier epoch is welcome.
        ((1, 895), Version(3, 905), None),
    ):
        table = new_table()
        peer = join(table, 1)
        table.deal(4, now=0.0)
        assert table.reserve(peer, data_of(peer, 0, Version(*version)), now) == verdict, version


def test_what_was_not_granted_is_not_allowed_and_not_settled(table):
    peer = join(table, 1, columns=4)
    table.deal(8, now=0.0)
    assert table.reserve(peer, data_of(peer, 0, columns=3), NOW) is None
    for seq, columns in ((2, 4), (3, 4), (2**62, 4), (0, 5)):
        with pytest.raises(ProtocolError) as caught:
            table.reserve(peer, data_of(peer, seq, columns=columns), NOW)
        assert caught.value.reason == "not_allowed_now"
        assert not peer.watermark.is_settled(seq)


def test_a_refusal_settles_and_is_told_once_and_no_more_than_fit(table):
    peer = join(table, 1)
    table.deal(4, now=0.0)
    assert send(table, peer, 0, Version(3, 1)) == "stale"
    grant = peer.grant(NOW)
    assert (grant.settled, grant.verdicts) == (1, [[0, wire.VERDICTS.index("stale")]])
    assert (grant.session, grant.epoch, grant.update) == (peer.session, *NOW)
    assert peer.grant(NOW).verdicts == []
    for seq in range(wire.MAX_VERDICTS + 5):
        table.settle(peer, seq, "invalid")
    grant = peer.grant(NOW)
    assert (len(grant.verdicts), grant.settled) == (wire.MAX_VERDICTS, wire.MAX_VERDICTS + 5)
    assert wire.unpack(wire.pack(grant)) == grant


# -------------------- numbers


def test_every_actor_that_worked_has_a_number_of_its_own_and_none_comes_again(table):
    peers = [work(table, actor) for actor in range(3)]
    assert [peer.number for peer in peers] == [0, 1, 2]
    table.end(peers[1])
    assert [join(table, actor).number for actor in (7, 1)] == [3, 1]
    # Strangers use up none.
    for stranger in range(100, 200):
        table.end(greet(table, stranger))
    assert join(table, 8).number == 4


def test_a_number_is_given_once_however_long_its_actor_is_gone(table):
    """An actor that had it again would step the same environments."""
    peers = [work(table, actor) for actor in range(3)]
    table.end(peers[2])
    late = session.WATERMARK_LIFE_S + 1
    for _ in range(2):
        table.expire(late)
    assert not table.is_here(actor_id(2))
    assert greet(table, 7, now=late).number == 3
    assert greet(table, 8, now=late).number == 4


def test_an_actor_has_the_number_that_its_starter_gave_it(table):
    alone = greet(table, 0)
    # Who has no number was here first; the others are called as their starter calls them.
    numbered = [greet(table, actor, number=number) for actor, number in ((1, 3), (2, 0), (3, 1))]
    assert [alone.number, *(peer.number for peer in numbered)] == [0, 3, 2, 1]
    # Started again, before it is known that its former life is over; or a stranger claims it.
    assert [greet(table, actor, number=3).number for actor in range(4, 10)] == [3] * 6
    assert greet(table, 10).number == 4
    table.end(alone)
    assert greet(table, 11, number=0).number == 0


def test_the_number_of_one_who_worked_by_itself_is_given_to_no_other(table):
    table.end(work(table, 1))
    assert greet(table, 2, number=0).number == 1
    # One who had it from its starter has it again in its next life.
    first = greet(table, 3, number=7)
    table.join(first, 1, 1)
    table.deal(9, now=0.0)
    assert send(table, first, first.watermark.below) is None
    table.end(first)
    assert greet(table, 4, number=7).number == 7
    # In another start all have other seeds.
    table.restore_watermarks({actor_id(5).hex(): [9, 3]}, 0.0)
    assert greet(table, 6, number=9).number == 9
    # One that has come again is known to be numbered, and so its next life has the number.
    table.restore_watermarks({actor_id(7).hex(): [11, 3]}, 0.0)
    back = greet(table, 7, number=11)
    table.join(back, 1, 1)
    table.end(back)
    assert greet(table, 8, number=11).number == 11


def test_the_number_of_an_actor_at_work_is_its_own_until_nothing_is_heard_of_it(table):
    at_work = join(table, 1, now=50.0)
    assert at_work.number == 0
    numbered = greet(table, 2, number=7, now=50.0)
    table.join(numbered, 1, 1)
    assert numbered.number == 7
    table.find(numbered.session, 60.0)
    assert greet(table, 3, number=7, now=60.4).number == 2
    # It was killed, perhaps, and another one is there in its place.
    assert greet(table, 4, number=7, now=60.6).number == 7
    # One that has only said hello may be anybody.
    assert greet(table, 5, number=8, now=62.0).number == 8
    assert greet(table, 6, number=8, now=62.0).number == 8


def test_where_numbers_are_places_that_of_a_lost_one_is_free():
    table = new_table(num_actors=3)
    peers = [work(table, actor) for actor in range(3)]
    assert refusal_of(table, 7)[0] == "full"
    # One that is here may say hello again.
    again = join(table, 1)
    assert (again.number, again.begins_at) == (1, None)
    assert again.session != peers[1].session
    for peer in (peers[0], again, peers[2]):
        table.end(peer)
    # The former place, if nobody else has it; else the first that is free.
    assert [join(table, actor).number for actor in (2, 7, 1)] == [2, 0, 1]
    assert refusal_of(table, 0)[0] == "full"


def test_a_hello_takes_no_place_from_who_joins():
    table = new_table(num_actors=2)
    for stranger in range(100, 200):
        greet(table, stranger)
    early, other, late = greet(table, 0), greet(table, 1), greet(table, 2)
    assert len({early.number, other.number, late.number}) == 2
    assert table.join(late, 4, 1)
    twin, unlike = (early, other) if early.number == late.number else (other, early)
    assert not table.join(twin, 4, 1), "its place is another's by now"
    assert table.join(unlike, 4, 1)
    assert refusal_of(table, 3)[0] == "full"


# -------------------- strangers


def test_whatever_is_done_often_passes_strangers_by_and_the_oldest_gives_way(table):
    actor, num_strangers = join(table, 0), 3 * session.MAX_STRANGERS
    builder = greet(table, 7, number=7)
    for stranger in range(100, 100 + num_strangers):
        greet(table, stranger)
    assert len(table) == session.MAX_STRANGERS + 1
    assert table.num_given_way == 1 + num_strangers - session.MAX_STRANGERS
    assert list(table.joined) == [actor]
    assert table.deal(100, now=0.0) == [actor]
    # Its Spec is of no session; it says hello again, and its number is its own.
    assert table.find(builder.session, 1.0) is None
    assert greet(table, 7, number=7).number == builder.number == 7
    for now in (0.0, 4.0, 8.0):
        table.find(actor.session, now)
        table.expire(now)
    assert len(table.expire(LEASE_S + 0.1)) == session.MAX_STRANGERS
    assert list(table) == [actor]


@pytest.mark.parametrize("joins", [False, True])
def test_over_one_connection_come_only_so_many(table, joins):
    actor, builder = join(table, 0), greet(table, 1)
    flood = []
    for stranger in range(100, 200):
        flood.append(table.hello(hello_of(stranger), b"the flood", 0.0))
        assert not joins or table.join(flood[-1], 1, 1)
    # The last of them are there, and whoever came over other connections.
    assert {*table} == {actor, builder, *flood[-session.MAX_OVER_ONE_CONNECTION :]}
    assert table.num_given_way == 100 - session.MAX_OVER_ONE_CONNECTION
    # An actor that comes again is no other.
    again = join(table, 0)
    assert (again.number, again in table, table.num_given_way) == (actor.number, True, 84)


# -------------------- what outlives a session


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
    assert (again.number, again.granted) == (1, 0)
    resumed.deal(8, now=0.0)
    assert send(resumed, again, 1, Version(4, 0)) == "duplicate"
    assert greet(resumed, 3).number == 2
    assert greet(resumed, 1, lowest_unsettled=9).granted == 9


def test_actors_long_gone_are_forgotten_and_too_many_sooner(table, monkeypatch):
    here = work(table, 0)
    for number in (1, 2, 3):
        table.end(work(table, number, now=float(number)))

    def remembered(now):
        table.find(here.session, now)
        table.expire(now)
        return [number for number in range(4) if actor_id(number).hex() in table.watermarks()]

    for now in range(0, int(session.WATERMARK_LIFE_S), 4):
        assert remembered(now) == [0, 1, 2, 3]
    assert remembered(session.WATERMARK_LIFE_S + 1.0) == [0, 2, 3]
    monkeypatch.setattr(session, "MAX_GONE", 1)
    assert remembered(session.WATERMARK_LIFE_S + 1.5) == [0, 3]


def test_what_is_settled_above_a_gap_is_bounded_in_memory_and_in_checkpoints(table, monkeypatch):
    monkeypatch.setattr("impala_async.wire.peer.MOST_ABOVE", 4)
    peer = join(table, 0, streams=100)
    # It keeps back its first message, and what it sends besides is refused at once.
    begin, window = 1, WINDOW * peer.streams
    while table.deal(10_000, now=0.0):
        for seq in range(begin, peer.granted):
            assert send(table, peer, seq, Version(0, 0)) == "invalid"
        begin = peer.granted
    assert len(peer.watermark.above) == window + 4 - 1
    assert peer.watermark.below == 0
    # Others have theirs in a checkpoint, though not all fit.
    other = join(table, 1)
    other.watermark.settle(2)
    monkeypatch.setattr(session, "MOST_ABOVE_ALL", 3)
    assert table.watermarks() == {actor_id(0).hex(): [0, 0], actor_id(1).hex(): [1, 0, 2]}
    # The last of those that are gone are remembered.
    other.has_settled = True
    for each in (peer, other):
        table.end(each)
    table.expire(1.0)
    assert table.watermarks().keys() == {actor_id(1).hex()}


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
    assert greet(table, 200).number == 0
