import socket
from collections.abc import Iterator

import pytest
import zmq

from impala_async.wire.monitor import Happening, Monitor
from tests.wire.ends import ANY_PORT, until

NUM_PEERS = 1500
EVENTS = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)


@pytest.fixture
def watched() -> Iterator[tuple[Monitor, tuple[str, int]]]:
    """The monitor of a listening socket, and where that listens."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.set(zmq.BACKLOG, NUM_PEERS)
    monitor = Monitor(router, EVENTS)
    router.bind(ANY_PORT)
    host, _, port = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")[6:].partition(":")
    yield monitor, (host, int(port))
    monitor.close()
    router.close(linger=0)
    context.term()


def read(monitor: Monitor, num: int) -> list[Happening]:
    heard: list[Happening] = []
    until(lambda: heard.extend(monitor.read()) or len(heard) >= num)
    return heard


def test_who_comes_and_goes_is_told_in_order(watched: tuple[Monitor, tuple[str, int]]) -> None:
    monitor, address = watched
    assert monitor.read() == []
    socket.create_connection(address).close()
    came, went = read(monitor, 2)
    assert came.event == zmq.EVENT_ACCEPTED
    assert went.event == zmq.EVENT_DISCONNECTED
    assert came.value == went.value > 0
    assert came.endpoint.startswith("tcp://127.0.0.1:")


def test_what_nobody_reads_holds_nothing_up(watched: tuple[Monitor, tuple[str, int]]) -> None:
    """More events than libzmq queues by itself; the peer is served all the same."""
    monitor, address = watched
    for _ in range(NUM_PEERS):
        socket.create_connection(address).close()
    assert len(read(monitor, 2 * NUM_PEERS)) == 2 * NUM_PEERS
