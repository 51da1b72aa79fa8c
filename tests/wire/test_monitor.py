import socket
from collections.abc import Iterator

import pytest
import zmq

from impala_async.wire.monitor import Happening, Monitor
from tests.wire.ends import ANY_PORT, DEADLINE_S, until

EVENTS = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
# Each is two events, and libzmq queues 2,000 unless it is told otherwise.
NUM_PEERS = 1500


@pytest.fixture
def listening() -> Iterator[tuple[zmq.Socket[bytes], Monitor, str]]:
    """A socket, its monitor, and where it listens."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.set(zmq.BACKLOG, NUM_PEERS)
    monitor = Monitor(router, EVENTS)
    router.bind(ANY_PORT)
    yield router, monitor, router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
    monitor.close()
    context.destroy(linger=0)


def call(url: str) -> None:
    host, _, port = url.removeprefix("tcp://").partition(":")
    socket.create_connection((host, int(port))).close()


def test_who_comes_and_goes_is_told_in_order(
    listening: tuple[zmq.Socket[bytes], Monitor, str],
) -> None:
    _, monitor, url = listening
    assert monitor.read() == []
    call(url)
    heard: list[Happening] = []
    until(lambda: heard.extend(monitor.read()) or len(heard) >= 2)
    came, went = heard
    assert (came.event, went.event) == (zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED)
    assert came.value == went.value > 0
    assert came.endpoint.startswith("tcp://127.0.0.1:")


def test_what_nobody_reads_holds_nothing_up(
    listening: tuple[zmq.Socket[bytes], Monitor, str],
) -> None:
    router, _, url = listening
    for _ in range(NUM_PEERS):
        call(url)
    with router.context.socket(zmq.DEALER) as peer:
        peer.connect(url)
        peer.send(b"hello")
        assert router.poll(DEADLINE_S * 1000)
