"""Real connections: who sends too much is cut off, who has a reason to send much is not."""

import resource
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress

import pytest
import zmq

from impala_async.wire import connections as module
from impala_async.wire.connections import (
    NEVER_JOINED,
    SENT_BEFORE,
    SENT_TOO_MUCH,
    STRANGER_BYTES,
    Connections,
    Monitor,
    most_descriptors,
)
from impala_async.wire.sockets import Router
from tests.wire import raw_peer
from tests.wire.ends import ANY_PORT, DEADLINE_S, Ends, greeted, take, until

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
    heard: list[tuple[int, int]] = []
    until(lambda: heard.extend(monitor.read()) or len(heard) >= 2)
    came, went = heard
    assert (came[0], went[0]) == (zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED)
    assert came[1] == went[1] > 0


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


MUCH = 8 << 20
Dial = Callable[[str], socket.socket]


@pytest.fixture
def router(ends: Ends) -> Iterator[Router]:
    router = Router(ends.context, ANY_PORT, None, 1 << 26)
    yield router
    router.close()


@pytest.fixture
def watched(router: Router) -> Connections:
    return router.connections


@pytest.fixture
def dial() -> Iterator[Dial]:
    """Makes raw connections, and closes them all."""
    with ExitStack() as stack:
        yield lambda url: stack.enter_context(raw_peer.connect(url))


def is_over(raw: socket.socket) -> bool:
    """Whether the other side has closed it."""
    raw.setblocking(False)
    try:
        return raw.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def send_all(raw: socket.socket, data: bytes) -> None:
    """As much of it as is taken before the connection is cut."""
    raw.settimeout(5.0)
    with suppress(ConnectionError):
        raw.sendall(data)


def look_until(
    watched: Connections, is_so: Callable[[], bool], allowances: Mapping[bytes, int]
) -> None:
    def look() -> bool:
        watched.look(allowances)
        return is_so()

    until(look)


def test_one_message_of_frames_without_end_is_cut_off(
    router: Router, watched: Connections, dial: Dial
) -> None:
    bomb, good = dial(router.url), dial(router.url)
    send_all(bomb, raw_peer.EMPTY_AND_MORE * STRANGER_BYTES)
    good.sendall(raw_peer.message(b"hello"))
    route = take(router)[0]
    look_until(watched, lambda: is_over(bomb), {})
    assert watched.cut_off == {SENT_BEFORE: 1}
    assert not is_over(good)
    assert router.send(route, [b"welcome"])


def test_who_is_known_may_send_on_as_long_as_its_messages_come_through(
    ends: Ends, router: Router, watched: Connections
) -> None:
    actor = ends.dealer(router.url)
    route = greeted(router, actor)
    for _ in range(20):
        until(lambda: actor.send([b"x" * (1 << 20)]))
        assert take(router)[0] == route
        watched.look({route: 1 << 20})
    assert watched.cut_off.total() == 0


def test_who_is_known_may_have_as_much_under_way_as_its_credit_allows(
    router: Router, watched: Connections, dial: Dial
) -> None:
    raw = dial(router.url)
    raw.sendall(raw_peer.message(b"hello"))
    route = take(router)[0]
    watched.look({route: 0})
    send_all(raw, raw_peer.EMPTY_AND_MORE * 100_000)
    for _ in range(5):
        watched.look({route: 200_000})
    assert watched.cut_off.total() == 0
    look_until(watched, lambda: is_over(raw), {route: 199_000})
    assert watched.cut_off == {SENT_TOO_MUCH: 1}


def test_strangers_have_little_under_way_together(
    router: Router, watched: Connections, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STRANGERS_BYTES", 100_000)
    quiet = dial(router.url)
    for _ in range(400):
        quiet.sendall(raw_peer.message(b"x" * 250))
    for _ in range(400):
        take(router)
    # What came as whole messages is not under way.
    for _ in range(3):
        watched.look({})
    assert watched.cut_off.total() == 0
    # Each of them less than one alone may send.
    bombs = [dial(router.url) for _ in range(3)]
    for number, bomb in enumerate(bombs):
        send_all(bomb, raw_peer.EMPTY_AND_MORE * (20_000 + 1000 * number))
    look_until(watched, lambda: is_over(bombs[2]), {})
    for _ in range(5):
        watched.look({})
    assert [is_over(raw) for raw in (quiet, *bombs)] == [False, False, False, True]
    assert watched.cut_off == {SENT_BEFORE: 1}


def test_a_message_may_come_before_the_word_of_its_connection(
    router: Router, watched: Connections, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads of ZeroMQ tell of them one each."""
    with monkeypatch.context() as late:
        late.setattr(watched._monitor, "read", lambda: [])
        raw = dial(router.url)
        raw.sendall(raw_peer.message(b"hello"))
        route = take(router)[0]
        watched.look({route: MUCH})
    send_all(raw, raw_peer.EMPTY_AND_MORE * STRANGER_BYTES)
    for _ in range(5):
        watched.look({route: MUCH})
    assert watched.cut_off.total() == 0
    watched.cut(route, SENT_TOO_MUCH)
    until(lambda: is_over(raw))


def test_one_look_at_much_is_no_reason(ends: Ends, router: Router, watched: Connections) -> None:
    actor = ends.dealer(router.url)
    route = greeted(router, actor)
    watched.look({route: 1000})
    until(lambda: actor.send([b"x" * MUCH]))
    until(router.has_input)
    # We were busy: it has come, and we have not taken it yet.
    watched.look({route: 1000})
    take(router)
    for _ in range(3):
        watched.look({route: 1000})
    assert watched.cut_off.total() == 0


def test_too_many_strangers_make_the_oldest_go(
    ends: Ends, router: Router, watched: Connections, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "_max_strangers", 3)
    actor = ends.dealer(router.url)
    route = greeted(router, actor)
    watched.look({route: 1000})
    strangers = [dial(router.url) for _ in range(5)]
    until(lambda: watched.read() or watched.cut_off.total() == 2)
    until(lambda: is_over(strangers[0]) and is_over(strangers[1]))
    assert not any(is_over(raw) for raw in strangers[2:])
    assert watched.cut_off == {NEVER_JOINED: 2}
    assert router.send(route, [b"here"])


def test_the_descriptors_of_a_process_are_not_all_for_strangers(
    ends: Ends, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.resource, "getrlimit", lambda _: (40, 40))
    router = Router(ends.context, ANY_PORT, None, 1 << 20)
    watched = router.connections
    for _ in range(12):
        dial(router.url)
    until(lambda: watched.read() or watched.cut_off.total() == 2)
    router.close()


def test_who_went_is_not_cut_in_the_shape_of_its_successor(
    ends: Ends, router: Router, watched: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[int] = []
    monkeypatch.setattr(watched, "_cut", lambda fd, _: cut.append(fd))
    actor = ends.dealer(router.url)
    route = greeted(router, actor)
    actor.close()
    # Not looked at since: its descriptor may be that of the next one to come.
    until(lambda: int(watched._monitor.socket.get(zmq.EVENTS)) & zmq.POLLIN)
    watched.cut(route, "")
    assert cut == []


def test_who_went_is_forgotten(ends: Ends, router: Router, watched: Connections) -> None:
    for _ in range(10):
        actor = ends.dealer(router.url)
        route = greeted(router, actor)
        assert watched.is_first(route) is False
        actor.close()
    look_until(watched, lambda: not watched._open, {})
    assert watched._routes == {}
    watched.cut(b"nobody", "")
    assert watched.cut_off.total() == 0


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ((1024, 4096), 4096),
        ((1024, 1 << 20), 65536),
        ((1024, resource.RLIM_INFINITY), 65536),
        ((100_000, 1 << 20), 100_000),
        ((256, 256), 256),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 65536),
    ],
)
def test_as_many_descriptors_are_asked_for_as_are_allowed(
    limits: tuple[int, int], wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: asked.append(pair))
    assert most_descriptors() == wanted
    assert asked == ([(wanted, limits[1])] if 0 <= limits[0] < wanted else [])
