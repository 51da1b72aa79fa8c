"""An actor says each thing in its time, without a socket; of its weights port see test_pulls.py."""

import pytest

from impala_async.errors import MismatchError, NotAllowedError, ProtocolError
from impala_async.weights import NO_VERSION, Version
from impala_async.wire import actor_side
from impala_async.wire import messages as wire
from impala_async.wire.pulls import Pulls
from impala_async.wire.session import reject
from tests.learner.columns import small_schema

RUN, SESSION, LAYOUT = b"r" * 16, b"s" * 16, b"l" * 16
LEASE_S = 10.0
V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)
SCHEMA = small_schema()


def welcome_of(**changes):
    welcome = wire.Welcome(RUN, 2, SESSION, 3, 1, "", "", "", bytes(16), LEASE_S, 2.0, 64)
    return welcome._replace(**changes)


def grant_of(granted, settled=0, version=V1, **more):
    return wire.Grant(SESSION, granted, settled, *version, [], **more)


def side_of(**pace):
    """One that has said its Spec."""
    side = actor_side.ActorSide(b"a" * 16)
    assert side.accept(welcome_of(), 0.0, **pace)
    side.set_spec(SCHEMA, LAYOUT, 2, 1)
    side.said_spec(0.0)
    return side


def send_all(outbox, now=0.0):
    """The messages that may go, marked as sent."""
    items = []
    while (one := outbox.sendable()) is not None:
        assert outbox.sendable() == one
        outbox.mark_sent(one[0], now)
        items.append(one[1])
    return "".join(items)


def test_who_is_told_that_more_is_settled_than_it_sent_goes_on_under_another_id():
    side = side_of()
    # One that counts from what it held, anew, may be behind.
    assert side.take(grant_of(9, 7), 0.0)
    side.put("a")
    answer = side.take(grant_of(2**61, 2**61), 0.0)
    assert (wire.code_of(answer), answer.retry_after_s) == ("hello_again", 0.0)
    # A message that was under way may have been taken from the old one.
    assert (side.settled, side.has_session) == (["a"], False)
    hello = side.handshake(0.0).hello
    assert (hello.actor == b"a" * 16, len(hello.actor)) == (False, 16)
    assert hello.lowest_unsettled == 8


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("num_bad", [89, 90, 100])
def test_an_actor_of_which_nearly_all_is_refused_for_what_is_in_it_knows_it(num_bad, is_late):
    """Verdicts may come over the other port, behind what they are of."""
    side, reasons = side_of(), ("nonfinite", "invalid", "invalid")
    for seq in range(100):
        assert not side.refused_for
        side.put("a")
        side.take(grant_of(seq + 1, seq), 0.0)
        send_all(side.outbox)
        bad = wire.VERDICTS.index(reasons[seq % 3])
        verdicts = [[seq, bad]] if seq < num_bad else []
        settled = grant_of(seq + 1, seq + 1)
        if is_late and seq < 99:
            side.take_grant(settled)
        side.take_grant(settled._replace(verdicts=verdicts))
    assert side.refused_for == ("invalid" if num_bad >= 90 else "")
    # A new session may be of another environment: it begins to count anew.
    side.put("a")
    side.take(grant_of(101, 100), 0.0)
    assert side.accept(welcome_of(), 0.0)
    assert (side._num_settled, side._num_bad) == (0, {})


def test_weights_that_this_learner_never_published_are_not_kept():
    side = side_of()
    for version, kept in ((Version(3, 5), NO_VERSION), (Version(2, 5), Version(2, 5))):
        side.act_with(version)
        side.accept(welcome_of(), 0.0)
        assert side.version == kept


def test_hello_is_due_now_and_then_and_over_each_new_connection():
    pauses = actor_side.new_pauses()
    taken = [next(pauses) for _ in range(9)]
    assert (taken[:4], taken[-1]) == (
        [0.0, actor_side.FIRST_S, 2 * actor_side.FIRST_S, 4 * actor_side.FIRST_S],
        actor_side.LONGEST_S,
    )
    side = actor_side.ActorSide(b"a" * 16)
    side.number = 7
    hello = side.handshake(0.0).hello
    assert (hello.run_id, hello.epoch, hello.lowest_unsettled, hello.number) == (bytes(16), 0, 0, 7)
    handshake = actor_side.Handshake(hello, 0.0, chance=lambda: 0.5)
    assert handshake.is_due(0.0, is_greeted=True)
    handshake.said(0.0)
    assert handshake.say_at == 0.75 * actor_side.HELLO_EVERY_S
    assert not handshake.is_due(0.7, is_greeted=True)
    assert handshake.is_due(0.0, is_greeted=False)
    handshake.said(0.0)
    assert not handshake.is_due(actor_side.FIRST_S / 2, is_greeted=False)
    assert handshake.is_due(0.75, is_greeted=True)


def test_a_refusal_is_waited_out_and_a_dead_learner_passed_over():
    handshake = actor_side.Handshake(wire.Hello(wire.PROTOCOL, b"a" * 16, "0", RUN, 2, 5), 0.0)
    handshake.said(0.0)
    assert handshake.take(reject("full", "no room", 20.0), 1.0) is None
    assert (handshake.is_refused, handshake.refusal) == (True, "no room")
    assert [handshake.is_due(now, is_greeted=True) for now in (20.9, 21.0)] == [False, True]
    handshake.said(21.0)
    assert not handshake.is_refused
    assert handshake.take(reject("elsewhere", "tcp://b:2", 0.0), 21.5) is None
    assert (handshake.elsewhere, handshake.is_refused) == ("tcp://b:2", False)
    assert handshake.outdated_s(22.0) == 0.0
    for other in (welcome_of(epoch=1), grant_of(1)):
        assert handshake.take(other, 22.0) is None
    assert handshake.take(welcome_of(epoch=1), 25.0) is None
    assert handshake.outdated_s(26.0) == 4.0
    for welcome in (welcome_of(epoch=1, run_id=b"o" * 16), welcome_of(), welcome_of(epoch=3)):
        assert handshake.take(welcome, 22.0) == welcome


def test_a_final_refusal_ends_the_actor():
    for refusal, error in (
        *((reject(code, "no"), MismatchError)
          for code in ("mismatch", "protocol", "bad_message", "wrong_port")),
        (reject("not_allowed", "no"), NotAllowedError),
        (wire.Reject(200, "a code of a later release", -1.0), MismatchError),
    ):  # fmt: skip
        with pytest.raises(error):
            actor_side.ActorSide(b"a" * 16).handshake(0.0).take(refusal, 0.0)
        with pytest.raises(error):
            side_of().take(refusal, 0.0)


def test_once_joined_a_message_that_is_not_understood_is_one_message():
    side = side_of()
    spec, schema = side.spec_frames()
    assert wire.unpack(spec) == wire.Spec(SESSION, SCHEMA.digest, LAYOUT, 2, 1, gives_way=1)
    assert schema == SCHEMA.to_json()
    side.take_grant(grant_of(1))
    assert not side.is_joined, "heartbeats are answered before"
    side.take(grant_of(1)._replace(session=bytes(16)), 0.0)
    assert not side.is_joined
    side.take(grant_of(1), 0.0)
    assert side.is_joined
    one, over = reject("bad_message", "what?"), reject("hello_again", "over", 0.0)
    assert (side.take(one, 1.0), side.has_session) == (one, True)
    assert (side.take(over, 2.0), side.has_session) == (over, False)
    assert (side.bye(), side.last_heard) == (None, 2.0)


def test_what_is_held_is_of_this_run_and_where_its_folder_was_put_back_of_this_start():
    for changes, is_kept in (
        ({"session": b"t" * 16}, True),
        ({"epoch": 3, "nonce": b"n" * 16}, True),
        ({"nonce": b"n" * 16}, False),
        ({"run_id": b"o" * 16}, False),
    ):
        side = side_of()
        side.act_with(V1)
        side.put("a")
        assert side.accept(welcome_of(**changes), 1.0) == is_kept
        assert (side.version == V1, len(side.outbox) == 1) == (is_kept, is_kept)


def test_a_goodbye_is_of_this_session_and_its_own_says_in_one_line_what_it_died_of():
    side = side_of()
    bye = side.bye("a\udcff.bin\n" + "x" * 1000)
    assert bye.text.startswith("a\\udcff.bin\\nxxx")
    assert len(bye.text) == wire.MAX_WHY
    assert side.bye() is None
    side = side_of()
    assert (side.take(wire.Bye(bytes(16), 0), 0.0), side.has_session) == (None, True)
    assert side.take(wire.Bye(SESSION, 0), 0.0) == wire.Bye(SESSION, 0)
    assert side.bye() is None


def test_only_what_is_settled_makes_the_pauses_short_again():
    side = side_of()
    pauses = [next(side.pauses) for _ in range(3)]
    side.act_with(V1)
    assert next(side.pauses) == 2 * pauses[-1] > 0
    side.put("a")
    side.take(grant_of(1, 1), 0.0)
    assert next(side.pauses) == 0


def test_silence_of_either_port_ends_a_session():
    side = side_of()
    pulls = Pulls(SESSION, have=V1, layouts=(), heartbeat_s=2.0, reply_timeout_s=60.0, now=0.0)

    def overdue(now, *, looked=True):
        pulls.looked_at = now if looked else pulls.looked_at
        return side.overdue(now, pulls, weights_s=5.0, data_s=3.0)

    def assert_overdue_after(patience_s, since, port):
        assert overdue(since + patience_s) is None
        assert overdue(since + patience_s + 0.1) == (port, patience_s)

    # A weights port that was never heard is the one to name, but before it all an answer to Spec.
    assert_overdue_after(LEASE_S, 0.0, "")
    pulls.last_heard = LEASE_S
    assert_overdue_after(LEASE_S, 0.0, "")
    side.take(grant_of(1), 5.0)
    assert_overdue_after(LEASE_S, LEASE_S, "weights")
    pulls.has_heard = True
    assert_overdue_after(LEASE_S, LEASE_S, "")
    side.take(grant_of(1), 15.0)
    assert_overdue_after(LEASE_S, LEASE_S, "weights")
    # Who stood still has not looked at what came meanwhile.
    pulls.looked_at = 15.0
    assert overdue(100.0, looked=False) is None
    # Weights on a thin line hold up everything else.
    pulls.said_get(0.0)
    assert_overdue_after(LEASE_S + 5.0, LEASE_S, "weights")


def test_who_can_do_nothing_with_what_it_is_told_has_not_answered():
    """The connections lead to other ports than they should, and each refuses all that comes."""
    side = side_of()
    pulls = Pulls(SESSION, have=V1, layouts=(), heartbeat_s=2.0, reply_timeout_s=60.0, now=0.0)
    side.take(grant_of(9), 0.0)
    side.put("a")
    side.said(0, 0.0)
    refusal = reject("bad_message", "not_allowed_now: Heartbeat on the data port")
    for now in (5.0, LEASE_S, 3 * LEASE_S):
        assert side.take(refusal, now) == refusal
        pulls.take(refusal, (), now)
    pulls.looked_at = LEASE_S + 0.1
    assert side.overdue(LEASE_S + 0.1, pulls, 5.0, 3.0) == ("weights", LEASE_S)
    pulls.last_heard = pulls.looked_at = 3 * LEASE_S
    assert side.overdue(3 * LEASE_S, pulls, 5.0, 3.0) == ("data", 2 * LEASE_S + 3.0)
    # Any other refusal is a word of a learner.
    side.take(reject("hello_again", "over", 0.0), 3 * LEASE_S)
    assert side.overdue(3 * LEASE_S, pulls, 5.0, 3.0) is None


def test_a_trajectory_is_answered_at_the_data_port_or_that_is_lost():
    side = side_of()
    pulls = Pulls(SESSION, have=V1, layouts=(), heartbeat_s=2.0, reply_timeout_s=60.0, now=0.0)
    side.take(grant_of(9), 0.0)

    def overdue(now):
        pulls.last_heard = pulls.looked_at = now
        return side.overdue(now, pulls, weights_s=5.0, data_s=3.0)

    patience_s = 2 * LEASE_S + 3.0
    # Who says nothing is owed nothing.
    assert overdue(1000.0) is None
    for seq, now in enumerate((1000.0, 1010.0)):
        side.put("a")
        side.said(seq, now)
    # A word over the other port is no answer of this one.
    side.take_grant(grant_of(9, 1))
    assert overdue(1000.0 + patience_s) is None
    assert overdue(1000.1 + patience_s) == ("data", patience_s)
    side.take(grant_of(9, 1), 1020.0)
    assert overdue(2000.0) is None
    side.said(1, 2000.0)
    side.repeated_spec(2001.0)
    assert overdue(3000.0) is None
    side.said(1, 3000.0)
    assert overdue(3000.1 + patience_s) == ("data", patience_s)
    side.accept(welcome_of(), 4000.0)
    side.take(grant_of(9), 4000.0)
    assert overdue(5000.0) is None


def test_what_a_learner_says_must_make_sense():
    # A hello that holds nothing below a later seq would be none.
    beyond = grant_of(2**62, 2**61 + 1)
    longer, zeroth = welcome_of(heartbeat_s=LEASE_S + 1), welcome_of(epoch=0)
    weights = wire.WeightsReply(0, 3, bytes(16), bytes(16))
    for message in (grant_of(1, 2), beyond, longer, zeroth, weights):
        with pytest.raises(ProtocolError):
            actor_side.read_answer(wire.pack(message))
    silent = actor_side.read_answer(wire.pack(reject("full", "  ")))
    assert silent == reject("full", "it does not say why (full)")
    assert actor_side.read_answer(wire.pack(wire.Get(SESSION, 1, 2))) == wire.Get(SESSION, 1, 2)


def filled(items):
    outbox = actor_side.Outbox()
    for item in items:
        outbox.put(item)
    return outbox


def state(outbox):
    return outbox.lowest_unsettled, outbox.next_seq, len(outbox), outbox.num_unsent


def test_nothing_goes_without_credit_and_nothing_is_let_go_before_it_is_settled():
    outbox = filled("")
    assert state(outbox) == (0, 0, 0, 0)
    outbox.on_grant(grant_of(1))
    assert outbox.sendable() is None
    for item in "abc":
        outbox.put(item)
    assert (send_all(outbox), state(outbox)) == ("a", (0, 3, 3, 2))
    assert outbox.on_grant(grant_of(3)) == []
    assert (send_all(outbox), state(outbox)) == ("bc", (0, 3, 3, 0))
    assert outbox.on_grant(grant_of(5, 2)) == ["a", "b"]
    # An older grant changes nothing.
    assert [outbox.on_grant(grant) for grant in (grant_of(5, 2), grant_of(3, 1))] == [[], []]
    assert state(outbox) == (2, 3, 1, 0)
    outbox.put("d")
    assert send_all(outbox) == "d"
    # A learner that knows more is believed.
    assert outbox.on_grant(grant_of(9, 7)) == ["c", "d"]
    outbox.put("e")
    assert state(outbox) == (7, 8, 1, 1)


def test_what_may_be_lost_goes_again():
    outbox = filled("abcd")
    outbox.on_grant(grant_of(3, 1))
    assert send_all(outbox) == "bc"
    outbox.on_grant(grant_of(3, 1, again=2))
    assert send_all(outbox) == "c", "it was called back"
    outbox.resend_all(is_new_session=False)
    assert send_all(outbox) == "bc"
    outbox.resend_all(is_new_session=True)
    assert (outbox.sendable(), state(outbox)) == (None, (1, 4, 3, 3))
    outbox.on_grant(grant_of(2, 1))
    assert send_all(outbox) == "b"
    # A message that is given up never goes, and its seq is not used again.
    assert outbox.give_up() == ["b", "c", "d"]
    outbox.put("e")
    assert (outbox.sendable(), state(outbox)) == (None, (4, 5, 1, 1))


def test_only_what_is_overdue_goes_again():
    outbox = filled("abc")
    outbox.on_grant(grant_of(2))
    outbox.mark_sent(0, 10.0)
    outbox.mark_sent(1, 15.0)
    assert [outbox.resend_overdue(now, 10.0) for now in (20.0, 20.1, 20.1)] == [0, 1, 0]
    assert outbox.num_unsent == 2
    assert send_all(outbox, 20.1) == "a"
    assert outbox.resend_overdue(25.1, 10.0) == 1
    assert outbox.sendable() == (1, "b")
    with pytest.raises(AssertionError):
        outbox.mark_sent(3, 0.0)


def test_weights_that_came_after_the_checkpoint_of_a_resume_act_no_more():
    for update, goes_on in ((150, False), (100, True), (95, True)):
        side = actor_side.ActorSide(bytes(16))
        side.accept(welcome_of(), 0.0, max_lag=50)
        side.version = Version(1, update)
        side.take_grant(grant_of(1, version=Version(2, 100)))
        assert (side.version, side.must_wait) == (
            (Version(1, update), False) if goes_on else (NO_VERSION, True)
        )
