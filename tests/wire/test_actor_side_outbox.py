"""The actor's side of credit: nothing goes without it, nothing is let go before it is settled."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.wire.actor_side import Outbox
from impala_async.wire.messages import Grant

SESSION = bytes(16)


def grant_of(granted: int, settled: int, *verdicts: list[int]) -> Grant:
    return Grant(SESSION, granted, settled, 1, 0, list(verdicts))


def filled(*items: str) -> Outbox[str]:
    outbox: Outbox[str] = Outbox()
    for item in items:
        outbox.put(item)
    return outbox


def send_all(outbox: Outbox[str], now: float = 0.0) -> list[tuple[int, str]]:
    """Everything that may go, marked as sent."""
    sent = []
    while (one := outbox.sendable()) is not None:
        outbox.mark_sent(one[0], now)
        sent.append(one)
    return sent


def test_seqs_count_from_zero() -> None:
    outbox: Outbox[str] = Outbox()
    assert (outbox.next_seq, outbox.lowest_unsettled, len(outbox)) == (0, 0, 0)
    assert [outbox.put(item) for item in "abc"] == [0, 1, 2]
    assert (outbox.next_seq, outbox.lowest_unsettled, len(outbox)) == (3, 0, 3)


def test_nothing_goes_without_credit() -> None:
    outbox = filled("a", "b", "c")
    assert outbox.sendable() is None
    outbox.on_grant(grant_of(2, 0))
    assert send_all(outbox) == [(0, "a"), (1, "b")]
    assert (outbox.num_unsent, len(outbox)) == (1, 3)
    outbox.on_grant(grant_of(3, 0))
    assert send_all(outbox) == [(2, "c")]
    assert outbox.num_unsent == 0


def test_credit_may_come_before_the_trajectory() -> None:
    outbox = filled()
    outbox.on_grant(grant_of(2, 0))
    assert outbox.sendable() is None
    outbox.put("a")
    assert send_all(outbox) == [(0, "a")]


def test_sendable_does_not_mark() -> None:
    outbox = filled("a")
    outbox.on_grant(grant_of(1, 0))
    assert outbox.sendable() == outbox.sendable() == (0, "a")
    outbox.mark_sent(0, 1.0)
    assert outbox.sendable() is None


def test_what_is_settled_is_handed_back_once() -> None:
    outbox = filled("a", "b", "c")
    outbox.on_grant(grant_of(3, 0))
    send_all(outbox)
    assert outbox.on_grant(grant_of(5, 2)) == ["a", "b"]
    assert outbox.on_grant(grant_of(5, 2)) == []
    assert (outbox.lowest_unsettled, len(outbox)) == (2, 1)
    assert outbox.on_grant(grant_of(6, 3)) == ["c"]
    assert outbox.lowest_unsettled == outbox.next_seq == 3


def test_an_older_grant_changes_nothing() -> None:
    outbox = filled("a", "b", "c")
    outbox.on_grant(grant_of(2, 1))
    assert outbox.on_grant(grant_of(1, 0)) == []
    assert send_all(outbox) == [(1, "b")]


def test_what_is_refused_above_a_gap_waits_for_the_gap() -> None:
    outbox = filled("a", "b", "c")
    outbox.on_grant(grant_of(3, 0))
    send_all(outbox)
    assert outbox.on_grant(grant_of(4, 0, [1, 4])) == []
    assert (outbox.lowest_unsettled, len(outbox)) == (0, 3)
    assert outbox.on_grant(grant_of(4, 2)) == ["a", "b"]


def test_a_learner_that_knows_more_is_believed() -> None:
    outbox = filled("a")
    assert outbox.on_grant(grant_of(7, 7)) == ["a"]
    assert outbox.put("b") == 7
    assert outbox.lowest_unsettled == 7


def test_a_new_session_starts_without_credit_and_sends_all_again() -> None:
    outbox = filled("a", "b", "c")
    outbox.on_grant(grant_of(3, 1))
    send_all(outbox)
    outbox.on_new_session()
    assert (outbox.num_unsent, outbox.lowest_unsettled, outbox.next_seq) == (2, 1, 3)
    assert outbox.sendable() is None
    outbox.on_grant(grant_of(2, 1))
    assert send_all(outbox) == [(1, "b")]


def test_over_a_new_connection_all_that_is_not_settled_goes_again_at_once() -> None:
    outbox = filled("a", "b", "c", "d")
    outbox.on_grant(grant_of(3, 1))
    send_all(outbox)
    outbox.on_new_connection()
    assert send_all(outbox) == [(1, "b"), (2, "c")]


def test_only_what_is_overdue_goes_again() -> None:
    outbox = filled("a", "b", "c")
    outbox.on_grant(grant_of(2, 0))
    outbox.mark_sent(0, 10.0)
    outbox.mark_sent(1, 15.0)
    assert outbox.resend_overdue(20.0, 10.0) == 0
    assert outbox.resend_overdue(20.1, 10.0) == 1
    assert outbox.sendable() == (0, "a")
    assert outbox.resend_overdue(20.1, 10.0) == 0
    assert outbox.num_unsent == 2
    outbox.mark_sent(0, 20.1)
    assert outbox.resend_overdue(25.1, 10.0) == 1
    assert outbox.sendable() == (1, "b")


@pytest.mark.parametrize("seq", [0, 3])
def test_sending_what_is_not_held_is_a_bug(seq: int) -> None:
    with pytest.raises(AssertionError):
        filled().mark_sent(seq, 0.0)


grants = st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 5)).map(
    lambda t: grant_of(max(t[0], t[1]), t[1], [t[0], t[2]])
)


@settings(deadline=None)
@given(st.lists(grants | st.just("put") | st.just("session"), max_size=40))
def test_what_is_held_has_no_gaps_and_nothing_is_lost(steps: list[Grant | str]) -> None:
    outbox: Outbox[int] = Outbox()
    put, back = [], []
    for number, step in enumerate(steps):
        if isinstance(step, Grant):
            back += outbox.on_grant(step)
        elif step == "put":
            outbox.put(number)
            put.append(number)
        else:
            outbox.on_new_session()
        assert outbox.next_seq - outbox.lowest_unsettled == len(outbox)
        # In order, each once: what came back, and what is held.
        assert put[: len(back)] == back
        assert len(put) == len(back) + len(outbox)


def test_what_is_given_up_never_goes_and_its_seqs_are_not_used_again() -> None:
    outbox = filled("a", "b", "c")
    outbox.on_grant(grant_of(2, 1))
    outbox.mark_sent(1, 0.0)
    assert outbox.give_up() == ["b", "c"]
    assert outbox.sendable() is None
    assert outbox.num_unsent == len(outbox) == 0
    # The learner is told that none of them will come.
    assert outbox.lowest_unsettled == 3
    assert outbox.put("d") == 3
    assert outbox.sendable() is None
