"""What a connection does not take waits in order, and not without bound."""

from collections.abc import Iterator

import pytest

from impala_async.launch.local import free_ports
from impala_async.relay.passage import (
    MAX_WAITING,
    MAX_WAITING_BYTES,
    SILENT_LEASES,
    UNWELCOME_S,
    Lane,
    Passage,
)
from impala_async.relay.shelf import Shelf
from impala_async.weights import NO_VERSION
from tests.wire.ends import Ends, take, until


@pytest.fixture
def ends() -> Iterator[Ends]:
    opened = Ends()
    yield opened
    opened.close()


@pytest.fixture
def url() -> str:
    """Where nobody listens yet."""
    (port,) = free_ports(1)
    return f"tcp://127.0.0.1:{port}"


@pytest.fixture
def lane(ends: Ends, url: str) -> Iterator[Lane]:
    made = Lane(ends.context, url)
    yield made
    made.dealer.close()


def test_it_waits_in_order_until_somebody_is_there(lane: Lane, ends: Ends, url: str) -> None:
    assert all(lane.send([bytes([number])]) for number in range(3))
    assert lane.is_waiting
    router = ends.router(url)

    def is_out() -> bool:
        lane.flush()
        return not lane.is_waiting

    until(is_out)
    assert lane.send([b"\3"])
    assert [take(router)[1] for _ in range(4)] == [b"\0", b"\1", b"\2", b"\3"]


def test_there_is_a_bound_and_it_says_so(lane: Lane) -> None:
    assert all(lane.send([b"x"]) for _ in range(MAX_WAITING))
    assert not lane.send([b"too much"])
    lane.forget()
    assert not lane.is_waiting
    assert lane.send([b"x"])


def test_large_ones_are_fewer_but_one_may_have_any_size(lane: Lane, ends: Ends, url: str) -> None:
    huge, half = bytes(2 * MAX_WAITING_BYTES), bytes(MAX_WAITING_BYTES // 2)
    assert lane.send([huge])
    assert not lane.send([b"x"])
    lane.forget()
    assert lane.send([half])
    assert not lane.send([b"x", half])
    assert lane.send([half])
    assert not lane.send([b"x"])
    ends.router(url, max_bytes=-1)

    def has_room() -> bool:
        lane.flush()
        return lane.send([half]) and not lane.is_waiting

    until(has_room)


def test_what_a_slow_line_has_not_taken_waits_here_where_it_is_counted(
    lane: Lane, ends: Ends, url: str
) -> None:
    ends.deaf_router(url)
    until(lambda: lane.dealer.send([b"there is a connection"]))
    megabyte = bytes(1 << 20)
    for _ in range(MAX_WAITING):
        lane.send([megabyte])
    assert lane.is_waiting


def test_silence_is_measured_by_the_lease_once_there_is_one(lane: Lane) -> None:
    passage = Passage(b"a" * 16, b"route", lane, 100.0)
    assert passage.lanes == [lane]
    assert not passage.is_over(100.0 + UNWELCOME_S)
    assert passage.is_over(100.1 + UNWELCOME_S)
    passage.begin(b"s" * 16, 2.0, None)
    assert not passage.is_over(100.0 + SILENT_LEASES * 2.0)
    assert passage.is_over(100.1 + SILENT_LEASES * 2.0)


def test_a_new_session_takes_back_what_the_former_asked_for(lane: Lane) -> None:
    passage, shelf = Passage(b"a" * 16, b"route", lane, 0.0), Shelf(10.0)
    passage.begin(b"s" * 16, 2.0, shelf)
    shelf.pull(passage.session, NO_VERSION)
    passage.begin(b"t" * 16, 2.0, shelf)
    assert shelf.next_to_ask(0.0) is None


def test_a_second_welcome_of_a_session_takes_nothing_back(lane: Lane) -> None:
    passage, shelf = Passage(b"a" * 16, b"route", lane, 0.0), Shelf(10.0)
    passage.begin(b"s" * 16, 2.0, shelf)
    shelf.pull(passage.session, NO_VERSION)
    passage.begin(b"s" * 16, 2.0, shelf)
    assert shelf.next_to_ask(0.0) == (passage.session, NO_VERSION)
