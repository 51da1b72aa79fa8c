"""Addresses of a learner that exist, that do not, and that somebody else has; and how long an
actor's end waits."""

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from impala_async.wire import sockets
from impala_async.wire.sockets import IPC_PATH_MAX_BYTES, AddressError, Router
from tests.wire.ends import DEADLINE_S, Ends, greeted, take, until


@pytest.fixture
def router(ends: Ends) -> Router:
    return ends.router()


def test_any_port_is_a_real_one(router: Router, ends: Ends) -> None:
    assert router.url == f"tcp://127.0.0.1:{router.port}"
    assert router.port > 0
    assert router.connectable_url() == router.url
    assert ends.router(max_bytes=1000).port != router.port


def test_an_address_in_use_is_named(router: Router, ends: Ends) -> None:
    with pytest.raises(AddressError, match=f"{router.url}: Address already in use"):
        ends.router(router.url)


def test_an_address_of_another_host_is_named(ends: Ends) -> None:
    with pytest.raises(AddressError, match=r"tcp://192\.0\.2\.1:5555: "):
        ends.router("tcp://192.0.2.1:5555")


def test_a_host_that_does_not_resolve_is_no_device(ends: Ends) -> None:
    with pytest.raises(AddressError, match=r"tcp://nohost\.invalid:1: its host is no name or add"):
        ends.router("tcp://nohost.invalid:1")


@pytest.mark.parametrize("name", ["x" * IPC_PATH_MAX_BYTES, "missing/folder/ipc"])
def test_an_ipc_path_that_cannot_be_is_named(ends: Ends, tmp_path: Path, name: str) -> None:
    with pytest.raises(AddressError, match=rf"cannot listen on ipc://{tmp_path}/{name}: \w"):
        ends.router(ipc=tmp_path / name)


def test_after_a_refused_bind_nothing_is_left_open(router: Router, ends: Ends) -> None:
    for _ in range(3):
        with pytest.raises(AddressError):
            ends.router(router.url)
    router.close()
    # A socket that was left open would let this wait for ever.
    ending = threading.Thread(target=ends.context.term, daemon=True)
    ending.start()
    ending.join(DEADLINE_S)
    assert not ending.is_alive()


class Networked:
    """A socket of a host that has a way to others, or none."""

    way: str | None = "127.0.0.3"

    def __init__(self, family: int, kind: int) -> None:
        assert kind == socket.SOCK_DGRAM

    def __enter__(self) -> "Networked":
        return self

    def __exit__(self, *error: object) -> None: ...

    def connect(self, address: tuple[str, int]) -> None:
        if self.way is None:
            raise OSError("Network is unreachable")

    def getsockname(self) -> tuple[str | None, int]:
        return self.way, 7


def test_a_wildcard_is_told_as_something_to_connect_to(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = ends.router("tcp://0.0.0.0:*")
    monkeypatch.setattr(sockets.socket, "socket", Networked)
    assert router.connectable_url() == f"tcp://127.0.0.3:{router.port}"
    greeted(router, ends.dealer(router.connectable_url()))
    # Without a network, what its own name stands for.
    monkeypatch.setattr(Networked, "way", None)
    monkeypatch.setattr(sockets.socket, "gethostname", lambda: "this-host")
    monkeypatch.setattr(sockets.socket, "gethostbyname", {"this-host": "127.0.0.2"}.__getitem__)
    assert router.connectable_url() == f"tcp://127.0.0.2:{router.port}"
    greeted(router, ends.dealer(router.connectable_url()))

    def unknown(host: str) -> str:
        raise OSError(host)

    monkeypatch.setattr(sockets.socket, "gethostbyname", unknown)
    assert router.connectable_url() == f"tcp://127.0.0.1:{router.port}"


# -------------------- IPv6


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no ::1")


@needs_ipv6
def test_an_address_in_brackets_is_ipv6(ends: Ends) -> None:
    router = ends.router("tcp://[::1]:*")
    assert router.connectable_url() == router.url == f"tcp://[::1]:{router.port}"
    dealer = ends.dealer(router.url)
    route = greeted(router, dealer)
    assert router.send(route, [b"welcome"])
    assert dealer.receive(DEADLINE_S) == [b"welcome"]


@needs_ipv6
def test_all_addresses_of_both_kinds_are_told_as_one_that_works(ends: Ends) -> None:
    router = ends.router("tcp://[::]:*")
    assert "[::]" not in router.connectable_url()
    for url in (router.connectable_url(), f"tcp://[::1]:{router.port}"):
        greeted(router, ends.dealer(url))


def test_a_name_is_looked_up_as_ever(ends: Ends) -> None:
    """`localhost` is ::1 too on many hosts, where this learner does not listen."""
    router = ends.router("tcp://127.0.0.1:*")
    greeted(router, ends.dealer(f"tcp://localhost:{router.port}"))


# -------------------- the actor's end


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_a_last_word_is_out_before_the_socket_closes(ends: Ends, tmp_path: Path, kind: str) -> None:
    router = ends.router(ipc=tmp_path / "ipc", max_bytes=1 << 26)
    dealer = ends.dealer(router.url if kind == "tcp" else f"ipc://{tmp_path / 'ipc'}")
    greeted(router, dealer)
    # It takes its time, and what is behind it must wait.
    assert dealer.send([bytes(1 << 24)])
    dealer.send_last([b"understood"])
    dealer.close()
    take(router)
    assert take(router)[1] == b"understood"


def test_a_last_word_to_nobody_does_not_hold_up_the_end(ends: Ends) -> None:
    router = ends.router()
    dealer = ends.dealer(router.url)
    greeted(router, dealer)
    router.close()
    until(lambda: not dealer.send([b"into the void"]))
    started = time.monotonic()
    dealer.send_last([b"understood"])
    dealer.close()
    ends.context.term()
    assert time.monotonic() - started < DEADLINE_S / 2


def test_receiving_waits_as_long_as_it_is_told(router: Router, ends: Ends) -> None:
    dealer = ends.dealer(router.url)
    started = time.monotonic()
    assert dealer.receive(0.05) is None
    assert 0.04 < time.monotonic() - started < DEADLINE_S
    started = time.monotonic()
    assert dealer.receive(0) is None
    assert time.monotonic() - started < 0.04


def test_waiting_ends_by_a_message_or_by_the_other_descriptor(router: Router, ends: Ends) -> None:
    dealer, wake_fd = ends.dealer(router.url), os.eventfd(0, os.EFD_NONBLOCK)
    route = greeted(router, dealer)
    try:
        assert not dealer.wait(0.01, wake_fd)
        os.eventfd_write(wake_fd, 1)
        assert dealer.wait(DEADLINE_S, wake_fd)
        os.eventfd_read(wake_fd)
        assert router.send(route, [b"news"])
        started = time.monotonic()
        assert not dealer.wait(DEADLINE_S, wake_fd)
        assert time.monotonic() - started < DEADLINE_S / 2
        assert dealer.receive(0) == [b"news"]
        assert not dealer.wait(-1.0, wake_fd)
    finally:
        os.close(wake_fd)
