"""Addresses of a learner that exist, that do not, and that somebody else has."""

import re
import socket
import threading

import pytest

from impala_async.wire import sockets
from impala_async.wire.sockets import (
    IPC_PATH_MAX_BYTES,
    AddressError,
)
from tests.wire.ends import DEADLINE_S, greeted


@pytest.fixture
def router(ends):
    return ends.router()


def test_any_port_is_a_real_one(router, ends):
    assert router.url == f"tcp://127.0.0.1:{router.port}"
    assert router.port > 0
    assert router.connectable_url() == router.url
    assert ends.router(max_bytes=1000).port != router.port
    # `localhost` is ::1 too on many hosts, where this learner does not listen.
    greeted(router, ends.dealer(f"tcp://localhost:{router.port}"))


def test_an_address_that_cannot_be_listened_on_is_named_and_nothing_left_open(
    router, ends, tmp_path
):
    for url, reason, is_taken in (
        (router.url, "Address already in use", True),
        ("tcp://192.0.2.1:5555", "", False),
        ("tcp://nohost.invalid:1", "its host is no name or address of this host", False),
    ):
        with pytest.raises(AddressError, match=re.escape(f"on {url}: {reason}")) as caught:
            ends.router(url)
        assert caught.value.is_taken == is_taken
    for name in ("x" * IPC_PATH_MAX_BYTES, "missing/folder/ipc"):
        with pytest.raises(AddressError, match=rf"cannot listen on ipc://{tmp_path}/{name}: \w"):
            ends.router(ipc=tmp_path / name)
    router.close()
    # A socket that was left open would let this wait for ever.
    ending = threading.Thread(target=ends.context.term, daemon=True)
    ending.start()
    ending.join(DEADLINE_S)
    assert not ending.is_alive()


class Networked:
    """A socket of a host that has a way to others, or none."""

    way: str | None = "127.0.0.3"

    def __init__(self, family, kind):
        assert kind == socket.SOCK_DGRAM

    def __enter__(self):
        return self

    def __exit__(self, *error): ...

    def connect(self, address):
        if self.way is None:
            raise OSError("Network is unreachable")

    def getsockname(self):
        return self.way, 7


def test_a_wildcard_is_told_as_something_to_connect_to(ends, monkeypatch):
    router = ends.router("tcp://0.0.0.0:*")
    monkeypatch.setattr(sockets.socket, "socket", Networked)
    assert router.connectable_url() == f"tcp://127.0.0.3:{router.port}"
    greeted(router, ends.dealer(router.connectable_url()))
    # Without a network, what its own name stands for.
    monkeypatch.setattr(Networked, "way", None)
    monkeypatch.setattr(sockets.socket, "gethostname", lambda: "this-host")
    monkeypatch.setattr(sockets.socket, "gethostbyname", {"this-host": "127.0.0.2"}.__getitem__)
    assert router.connectable_url() == f"tcp://127.0.0.2:{router.port}"

    def unknown(host):
        raise OSError(host)

    monkeypatch.setattr(sockets.socket, "gethostbyname", unknown)
    assert router.connectable_url() == f"tcp://127.0.0.1:{router.port}"


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
    route = greeted(router, dealer)
    assert router.send(route, [b"welcome"])
    assert dealer.receive(DEADLINE_S) == [b"welcome"]
    # All addresses of both kinds are told as one that works.
    router = ends.router("tcp://[::]:*")
    assert "[::]" not in router.connectable_url()
    for url in (router.connectable_url(), f"tcp://[::1]:{router.port}"):
        greeted(router, ends.dealer(url))
