"""A key of a run: who has it is heard, over tcp, and nobody else; and no text shows it."""

import secrets
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import zmq

from impala_async.errors import ConfigError
from impala_async.wire import keys
from impala_async.wire.keys import Key, key_in_environment, new_key
from tests.wire.ends import greeted, take, until


@pytest.fixture
def key():
    return new_key()


def test_only_who_has_the_key_is_heard(ends, key):
    router = ends.router(key=key)
    stranger, other = ends.dealer(router.url), ends.dealer(router.url, key=new_key())
    until(lambda: router.connections.read() or router.connections.num_left >= 2)
    assert not router.connections.cut_off
    assert not stranger.send([b"hello"])
    assert not other.send([b"hello"])
    route = greeted(router, friend := ends.dealer(router.url, key=key))
    assert router.send(route, [b"welcome", bytes(100_000)])
    until(lambda: (got := friend.receive(0.1)) and [len(x) for x in got] == [7, 100_000])
    assert not router.has_input()


def test_both_ends_are_told_where_one_of_them_alone_has_a_key(ends, key):
    locked, unlocked = ends.router(key=key), ends.router()
    pairs = [ends.dealer(locked.url), ends.dealer(unlocked.url, key=key)]
    for dealer in pairs:
        until(lambda dealer=dealer: dealer.receive(0.05) or dealer.is_key_one_sided)
    assert [dealer.has_key for dealer in pairs] == [False, True]
    # Without a key it is any stranger's nonsense.
    unlocked.connections.read()
    assert not unlocked.connections.cut_off


def carry(near, far, is_over, change=None):
    """Carry bytes between both until that is over, or until the far end hangs up: whether it did.
    Bytes of the near end are changed."""
    give_up_at = time.monotonic() + 3
    while not is_over() and time.monotonic() < give_up_at:
        for source in select.select([near, far], [], [], 0.01)[0]:
            said = source.recv(65536)
            if not said:
                return source is far
            (far if source is near else near).sendall(
                change(said) if change and source is near else said
            )
    return False


def with_last_flipped(said):
    return said[:-1] + bytes([said[-1] ^ 1])


def test_a_frame_that_was_changed_on_its_way_ends_its_connection(ends, key):
    """A listener of ours that asks for more of ZeroMQ's events keeps every second one open."""
    router = ends.router(key=key)
    place = "127.0.0.1", int(router.url.rpartition(":")[2])
    for _ in range(20):
        with socket.create_server(("127.0.0.1", 0)) as line:
            dealer = ends.dealer(f"tcp://127.0.0.1:{line.getsockname()[1]}", key=key)
            near, _ = line.accept()
        with near, socket.create_connection(place) as far:
            carry(near, far, lambda dealer=dealer: dealer.send([b"hello"]))
            carry(near, far, router.has_input)
            assert take(router)[1] == b"hello"
            assert dealer.send([b"hello"])
            assert carry(near, far, lambda: False, with_last_flipped)
        dealer.close()
    assert not router.has_input()


@contextmanager
def hasty(mechanism):
    """One that hangs up as soon as a mechanism is named, and names its own where it is waited for:
    so does ZeroMQ as a process of its own, four times of five."""
    signature = b"\xff" + bytes(8) + b"\x7f\x03"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.settimeout(0.2)
                        connection.sendall(signature)
                        with suppress(TimeoutError):
                            said = 0
                            while said <= len(signature) and (more := connection.recv(100)):
                                said += len(more)
                            continue
                        connection.sendall(b"\x01" + mechanism.ljust(52, b"\0"))

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize(
    ("mechanism", "has_key", "is_one_sided"),
    [(b"CURVE", False, True), (b"NULL", True, True), (b"CURVE", True, False), (b"", True, False)],
)
def test_one_that_hangs_up_is_asked_whether_it_wants_a_key(
    ends, key, mechanism, has_key, is_one_sided
):
    with hasty(mechanism) as url:
        dealer = ends.dealer(url, key=key if has_key else None)
        until(lambda: dealer.receive(0.05) or dealer.is_cut_short)
        assert dealer.is_key_one_sided is is_one_sided


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9, b"\xff" * 12])
def test_who_does_not_say_in_time_whether_it_wants_a_key(says):
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:
        url, began = f"tcp://127.0.0.1:{server.getsockname()[1]}", time.monotonic()
        asked = thread.submit(keys.wants_key, url, 0.3)
        connection, _ = server.accept()
        with connection:
            connection.sendall(says)
            assert asked.result(5) is None
    assert time.monotonic() - began < 3
    assert keys.wants_key(url, 0.3) is None  # nobody is there any more
    assert keys.wants_key("ipc:///no/path", 0.3) is None


def test_one_that_says_a_byte_now_and_then_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:
        url, began = f"tcp://127.0.0.1:{server.getsockname()[1]}", time.monotonic()
        asked = thread.submit(keys.wants_key, url, 0.3)
        connection, _ = server.accept()
        with connection, suppress(OSError):
            while not asked.done():
                connection.sendall(b"\xff")
                time.sleep(0.1)
        assert asked.result() is None
    assert time.monotonic() - began < 2


def test_another_key_is_no_end_that_has_none(ends, key):
    dealer = ends.dealer(ends.router(key=key).url, key=new_key())
    until(lambda: dealer.receive(0.05) or dealer.is_cut_short)
    assert not dealer.is_key_one_sided


def test_the_path_on_this_host_wants_no_key(ends, key, tmp_path):
    router = ends.router(ipc=tmp_path / "ipc", key=key)
    greeted(router, ends.dealer(f"ipc://{tmp_path / 'ipc'}", key=key))
    greeted(router, ends.dealer(f"ipc://{tmp_path / 'ipc'}"))


def test_the_largest_message_is_as_large_with_a_key(ends, key):
    router = ends.router(key=key, max_bytes=1000)
    dealer = ends.dealer(router.url, max_frame_bytes=1000, key=key)
    route = greeted(router, dealer)
    assert dealer.send([bytes(1000)])
    assert take(router)[2] == 1000
    assert router.send(route, [bytes(1000)])
    until(lambda: (got := dealer.receive(0.1)) and len(got[0]) == 1000)
    assert dealer.send([bytes(1000 + keys.OVERHEAD_BYTES + 1)])
    until(lambda: dealer.receive(0.05) or not dealer.is_greeted)
    assert not router.has_input()


def test_nothing_that_is_said_can_be_read_on_its_way(ends, key):
    """Somebody in the middle passes on all bytes, and has seen neither a word nor the key."""
    router = ends.router(key=key)
    port = int(router.url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", 0)) as middle:
        dealer = ends.dealer(f"tcp://127.0.0.1:{middle.getsockname()[1]}", key=key)
        near, _ = middle.accept()
        far = socket.create_connection(("127.0.0.1", port))
        seen = bytearray()

        def pass_on():
            for source, target in ((near, far), (far, near)):
                source.setblocking(False)
                try:
                    data = source.recv(1 << 16)
                except BlockingIOError:
                    continue
                seen.extend(data)
                target.sendall(data)

        until(lambda: pass_on() or dealer.send([b"a word that is secret"]))
        until(lambda: pass_on() or router.has_input())
        near.close()
        far.close()
    assert take(router)[1] == b"a word that is secret"
    # The public key is as secret as the key, which it lets in.
    public = zmq.curve_public(key._secret)
    for word in (b"a word", bytes.fromhex(key.text), key.text.encode(), public):
        assert word not in seen
    assert b"CURVE" in seen


def test_it_is_64_hexadecimal_digits_and_no_error_shows_it():
    text = secrets.token_hex(32)
    assert Key(f" {text.upper()}\n", "there") == Key(text, "here") != new_key()
    for wrong in (text[:-1], f"{text}0", text[:-1] + "g", "é" * 64, "hunter2" * 9):
        with pytest.raises(ConfigError, match="there: wants 64 hexadecimal digits") as caught:
            Key(wrong, "there")
        assert wrong not in str(caught.value)
    assert text not in repr(Key(text, "there"))


def test_the_environment_may_have_it(monkeypatch):
    monkeypatch.delenv(keys.KEY_VARIABLE, raising=False)
    assert key_in_environment() is None
    monkeypatch.setenv(keys.KEY_VARIABLE, "")
    assert key_in_environment() is None
    monkeypatch.setenv(keys.KEY_VARIABLE, "0" * 64)
    assert key_in_environment() == Key("0" * 64, "there")
    monkeypatch.setenv(keys.KEY_VARIABLE, "secret")
    with pytest.raises(ConfigError, match=r"IMPALA_ASYNC_KEY: wants .* got 6 characters"):
        key_in_environment()
