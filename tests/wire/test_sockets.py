"""Real sockets on this host: what arrives, what is cut off, who is cut off, and who cannot be
reached. Addresses are in test_sockets_addresses.py."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq

from impala_async.wire.messages import MAX_HEADER_BYTES, MAX_INLINE_BYTES
from impala_async.wire.sockets import MAX_UNREAD, MAX_UNSENT, NO_FRAME, Dealer, Router
from tests.wire import raw_peer
from tests.wire.ends import DEADLINE_S, Ends, greeted, take, until

Link = Callable[[], Dealer]


@pytest.fixture
def router(ends: Ends, tmp_path: Path) -> Router:
    return ends.router(ipc=tmp_path / "ipc")


@pytest.fixture(params=["tcp", "ipc"])
def link(request: pytest.FixtureRequest, ends: Ends, router: Router, tmp_path: Path) -> Link:
    """Makes dealers that are connected to the router, either way."""
    url = router.url if request.param == "tcp" else f"ipc://{tmp_path / 'ipc'}"
    return lambda: ends.dealer(url)


# -------------------- receiving


def test_there_and_back(router: Router, link: Link) -> None:
    dealer = link()
    until(lambda: dealer.send([b"question"]))
    route, header, size = take(router)
    assert (header, size) == (b"question", 8)
    assert not router.has_more_frames()
    assert router.receive() is None
    assert router.send(route, [b"answer", b"and more"])
    assert dealer.receive(DEADLINE_S) == [b"answer", b"and more"]
    assert dealer.receive(0) is None


def test_frames_land_in_place_and_sizes_are_the_true_ones(router: Router, link: Link) -> None:
    dealer = link()
    frames = [b"header", b"12345678", b"123", b"123456789012", b""]
    until(lambda: dealer.send(frames))
    take(router)
    memory = bytearray(b"." * 32)
    places = [memoryview(memory)[8 * i : 8 * i + 8] for i in range(4)]
    assert [router.receive_into(place) for place in places] == [8, 3, 12, 0]
    assert bytes(memory) == b"12345678" + b"123....." + b"12345678" + b"........"
    assert router.receive_into(places[0]) == NO_FRAME
    assert bytes(places[0]) == b"12345678"


@pytest.mark.parametrize("timeout_s", [1e-9, 1e9, 1e300])
def test_any_time_can_be_waited_for(link: Link, timeout_s: float) -> None:
    """Something else is ready, so that nobody waits."""
    wake_fd = os.eventfd(1)
    try:
        assert link().wait(timeout_s, wake_fd)
    finally:
        os.close(wake_fd)


def test_a_header_that_is_too_long_says_how_long_it_was(router: Router, link: Link) -> None:
    dealer = link()
    until(lambda: dealer.send([b"x" * 20_000, b"body"]))
    _, header, size = take(router)
    assert size == 20_000
    assert header == b"x" * (MAX_HEADER_BYTES + MAX_INLINE_BYTES)
    assert router.has_more_frames()


def test_what_is_not_wanted_is_discarded(router: Router, link: Link) -> None:
    dealer = link()
    until(lambda: dealer.send([b"first", b"x" * 100_000, b"", b"y"]))
    until(lambda: dealer.send([b"second"]))
    assert take(router)[1] == b"first"
    assert router.discard_rest() == 3
    assert not router.has_more_frames()
    assert router.discard_rest() == 0
    assert take(router)[1:] == (b"second", 6)


def test_an_empty_message_is_one_empty_frame(router: Router, link: Link) -> None:
    dealer = link()
    until(lambda: dealer.send([b""]))
    assert take(router)[1:] == (b"", 0)
    assert not router.has_more_frames()


def test_each_message_overwrites_the_header_of_the_last(router: Router, link: Link) -> None:
    dealer = link()
    for text in (b"first one", b"second"):
        until(lambda text=text: dealer.send([text]))
    until(router.has_input)
    arrived = router.receive()
    assert arrived is not None
    _, header, _ = arrived
    assert bytes(header) == b"first one"
    take(router)
    assert bytes(header) == b"secondone"


# -------------------- sending


def test_an_unknown_route_is_no_error(router: Router) -> None:
    assert not router.send(b"nobody", [b"anybody there?"])


def test_who_is_gone_cannot_be_reached_and_others_can(router: Router, link: Link) -> None:
    gone, here = link(), link()
    route_gone, route_here = greeted(router, gone), greeted(router, here)
    assert route_gone != route_here
    gone.close()
    until(lambda: not router.send(route_gone, [b"x", b"y"]))
    assert router.send(route_here, [b"x", b"y"])
    assert here.receive(DEADLINE_S) == [b"x", b"y"]


def test_who_does_not_read_blocks_nobody(router: Router, link: Link) -> None:
    deaf, good = link(), link()
    route_deaf, route_good = greeted(router, deaf), greeted(router, good)
    started = time.monotonic()
    num_sent = 0
    while router.send(route_deaf, [b"x" * 4096]):
        num_sent += 1
        assert num_sent < 100_000
    assert time.monotonic() - started < DEADLINE_S
    assert router.send(route_good, [b"good"])
    assert good.receive(DEADLINE_S) == [b"good"]
    assert router.num_unsent == {route_deaf: 1}


def test_little_waits_for_who_does_not_read(router: Router) -> None:
    with raw_peer.connect(router.url) as deaf:
        deaf.sendall(raw_peer.message(b"hello"))
        route, num_sent = take(router)[0], 0
        while router.send(route, [bytes(1 << 20)]):
            num_sent += 1
        # What the kernel's buffers take has left.
        assert num_sent < MAX_UNSENT + 20


def test_who_does_not_read_its_weights_has_few_under_way(ends: Ends, router: Router) -> None:
    good, weights = ends.dealer(router.url), [b"weights", bytes(1 << 20)]
    with raw_peer.connect(router.url) as deaf:
        deaf.sendall(raw_peer.message(b"hello"))
        route, route_good = take(router)[0], greeted(router, good)
        num_sent = 0
        for _ in range(300):
            num_sent += router.send(route, weights)
            select.select([], [], [], 0.001)
        # What the kernel buffers of it has left.
        assert num_sent < 100
        assert router.send(route, [b"a word"])
        assert router.send(route_good, weights)
        # Once it reads, it gets more; it does not wait for what may all have come.
        deaf.setblocking(False)

        def has_more_after_a_read() -> bool:
            with suppress(BlockingIOError):
                deaf.recv(1 << 20)
            return router.send(route, weights)

        until(has_more_after_a_read)
    until(lambda: not router.send(route, weights))
    router.forget_sent()


def test_what_a_dealer_does_not_read_waits_at_its_sender(ends: Ends, tmp_path: Path) -> None:
    url = f"ipc://{tmp_path / 'flood'}"
    flooder, dealer = ends.flooder(url), ends.dealer(url)
    until(lambda: dealer.send([b"get"]))
    route, _ = flooder.recv_multipart()
    num_sent = 0
    with suppress(zmq.Again):
        while num_sent < 100:
            flooder.send_multipart([route, b"%d" % num_sent, bytes(1 << 20)])
            num_sent += 1
    assert num_sent < 3 * MAX_UNREAD
    # Nothing of it is lost.
    for number in range(num_sent):
        frames = dealer.receive(DEADLINE_S)
        assert frames is not None
        assert bytes(frames[0]) == b"%d" % number


def test_nothing_queues_for_a_learner_that_is_not_there(ends: Ends) -> None:
    first = ends.router(max_bytes=1000)
    dealer = ends.dealer(first.url)
    route = greeted(first, dealer)
    first.close()
    until(lambda: not dealer.send([b"into the void"]))
    assert not dealer.send([b"out of date"])
    # The next learner at this address hears what is said to it, on another route.
    second = ends.router(first.url)
    until(lambda: dealer.send([b"up to date"]))
    new_route, header, _ = take(second)
    assert header == b"up to date"
    assert new_route != route
    assert not second.send(route, [b"x"])


def test_a_message_that_is_too_large_ends_that_connection_only(ends: Ends) -> None:
    router = ends.router(max_bytes=1000)
    bad, good = ends.dealer(router.url), ends.dealer(router.url)
    route_bad, route_good = greeted(router, bad), greeted(router, good)
    assert good.send([b"x" * 1000])
    assert take(router) == (route_good, b"x" * 1000, 1000)
    assert bad.send([b"x" * 1001])
    until(lambda: not router.send(route_bad, [b"are you there?"]))
    assert router.send(route_good, [b"are you there?"])
    assert good.receive(DEADLINE_S) == [b"are you there?"]
    assert not router.has_input()
    # It may come again, as somebody else. What it says before it has noticed is lost.
    until(lambda: bad.send([b"sorry"]) and router.has_input())
    route_again, header, _ = take(router)
    assert header == b"sorry"
    assert route_again != route_bad


# -------------------- the descriptor


def is_readable(fd: int, timeout_s: float = 0.0) -> bool:
    return bool(select.select([fd], [], [], timeout_s)[0])


def test_input_is_found_although_a_send_ate_the_edge(router: Router, link: Link) -> None:
    dealer = link()
    route = greeted(router, dealer)
    while router.has_input() or is_readable(router.fd):
        router.receive()
    until(lambda: dealer.send([b"question"]))
    assert is_readable(router.fd, DEADLINE_S)
    assert router.send(route, [b"something else"])
    until(router.has_input)
    assert take(router)[1] == b"question"


def test_whoever_looks_again_after_each_send_misses_nothing(router: Router, link: Link) -> None:
    dealers = [link() for _ in range(3)]
    for dealer in dealers:
        greeted(router, dealer)
    num_answered = 0
    for i in range(300):
        until(lambda i=i: dealers[i % 3].send([b"%d" % i]))
    give_up_at = time.monotonic() + DEADLINE_S
    while num_answered < 300:
        # As the port does it: wait for the descriptor only when nothing is left.
        if not router.has_input():
            assert is_readable(router.fd, give_up_at - time.monotonic())
        while (arrived := router.receive()) is not None:
            assert router.send(arrived[0], [bytes(arrived[1])])
            num_answered += 1
    for number, dealer in enumerate(dealers):
        answers = [dealer.receive(DEADLINE_S) for _ in range(100)]
        assert answers == [[b"%d" % i] for i in range(number, 300, 3)]


# -------------------- routes

# A process of its own: libzmq aborts where it gives a route that is taken.
ECHO = """
from impala_async.wire.sockets import Router, new_context

router = Router(new_context(), "tcp://127.0.0.1:*", None, 1 << 20)
print(router.url, flush=True)
while True:
    arrived = router.receive()
    if arrived is not None:
        router.send(arrived[0], [bytes(arrived[1])])
"""
# What C's `rand` gives first, where nobody has seeded it.
FIRST_GIVEN = 0x6B8B4567


def test_nobody_can_claim_the_route_that_is_given_next() -> None:
    with ExitStack() as stack:
        echo = subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
        stack.enter_context(echo)
        stack.callback(echo.kill)
        assert echo.stdout is not None
        url = echo.stdout.readline().strip()
        for number in range(4):
            claimed = b"\0" + (FIRST_GIVEN + number).to_bytes(4, "big")
            stack.enter_context(raw_peer.connect(url, claimed))
        for _ in range(4):
            peer = stack.enter_context(raw_peer.connect(url))
            peer.sendall(raw_peer.message(b"hello"))
            peer.settimeout(DEADLINE_S)
            assert peer.recv(64).endswith(b"hello")
        assert echo.poll() is None
