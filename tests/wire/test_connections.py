"""Real connections: who sends too much is cut off, who has a reason to send much is not."""

import math
import resource
import socket
import time
from contextlib import ExitStack, suppress
from unittest.mock import Mock

import pytest
import zmq

from impala_async.wire import connections, sockets
from impala_async.wire import connections as module
from impala_async.wire.keys import new_key
from tests.proxy import LEARNER_HOST
from tests.wire import raw_peer
from tests.wire.ends import ANY_PORT, DEADLINE_S, greeted, take, until

MUCH = 8 << 20


@pytest.fixture
def router(ends):
    return ends.router(max_bytes=1 << 26)


@pytest.fixture
def dial(router):
    """Makes raw connections, and closes them all."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(raw_peer.connect(router.url))


def is_over(raw):
    """Whether the other side has closed it."""
    raw.setblocking(False)
    try:
        return raw.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def say_hello(router, raw):
    """The route to a raw connection that has said something."""
    raw.sendall(raw_peer.message(b"hello"))
    return take(router)[0]


def send_frames(raw, number):
    """A message that does not end; as much of it as is taken before the connection is cut."""
    raw.settimeout(5.0)
    with suppress(ConnectionError):
        raw.sendall(raw_peer.EMPTY_AND_MORE * number)


def look(router, times, allowances):
    """How many connections have been cut off by then."""
    for _ in range(times):
        router.connections.look(allowances)
    return router.connections.cut_off.total()


def look_until_over(router, raw, allowances):
    until(lambda: (router.connections.look(allowances) and False) or is_over(raw))


def test_who_is_known_may_have_as_much_under_way_as_its_credit_allows(ends, router, dial):
    # As long as its messages come through it may send on.
    actor = ends.dealer(router.url)
    route = greeted(router, actor)
    for _ in range(20):
        until(lambda: actor.send([b"x" * (1 << 20)]))
        assert take(router)[0] == route
        assert look(router, 1, {route: 1 << 20}) == 0
    # We were busy: it has come, and we have not taken it yet.
    until(lambda: actor.send([b"x" * MUCH]))
    until(router.has_input)
    assert router.connections.look({route: 1000}), "there is a doubt"
    take(router)
    assert look(router, 3, {route: 1000}) == 0
    assert not router.connections.look({route: 1000})
    raw = dial()
    route = say_hello(router, raw)
    look(router, 1, {route: 0})
    send_frames(raw, 100_000)
    # The handshake counts too where the connection is noticed only after its first message.
    assert look(router, 5, {route: 201_000}) == 0
    look_until_over(router, raw, {route: 199_000})
    assert router.connections.cut_off == {connections.SENT_TOO_MUCH: 1}


def test_strangers_have_little_under_way_alone_and_together(router, dial, monkeypatch):
    # One message of frames without end.
    bomb, good = dial(), dial()
    send_frames(bomb, connections.STRANGER_BYTES)
    route = say_hello(router, good)
    look_until_over(router, bomb, {})
    assert not is_over(good)
    assert router.send(route, [b"welcome"])
    monkeypatch.setattr(module, "STRANGERS_BYTES", 100_000)
    quiet = dial()
    for _ in range(400):
        quiet.sendall(raw_peer.message(b"x" * 250))
    for _ in range(400):
        take(router)
    # Bytes of whole messages are not under way.
    assert look(router, 3, {}) == 1
    # Each of them less than one alone may send.
    bombs = [dial() for _ in range(3)]
    for number, bomb in enumerate(bombs):
        send_frames(bomb, 20_000 + 1000 * number)
    look_until_over(router, bombs[2], {})
    look(router, 5, {})
    assert [is_over(raw) for raw in (quiet, *bombs)] == [False, False, False, True]
    assert router.connections.cut_off == {connections.SENT_BEFORE: 2}
    # Some of it is kept.
    monkeypatch.setattr(module, "KEPT_SHARE", 1)
    look_until_over(router, quiet, {})


def test_who_dials_ends_a_message_without_end_and_connects_again(ends, monkeypatch):
    monkeypatch.setattr(sockets, "_LOOK_EVERY_S", 0.0)
    # However often a proxy without a learner has hung up on it.
    monkeypatch.setattr(module, "MAX_LEAVING", -1)
    with socket.create_server((LEARNER_HOST, 0)) as listening:
        dealer = ends.dealer(f"tcp://{LEARNER_HOST}:{listening.getsockname()[1]}", 1000)
        with raw_peer.accept(listening) as raw:
            # Bytes of whole messages are not under way.
            for _ in range(3):
                send_frames(raw, 5000)
                raw.sendall(raw_peer.message(b"whole"))
                until(lambda: dealer.receive(0))
            assert not any(dealer.receive(0) or is_over(raw) for _ in range(10))
            send_frames(raw, 7000)
            until(lambda: dealer.receive(0) or is_over(raw))
        with raw_peer.accept(listening) as raw:
            raw.sendall(raw_peer.message(b"grant"))
            until(lambda: dealer.receive(0) == [b"grant"])


def test_a_message_may_come_before_the_word_of_its_connection(router, dial, monkeypatch):
    """The threads of ZeroMQ tell of them one each."""
    with monkeypatch.context() as late:
        late.setattr(router.connections._monitor, "read", lambda: [])
        raw = dial()
        route = say_hello(router, raw)
        look(router, 1, {route: MUCH})
    send_frames(raw, connections.STRANGER_BYTES)
    assert look(router, 5, {route: MUCH}) == 0
    router.connections.cut(route, connections.SENT_TOO_MUCH)
    until(lambda: is_over(raw))


def test_too_many_strangers_make_the_oldest_go(ends, router, dial, monkeypatch):
    monkeypatch.setattr(router.connections, "_max_strangers", 3)
    route = greeted(router, ends.dealer(router.url))
    look(router, 1, {route: 1000})
    strangers = [dial() for _ in range(5)]
    until(lambda: router.connections.read() or router.connections.cut_off.total() == 2)
    until(lambda: is_over(strangers[0]) and is_over(strangers[1]))
    assert not any(is_over(raw) for raw in strangers[2:])
    assert router.connections.cut_off == {connections.NEVER_JOINED: 2}
    assert router.send(route, [b"here"])
    # The descriptors of a process are not all for them.
    monkeypatch.setattr(module.resource, "getrlimit", lambda _: (40, 40))
    assert ends.router().connections._max_strangers == 10


def test_nobody_is_let_in_while_many_wait_to_be_read(ends, router, dial, monkeypatch):
    """ZeroMQ reads no further where a thousand messages wait, and does not see the end of those."""
    watched, knock = router.connections, (LEARNER_HOST, router.port)
    monkeypatch.setattr(module, "MAX_LEAVING", 2)
    monkeypatch.setattr(module, "STRANGER_BYTES", 1000)
    for number in range(3):
        raw = dial()
        raw.sendall(raw_peer.message(b"x") * 10_000)
        until(lambda num=number: look(router, 1, {}) > num)
    with pytest.raises(TimeoutError):
        socket.create_connection(knock, timeout=0.1)
    assert take(router)[0] in watched.gone

    def are_gone():
        while router.receive() is not None:
            router.discard_rest()
        watched.look({}, is_drained=True)
        return not watched._leaving

    until(are_gone)
    socket.create_connection(knock, timeout=0.1).close()
    # So do those that came while something was left to read, whether they hung up or not.
    while not watched._is_shut and len(watched._open) < 9:
        num_before, raw = len(watched._open), dial()
        raw.sendall(raw_peer.message(b"x") * 100)
        until(lambda num=num_before: watched.read() or len(watched._open) > num)
    with pytest.raises(TimeoutError):
        socket.create_connection(knock, timeout=0.1)
    # The kernel would wait longer each time.
    assert 0 < ends.dealer(router.url)._socket.get(zmq.CONNECT_TIMEOUT) <= 2000
    until(are_gone)
    socket.create_connection(knock, timeout=0.1).close()
    # One that is never closed keeps nobody out for ever; and only the last are remembered.
    watched._leaving = dict.fromkeys(range(-3, 0), -math.inf)
    watched.look({})
    socket.create_connection(knock, timeout=0.1).close()
    monkeypatch.setattr(module, "MAX_GONE", len(watched.gone))
    watched._note_gone(b"another")
    assert len(watched.gone) == module.MAX_GONE


def test_behind_a_key_some_hundreds_may_come_between_two_looks(ends, monkeypatch):
    """They bring no messages: what they cost is their handshakes."""
    monkeypatch.setattr(module, "MAX_NEW_LOCKED", 3)
    monkeypatch.setattr(module, "MAX_LEAVING", 1)
    router = ends.router(key=new_key())
    watched, knock = router.connections, (LEARNER_HOST, router.port)
    raws = [socket.create_connection(knock) for _ in range(4)]
    until(lambda: watched.read() or len(watched._open) == 4)
    assert router.receive() is None  # that all is read says nothing of newcomers
    assert watched.shut_s == 0.0
    with pytest.raises(TimeoutError):
        socket.create_connection(knock, timeout=0.1)
    assert watched.look({})  # the next one is soon
    assert 0.1 <= watched.shut_s < 5.0
    raws.append(socket.create_connection(knock, timeout=0.1))
    until(lambda: watched.read() or len(watched._open) == 5)
    assert not watched.look({})
    for raw in raws:
        raw.close()


def test_a_port_is_held_shut_for_a_while(router, monkeypatch):
    watched, knock = router.connections, (LEARNER_HOST, router.port)
    for seconds in (0.1, 0.2):
        watched.hold_shut(seconds)
    since = time.monotonic()
    watched.look({}, is_drained=True)
    with socket.socket() as raw:
        raw.settimeout(0.05)
        with pytest.raises(TimeoutError):
            raw.connect(knock)
    until(lambda: watched.look({}, is_drained=True) or not watched._is_shut)
    # The second time comes on top of the first.
    assert time.monotonic() - since > 0.25
    socket.create_connection(knock, 5.0).close()
    monkeypatch.setattr(module, "LONGEST_HOLD_S", 0.01)
    watched.hold_shut(1000.0)
    until(lambda: watched.look({}, is_drained=True) or not watched._is_shut)


def test_where_memory_grows_what_is_never_a_whole_message_is_ended(ends, router, monkeypatch):
    monkeypatch.setattr(module, "UNFINISHED_S", 0.1)
    watched, actors = router.connections, [ends.dealer(router.url) for _ in range(3)]
    known = dict.fromkeys((greeted(router, actor) for actor in actors), 1 << 30)
    with raw_peer.connect(router.url) as raw:
        raw.sendall(raw_peer.message(b"hello"))
        route = take(router)[0]
        known[route] = 1 << 30
        watched.look(known)
        before = module._bytes_received(watched._routes[route])
        raw.sendall(raw_peer.EMPTY_AND_MORE * module.UNFINISHED_BYTES)
        until(lambda: module._bytes_received(watched._routes[route]) > before + 8000)
        time.sleep(0.2)
        watched.look(known)
        assert watched.cut_off.total() == 0
        for num_cut in (0, 1):  # the rest may wait for us, who were busy
            watched.look(known, is_memory_growing=True)
            assert watched.cut_off.total() == num_cut
        assert watched.cut_off == {module.NEVER_WHOLE: 1}
        assert watched._routes.keys() == known.keys() - {route}
    # Those who are slow once are not.
    for _ in range(2):
        watched.look(known, is_memory_growing=True)
    assert watched.cut_off.total() == 1


def test_where_memory_grows_who_says_nothing_whole_is_ended_and_who_joined_is_not(
    ends, router, dial, monkeypatch
):
    """A head of 97,000 bytes, and no more: a hundred kilobytes each."""
    watched, actor = router.connections, ends.dealer(router.url)
    known = {greeted(router, actor): 1 << 30}
    mute = [dial() for _ in range(3)]
    for raw in mute:
        raw.sendall(b"\x06" + (97_000).to_bytes(8) + b"some")
    until(lambda: watched.read() or len(watched._open) == 4)
    for _ in range(2):  # they are new
        watched.look(known, is_memory_growing=True)
    monkeypatch.setattr(module, "MUTE_S", 0.0)
    for _ in range(2):
        watched.look(known)
    watched.look(known, is_memory_growing=True)
    # Their words may wait for us, who were busy.
    assert watched.cut_off.total() == 0
    watched.look(known, is_memory_growing=True)
    assert watched.cut_off == {module.SAID_NOTHING: 3}
    until(lambda: all(map(is_over, mute)))
    assert watched._routes.keys() == known.keys()


def test_who_hangs_up_without_a_word_is_counted(ends, router, dial):
    watched, actor = router.connections, ends.dealer(router.url)
    greeted(router, actor)
    for num_left, says in ((1, b""), (1, raw_peer.message(b"hello")), (2, b"\x06")):
        raw = dial()
        raw.sendall(says)
        until(lambda: watched.read() or len(watched._open) == 2)
        if num_left == 1 and says:
            take(router)
        raw.close()
        until(lambda: watched.read() or len(watched._open) == 1)
        assert watched.num_left == num_left
    actor.close()
    until(lambda: watched.read() or not watched._open)
    assert watched.num_left == 2


def test_while_a_port_is_shut_those_are_ended_who_came_before_and_have_not_joined(ends, router):
    watched, actor = router.connections, ends.dealer(router.url)
    route = greeted(router, actor)
    with raw_peer.connect(router.url) as raw:
        until(lambda: watched.read() or len(watched._open) == 2)
        watched.look({route: 100})
        assert watched.cut_off.total() == 0
        watched.hold_shut(10.0)
        watched.look({route: 100})
        assert watched.cut_off == {module.SHUT_OUT: 1}
        raw.settimeout(5.0)
        while raw.recv(100):
            pass
    until(lambda: watched.read() or [*watched._routes] == [route])


def test_who_went_is_forgotten_and_not_cut_in_the_shape_of_its_successor(ends, router, monkeypatch):
    watched = router.connections
    for _ in range(10):
        actor = ends.dealer(router.url)
        route = greeted(router, actor)
        assert watched.is_first(route) is False
        actor.close()
    until(lambda: watched.look({}) or not watched._open)
    assert watched._routes == {}
    watched.cut(b"nobody", "")
    assert watched.cut_off.total() == 0
    actor = ends.dealer(router.url)
    route = greeted(router, actor)
    actor.close()
    # Not looked at since: its descriptor may be that of the next one to come.
    until(lambda: int(watched._monitor.socket.get(zmq.EVENTS)) & zmq.POLLIN)
    cut = []
    monkeypatch.setattr(watched, "_cut", lambda fd, _: cut.append(fd))
    watched.cut(route, "")
    assert cut == []


def test_who_comes_and_goes_is_told_in_order_and_holds_nothing_up(ends):
    num_peers = 1500  # each is two events, and libzmq queues 2,000 unless it is told otherwise
    # With one thread: what several tell comes in any order.
    with zmq.Context(io_threads=1) as context, context.socket(zmq.ROUTER) as listening:
        listening.set(zmq.BACKLOG, num_peers)
        monitor = connections.Monitor(listening, int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED))
        listening.bind(ANY_PORT)
        url = listening.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        host, _, port = url.removeprefix("tcp://").partition(":")
        assert monitor.read() == []
        heard = []
        for number in range(num_peers):
            socket.create_connection((host, int(port))).close()
            if number == 0:
                until(lambda: heard.extend(monitor.read()) or len(heard) >= 2)
        came, went = heard
        assert (came[0], went[0]) == (zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED)
        assert came[1] == went[1] > 0
        dealer = ends.dealer(url)
        until(lambda: dealer.send([b"hello"]))
        assert listening.poll(DEADLINE_S * 1000)
        monitor.close()
        monitor.close()


NO_LIMIT = resource.RLIM_INFINITY


def test_as_many_descriptors_are_asked_for_as_are_allowed(monkeypatch):
    for soft, hard, wanted in (
        *((1024, 4096, 4096), (1024, 1 << 20, 65536), (1024, NO_LIMIT, 65536)),
        *((100_000, 1 << 20, 100_000), (256, 256, 256), (NO_LIMIT, NO_LIMIT, 65536)),
    ):
        monkeypatch.setattr(resource, "getrlimit", Mock(return_value=(soft, hard)))
        monkeypatch.setattr(resource, "setrlimit", Mock())
        assert connections.most_descriptors() == wanted
        asked = [pair for (_, pair), _ in resource.setrlimit.call_args_list]
        assert asked == ([(wanted, hard)] if 0 <= soft < wanted else []), soft
