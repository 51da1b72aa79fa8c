"""One pull at a time, whoever waits for it; what is held serves all that have less."""

from impala_async.relay.shelf import FIRST_PATIENCE_S, Shelf
from impala_async.weights import NO_VERSION, Version
from impala_async.wire.messages import SLOWEST_BYTES_PER_S

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)
FRAMES, NEWER = [b"header", b"weights"], [b"header", b"newer"]


def test_one_pull_goes_up_and_all_that_wait_are_answered():
    shelf = Shelf(10.0)
    assert [shelf.pull(who, NO_VERSION) for who in (A, B)] == [None, None]
    assert shelf.next_to_ask(0.0) == (A, NO_VERSION)
    assert shelf.pull(C, V1) is None
    assert shelf.next_to_ask(1.0) is None
    assert shelf.put(A, V2, FRAMES) == [A, B, C]
    assert shelf.next_to_ask(2.0) is None


def test_who_has_less_is_served_from_it_and_who_has_as_much_waits():
    shelf = Shelf(10.0)
    shelf.put(A, V2, FRAMES)
    assert shelf.pull(B, V1) is FRAMES
    assert shelf.pull(B, V2) is None
    assert shelf.next_to_ask(0.0) == (B, V2)
    assert shelf.put(B, V3, NEWER) == [B]
    assert shelf.pull(A, V2) is NEWER


def test_an_older_reply_is_not_kept_but_serves_who_has_still_less():
    shelf = Shelf(10.0)
    shelf.put(A, V3, NEWER)
    assert shelf.pull(B, V3) is None
    assert shelf.put(B, V2, FRAMES) == []
    assert (shelf.version, shelf.frames) == (V3, NEWER)
    # It is not asked again before its actor does.
    assert shelf.next_to_ask(0.0) is None


def test_nothing_newer_is_for_who_asked_and_no_other():
    shelf = Shelf(10.0)
    for who, have in ((A, V2), (B, V2), (C, V1)):
        shelf.pull(who, have)
    assert shelf.next_to_ask(0.0) == (A, V2)
    assert shelf.nothing_newer(A) == [A]
    # The others may have heard of something since.
    assert shelf.next_to_ask(0.0) == (B, V2)
    assert shelf.put(B, V3, FRAMES) == [B, C]
    # Neither does it come late to one that has been answered.
    assert shelf.nothing_newer(C) == []


def test_a_pull_that_is_lost_gives_way_to_the_next():
    shelf, lost_s = Shelf(10.0), 10.0 + FIRST_PATIENCE_S
    for who in (A, B):
        shelf.pull(who, V1)
    assert shelf.next_to_ask(0.0) == (A, V1)
    # How large the first ones are, nobody knows.
    assert shelf.next_to_ask(lost_s - 0.1) is None
    assert shelf.next_to_ask(lost_s) == (B, V1)
    assert shelf.next_to_ask(2 * lost_s) == (A, V1)


def test_weights_on_a_thin_line_are_waited_for_as_long_as_they_take():
    shelf, large = Shelf(10.0), bytes(60 * SLOWEST_BYTES_PER_S)
    shelf.put(A, V1, [memoryview(large)])
    for who in (A, B):
        shelf.pull(who, V1)
    assert shelf.next_to_ask(0.0) == (A, V1)
    assert shelf.next_to_ask(69.9) is None
    assert shelf.next_to_ask(70.1) == (B, V1)


def test_who_is_gone_is_neither_waited_for_nor_answered():
    shelf = Shelf(10.0)
    for who in (A, B):
        shelf.pull(who, V1)
    shelf.next_to_ask(0.0)
    shelf.forget(A)
    assert shelf.next_to_ask(0.0) == (B, V1)
    shelf.forget(A)
    assert shelf.next_to_ask(0.0) is None
    assert shelf.put(B, V2, FRAMES) == [B]
