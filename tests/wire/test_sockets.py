"""Real sockets on this host: what arrives, what is cut off, who cannot be reached, over which
connection a dealer speaks, and addresses that do not exist, or that somebody else has."""

import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from unittest.mock import MagicMock

import psutil
import pytest
import zmq
from zmq.utils.garbage import gc

from impala_async.errors import ConfigError
from impala_async.wire import sockets
from impala_async.wire.messages import MAX_HEADER_BYTES, MAX_INLINE_BYTES
from tests.proxy import HOST, LEARNER_HOST, proxy
from tests.wire import raw_peer
from tests.wire.ends import DEADLINE_S, greeted, take, until


@pytest.fixture
def router(ends, tmp_path):
    return ends.router(ipc=tmp_path / "ipc")


@pytest.fixture(params=["tcp", "ipc"])
def link(request, ends, router, tmp_path):
    """Makes dealers that are connected to the router, either way."""
    url = router.url if request.param == "tcp" else f"ipc://{tmp_path / 'ipc'}"
    return lambda: ends.dealer(url)


def test_the_thread_of_what_is_under_way_is_there_before_the_first_weights():
    """The system may have no thread left by then."""
    gc.stop()
    sockets.new_context().term()
    assert gc.is_alive()


class HangsUp:
    """A port that is a web server's: it says so, and hangs up."""

    def __init__(self):
        self._service = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._service.getsockname()[1]}"
        # When it was dialled.
        self.times = []
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self):
        with suppress(OSError):  # it is closed
            while True:
                connection, _ = self._service.accept()
                self.times.append(time.monotonic())
                with connection, suppress(ConnectionError):
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    def close(self):
        with suppress(OSError):
            self._service.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._service.close()


@pytest.fixture
def hangs_up():
    with closing(HangsUp()) as service:
        yield service


# -------------------- a router receives


def test_small_messages_that_wait_take_little_memory(router, link):
    dealers = [link() for _ in range(4)]
    for dealer in dealers:
        greeted(router, dealer)
    before = psutil.Process().memory_info().rss
    for _ in range(900):
        for dealer in dealers:
            assert dealer.send([b"hello" * 10])
        # Each comes in a packet of its own.
        time.sleep(0.0005)
    # It was 29 MB.
    assert psutil.Process().memory_info().rss - before < 3e6
    assert sum(take(router)[1] == b"hello" * 10 for _ in range(3600)) == 3600


def test_there_and_back_and_sizes_are_the_true_ones(router, link, monkeypatch):
    monkeypatch.setattr(sockets, "MAX_DISCARDED", 2)
    dealer = link()
    route = greeted(router, dealer)
    assert dealer.send([b"header", b"12345678", b"123", b"123456789012", b""])
    assert dealer.send([b"x" * 20_000, b"body"])
    assert dealer.send([b""])
    assert dealer.send([b"first one", b"x" * 100_000, b"", b"y"])
    assert dealer.send([b"second"])
    # Frames land in place.
    take(router)
    memory = bytearray(b"." * 32)
    places = [memoryview(memory)[8 * i : 8 * i + 8] for i in range(4)]
    assert [router.receive_into(place) for place in places] == [8, 3, 12, 0]
    assert bytes(memory) == b"12345678" + b"123....." + b"12345678" + b"........"
    assert router.receive_into(places[0]) == sockets.NO_FRAME
    assert bytes(places[0]) == b"12345678"
    _, header, size = take(router)
    assert (header, size) == (b"x" * (MAX_HEADER_BYTES + MAX_INLINE_BYTES), 20_000)
    assert router.has_more_frames
    router.discard_rest()
    assert take(router)[1:] == (b"", 0)
    assert not router.has_more_frames
    # Unwanted frames are discarded, and a header is overwritten by the next one.
    until(router.has_input)
    _, header, _ = router.receive()
    assert bytes(header) == b"first one"
    for has_more in (True, False, False):
        router.discard_rest()
        assert router.has_more_frames == has_more
    assert take(router)[1:] == (b"second", 6)
    assert bytes(header) == b"secondone"
    assert router.receive() is None
    assert router.send(route, [b"answer", b"and more"])
    assert dealer.receive(DEADLINE_S) == [b"answer", b"and more"]
    assert dealer.receive(0) is None
    # ZeroMQ aborts in a heartbeat of its own, where a peer has hung up with messages waiting.
    assert [end._socket.get(zmq.HEARTBEAT_IVL) for end in (router, dealer)] == [0, 0]


def test_a_message_that_is_too_large_ends_that_connection_only(ends):
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
    # It may come again, as somebody else. Messages that it sends before it has noticed are lost.
    until(lambda: bad.send([b"sorry"]) and router.has_input())
    route_again, header, _ = take(router)
    assert header == b"sorry"
    assert route_again != route_bad


# -------------------- a router sends


def test_little_waits_for_who_does_not_read_and_nobody_else_waits(router, link):
    good = link()
    route_good = greeted(router, good)
    with raw_peer.connect(router.url) as deaf:
        deaf.sendall(raw_peer.message(b"hello"))
        route, num_sent = take(router)[0], 0
        started = time.monotonic()
        while router.send(route, [bytes(1 << 20)]):
            num_sent += 1
        # As much as the kernel's buffers take has left.
        assert num_sent < sockets.MAX_UNSENT + 20
        assert time.monotonic() - started < DEADLINE_S
        assert router.num_unsent == {route: 1}
        assert router.send(route_good, [b"good"])
        assert good.receive(DEADLINE_S) == [b"good"]
    until(lambda: router.has_input() or not (router.send(route, [b"x"]) or router.num_unsent))


def test_who_does_not_read_its_weights_has_few_under_way(ends, router):
    good, weights = ends.dealer(router.url), [b"weights", bytes(1 << 20)]
    with raw_peer.connect(router.url) as deaf:
        deaf.sendall(raw_peer.message(b"hello"))
        route, route_good = take(router)[0], greeted(router, good)
        num_sent = 0
        for _ in range(300):
            num_sent += router.send(route, weights)
            select.select([], [], [], 0.001)
        # As much as the kernel's buffers take has left.
        assert num_sent < 100
        # On the slowest line it would take 5 seconds.
        assert router.find_stuck(patience_s=0.0) == []
        assert router.find_stuck(patience_s=-6.0) == [route]
        assert router.send(route, [b"a word"])
        assert router.send(route_good, weights)
        # Once it reads, it gets more; it does not wait for what may all have come.
        deaf.setblocking(False)

        def has_more_after_a_read():
            with suppress(BlockingIOError):
                deaf.recv(1 << 20)
            return router.send(route, weights)

        until(has_more_after_a_read)
    until(lambda: not router.send(route, weights))


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
# The first number that C's `rand` gives, where nobody has seeded it.
FIRST_GIVEN = 0x6B8B4567


def test_nobody_can_claim_the_route_that_is_given_next():
    with ExitStack() as stack:
        echo = subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
        stack.enter_context(echo)
        stack.callback(echo.kill)
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


def test_of_two_that_claim_the_same_route_the_later_one_is_heard(router):
    with ExitStack() as stack:
        for said in (b"first", b"second"):
            peer = stack.enter_context(raw_peer.connect(router.url, b"claimed"))
            peer.sendall(raw_peer.message(said))
            assert take(router)[1] == said


# -------------------- a dealer


def test_waiting_ends_by_a_message_by_another_descriptor_or_in_time(router, link):
    dealer, wake_fd = link(), os.eventfd(0, os.EFD_NONBLOCK)
    route = greeted(router, dealer)
    try:
        started = time.monotonic()
        assert dealer.receive(0.05) is None
        assert 0.04 < time.monotonic() - started < DEADLINE_S
        assert not dealer.wait(0.01, wake_fd)
        os.eventfd_write(wake_fd, 1)
        for any_time_s in (1e-9, DEADLINE_S, 1e9, 1e300):
            assert dealer.wait(any_time_s, wake_fd)
        os.eventfd_read(wake_fd)
        # It looks now and then how much came.
        assert not dealer.wait(1e300, wake_fd)
        assert router.send(route, [b"news"])
        assert not dealer.wait(DEADLINE_S, wake_fd)
        started = time.monotonic()
        assert dealer.receive(0) == [b"news"]
        assert not dealer.wait(-1.0, wake_fd)
        assert dealer.receive(0) is None
        assert time.monotonic() - started < DEADLINE_S / 2
    finally:
        os.close(wake_fd)


def test_what_a_dealer_does_not_read_waits_at_its_sender_and_nothing_of_it_is_lost(ends, tmp_path):
    url = f"ipc://{tmp_path / 'flood'}"
    flooder, dealer = ends.flooder(url), ends.dealer(url)
    until(lambda: dealer.send([b"get"]))
    route, _ = flooder.recv_multipart()
    num_sent = 0
    with suppress(zmq.Again):
        while num_sent < 100:
            flooder.send_multipart([route, b"%d" % num_sent, bytes(1 << 20)])
            num_sent += 1
    assert num_sent < 3 * sockets.MAX_UNREAD
    for number in range(num_sent):
        assert bytes(dealer.receive(DEADLINE_S)[0]) == b"%d" % number


def test_a_frame_that_no_learner_sends_fills_no_memory(ends, tmp_path):
    url = f"ipc://{tmp_path / 'flood'}"
    flooder = ends.flooder(url)
    for size, wait_s in (
        (sockets.MAX_ANSWER_BYTES + 1, 0.5),
        (sockets.MAX_ANSWER_BYTES, DEADLINE_S),
    ):
        dealer = ends.dealer(url)
        until(lambda dealer=dealer: dealer.send([b"get"]))
        route, _ = flooder.recv_multipart()
        flooder.send_multipart([route, bytes(size)])
        assert (dealer.receive(wait_s) is None) == (size > sockets.MAX_ANSWER_BYTES)


def test_nothing_queues_for_a_learner_that_is_not_there(ends):
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
    # A last word to nobody does not hold up the end.
    second.close()
    until(lambda: not dealer.send([b"into the void"]))
    started = time.monotonic()
    dealer.send_last([b"understood"])
    dealer.close()
    ends.context.term()
    assert time.monotonic() - started < DEADLINE_S / 2


def test_a_last_word_is_out_before_the_socket_closes(ends, tmp_path):
    router = ends.router(ipc=tmp_path / "ipc", max_bytes=1 << 26)
    for url, is_local in ((router.url, False), (f"ipc://{tmp_path / 'ipc'}", True)):
        dealer = ends.dealer(url)
        assert dealer.is_local == is_local
        greeted(router, dealer)
        # It takes its time, and what is behind it must wait.
        assert dealer.send([bytes(1 << 24)])
        dealer.send_last([b"understood"])
        dealer.close()
        take(router)
        assert take(router)[1] == b"understood"


def test_a_connection_that_broke_ends_a_wait_and_is_greeted_over_again(ends, router):
    with proxy(router.url) as network, ThreadPoolExecutor(1) as thread:
        dealer = ends.dealer(router.url.replace(LEARNER_HOST, HOST))
        assert not dealer.is_greeted
        for _ in range(3):
            until(lambda: dealer.greet([b"hello"]))
            assert dealer.is_greeted
            assert take(router)[1] == b"hello"
            network.reset()
            until(lambda: not dealer.is_greeted)
        until(lambda: dealer.greet([b"hello"]))
        waiting = thread.submit(dealer.receive, 10 * DEADLINE_S)
        network.reset()
        assert waiting.result(DEADLINE_S) is None


def test_a_port_that_answers_with_nonsense_is_dialled_again_as_a_learner_may_come(
    ends, monkeypatch
):
    monkeypatch.setattr(sockets, "REDIAL_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as service:
        url = f"tcp://127.0.0.1:{service.getsockname()[1]}"
        dealer = ends.dealer(url)
        connection, _ = service.accept()
        with connection, suppress(ConnectionError):
            connection.sendall(b"\xff" * 64)
            while connection.recv(4096):
                pass
    router = ends.router(url)
    until(lambda: dealer.receive(0.0) or dealer.greet([b"hello"]))
    assert take(router)[1] == b"hello"


def test_a_port_that_hangs_up_is_not_hammered_at_and_a_learner_may_come(ends, hangs_up):
    dealer, times = ends.dealer(hangs_up.url), hangs_up.times
    until(lambda: dealer.receive(0.02) or (times and times[-1] > times[0] + 1))
    assert dealer.is_cut_short
    assert len(times) <= 6
    hangs_up.close()
    router = ends.router(hangs_up.url)
    until(lambda: dealer.receive(0.0) or dealer.greet([b"hello"]))
    assert take(router)[1] == b"hello"
    assert not dealer.is_cut_short


def test_a_learner_that_comes_before_somebody_notices_that_another_hung_up_is_found(ends, hangs_up):
    dealer = ends.dealer(hangs_up.url)
    until(lambda: hangs_up.times)
    hangs_up.close()
    router = ends.router(hangs_up.url)
    # ZeroMQ dials by itself while nobody asks how it goes.
    until(lambda: dealer.send([b"early"]))
    assert take(router)[1] == b"early"
    until(lambda: dealer.receive(0.0) or dealer.greet([b"hello"]))
    assert take(router)[1] == b"hello"


def test_a_call_that_is_taken_in_silence_is_made_anew(ends, monkeypatch):
    assert sockets._REDIALLING[zmq.HANDSHAKE_IVL] == 10_000
    monkeypatch.setitem(sockets._REDIALLING, zmq.HANDSHAKE_IVL, 200)
    with socket.create_server(("127.0.0.1", 0)) as service:
        dealer = ends.dealer(f"tcp://127.0.0.1:{service.getsockname()[1]}")
        service.settimeout(DEADLINE_S)
        silent = [service.accept()[0] for _ in range(2)]
        assert not dealer.is_greeted
        for each in silent:
            each.close()


@pytest.mark.parametrize("num_sockets", [1, 2])
def test_a_dealer_that_cannot_be_made_leaves_nothing_open(num_sockets):
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, num_sockets)
    for _ in range(3):
        with pytest.raises(zmq.ZMQError, match="Too many open files"):
            sockets.Dealer(context, "tcp://127.0.0.1:1")
    context.term()


# -------------------- addresses


def test_an_address_that_cannot_be_listened_on_is_named_and_nothing_left_open(ends, tmp_path):
    router = ends.router()
    assert router.url == router.connectable_url() == f"tcp://127.0.0.1:{router.port}"
    assert ends.router(max_bytes=1000).port != router.port > 0
    # `localhost` is ::1 too on many hosts, where this learner does not listen.
    greeted(router, ends.dealer(f"tcp://localhost:{router.port}"))
    for url, reason, advice in (
        (router.url, "Address already in use", "is another learner running?"),
        ("tcp://192.0.2.1:5555", "", "name an address of this host"),
        ("tcp://nohost.invalid:1", "its host is no name or address of this host", "name an addr"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"on {url}: {reason}")) as caught:
            ends.router(url)
        assert f"; {advice}" in str(caught.value)
    for name in ("x" * sockets.IPC_PATH_MAX_BYTES, "missing/folder/ipc"):
        with pytest.raises(ConfigError, match=rf"cannot listen on ipc://{tmp_path}/{name}: \w"):
            ends.router(ipc=tmp_path / name)
    for end in ends.open:
        end.close()
    # A socket that was left open would let this wait for ever.
    ending = threading.Thread(target=ends.context.term, daemon=True)
    ending.start()
    ending.join(DEADLINE_S)
    assert not ending.is_alive()


def test_a_wildcard_is_told_as_something_to_connect_to(ends, monkeypatch):
    router = ends.router("tcp://0.0.0.0:*")
    probe = MagicMock(**{"getsockname.return_value": ("127.0.0.3", 7)})
    make = MagicMock(**{"return_value.__enter__.return_value": probe})
    monkeypatch.setattr(sockets.socket, "socket", make)
    assert router.connectable_url() == f"tcp://127.0.0.3:{router.port}"
    greeted(router, ends.dealer(router.connectable_url()))
    assert router.connectable_url("learner.example") == f"tcp://learner.example:{router.port}"
    # Without a way out, what its own name stands for, or else an interface.
    make.assert_called_with(socket.AF_INET, socket.SOCK_DGRAM)
    probe.connect.side_effect = OSError("Network is unreachable")
    monkeypatch.setattr(sockets.socket, "gethostname", lambda: "this-host")
    names, interfaces = {"this-host": "192.0.2.5"}, {}
    monkeypatch.setattr(sockets.socket, "gethostbyname", names.__getitem__)
    monkeypatch.setattr(sockets.psutil, "net_if_addrs", lambda: interfaces)
    assert router.connectable_url() == f"tcp://192.0.2.5:{router.port}"
    names["this-host"] = "127.0.1.1"  # so it is on Debian
    assert router.connectable_url() == f"tcp://127.0.0.1:{router.port}"
    for name, family, address in (
        ("lo", socket.AF_INET, "127.0.0.1"),
        ("ib0", socket.AF_INET6, "fe80::1"),
        ("ib1", socket.AF_INET, "192.0.2.6"),
    ):
        interfaces[name] = [MagicMock(family=family, address=address)]
    assert router.connectable_url() == f"tcp://192.0.2.6:{router.port}"
    monkeypatch.setattr(sockets.socket, "gethostbyname", MagicMock(side_effect=OSError))
    assert router.connectable_url() == f"tcp://192.0.2.6:{router.port}"


def has_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this host has no ::1")
def test_an_address_in_brackets_is_ipv6(ends):
    router = ends.router("tcp://[::1]:*")
    assert router.connectable_url() == router.url == f"tcp://[::1]:{router.port}"
    dealer = ends.dealer(router.url)
    assert router.send(greeted(router, dealer), [b"welcome"])
    assert dealer.receive(DEADLINE_S) == [b"welcome"]
    # All addresses of both kinds are told as one that works.
    router = ends.router("tcp://[::]:*")
    assert "[::]" not in router.connectable_url()
    for url in (router.connectable_url(), f"tcp://[::1]:{router.port}"):
        greeted(router, ends.dealer(url))
