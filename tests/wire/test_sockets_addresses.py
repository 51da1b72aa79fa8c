"""Addresses of a learner that exist, that do not, and that somebody else has; and the private
folder of its host: who may enter, how long its paths are, that it goes away."""

import os
import re
import socket
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from impala_async.errors import ConfigError
from impala_async.wire import sockets
from impala_async.wire.sockets import (
    IPC_PATH_MAX_BYTES,
    AddressError,
    LocalLink,
    is_socket,
    read_nonce,
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


# -------------------- the folder of this host


@pytest.fixture
def runtime_dir(monkeypatch):
    """A short path, which the folder of a test is not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_only_this_user_may_enter(runtime_dir):
    link, other = LocalLink(), LocalLink()
    folder = Path(link.nonce_path).parent
    assert folder.parent == runtime_dir
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {Path(path).parent for path in (link.data_path, link.weights_path)} == {folder}
    assert Path(link.nonce_path).read_bytes() == link.nonce
    assert len(link.nonce) == 16
    assert link.nonce != other.nonce
    for each in (link, other, link):
        each.close()
    assert list(runtime_dir.iterdir()) == []


def test_where_the_runtime_folder_does_not_do_the_temporary_one_does(tmp_path, monkeypatch):
    long = tmp_path / ("ü" * 60)
    long.mkdir()
    for value in ("", "/nowhere/at/all", str(long)):
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        link = LocalLink()
        assert len(os.fsencode(link.weights_path)) <= IPC_PATH_MAX_BYTES
        assert Path(link.nonce_path).read_bytes() == link.nonce
        assert list(long.iterdir()) == []
        link.close()


def test_where_nothing_can_be_written_the_variable_is_named(monkeypatch):
    def fail(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    for runtime, named in (("", "TMPDIR"), ("/tmp", "XDG_RUNTIME_DIR")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        with pytest.raises(ConfigError, match=f"^{named}: .*: Read-only file system: name one"):
            LocalLink()


def test_paths_of_a_stranger_may_name_anything(ends, tmp_path):
    good, pipe, link, listening = (tmp_path / name for name in ("good", "pipe", "link", "socket"))
    good.write_bytes(b"n" * 16)
    link.symlink_to(good)
    os.mkfifo(pipe)
    ends.router(ipc=listening)
    (tmp_path / "large").write_bytes(b"n" * 100_000)
    assert read_nonce(str(good)) == b"n" * 16
    assert len(read_nonce(str(tmp_path / "large")) or b"") == 64
    assert is_socket(str(listening))
    for path in ("/dev/zero", "/dev/tty", "", "\0", "x" * 5000, *map(str, (pipe, link, tmp_path))):
        assert read_nonce(path) is None
        assert not is_socket(path)
