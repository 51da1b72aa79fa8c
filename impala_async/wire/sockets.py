"""ZeroMQ sockets, thin: a ROUTER for a learner's two ports, a DEALER for who dials them. Frames are
received into buffers that the caller owns, so a trajectory lands where it stays."""

import ctypes
import errno
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import psutil
import zmq
from zmq.utils.garbage import gc

from impala_async.errors import ConfigError
from impala_async.wire import messages as wire
from impala_async.wire.connections import (
    MAX_NEW_LOCKED,
    WATCHED,
    Connections,
    Monitor,
    most_descriptors,
)
from impala_async.wire.keys import OVERHEAD_BYTES, Key, wants_key

NO_FRAME = -1
# As plain numbers: an enum is looked up at every call, several times for each message.
_NOBLOCK, _POLLIN = int(zmq.NOBLOCK), int(zmq.POLLIN)
_MORE = int(zmq.SNDMORE) | _NOBLOCK
_EVENTS, _RCVMORE = int(zmq.EVENTS), int(zmq.RCVMORE)
IPC_PATH_MAX_BYTES = 107
# Two I/O threads were the fastest in every trial that had messages of over 100 KiB.
IO_THREADS = 2
# ZeroMQ's own way keeps the 8 KiB that a small message came in for as long as it waits: 200 peers
# that say hello take 300 MB. Large ones are received where they stay in either way.
_ZERO_COPY_RECV = 10
_HEADER_BUFFER_BYTES = wire.MAX_HEADER_BYTES + wire.MAX_INLINE_BYTES
# A half-open connection ends after this long. ZeroMQ's own heartbeats are never set: one of them
# aborts the process where a peer hung up while its messages were waiting. Leases decide the rest.
_KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 15, zmq.TCP_KEEPALIVE_INTVL: 5}
# A last word waits this long behind frames that are still being transferred.
_LAST_WORD_MS = 200
# A connection that broke is made again at once; a learner that is not there is not hammered at. At
# a port that is shut the kernel would knock after ever longer: 1 s, 2 s, 4 s, and up to a minute.
# Where somebody takes the call and is silent, ZeroMQ would wait for half a minute.
_REDIALLING = {
    **{zmq.RECONNECT_IVL: 10, zmq.RECONNECT_IVL_MAX: 250},
    **{zmq.CONNECT_TIMEOUT: 2000, zmq.HANDSHAKE_IVL: 10_000},
}
# ZeroMQ does not dial again where nonsense came, as of another service there, and where one
# hangs up it does so a hundred times a second: then we do.
REDIAL_S = 1.0
# So often a dealer looks at how much came, and no wait for another descriptor is longer.
_LOOK_EVERY_S = 0.1
_DIALLED = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
# One that hangs up is asked whether it wants a key. It answers at once, if at all.
_ASK_S = 0.5
# Frames of a message that are dropped in one go: a few milliseconds.
MAX_DISCARDED = 5000
MAX_UNDER_WAY = 2
# Messages that wait at a dealer until they are read: what is no learner must not fill our memory.
MAX_UNREAD = 4
# This limits a frame at a data port: settings and the layout of weights are the largest.
MAX_ANSWER_BYTES = 4 << 20
# Messages that wait at a router for one peer, behind what the kernel holds: who reads has none.
MAX_UNSENT = 128
_NOTHING = memoryview(bytearray(1))


Context = zmq.Context[zmq.Socket[bytes]]


def new_context() -> Context:
    # A router counts the routes that it gives up from a number of C's `rand`, and aborts the
    # process where the next one is taken by a peer that has claimed it. So nobody may know them.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))
    context: Context = zmq.Context(io_threads=IO_THREADS)
    # Another release may not know it.
    with suppress(zmq.ZMQError):
        context.set(_ZERO_COPY_RECV, 0)
    # A thread of pyzmq's keeps what is under way. It would begin with the first weights, at a time
    # when the system may have no thread left.
    if not gc.is_alive():
        gc.start()
    return context


def _new_socket(context: Context, kind: int, url: str) -> zmq.Socket[bytes]:
    made = context.socket(kind)
    made.set(zmq.LINGER, 0)
    # Not always: `localhost` would become ::1, and miss a learner at 127.0.0.1.
    made.set(zmq.IPV6, int(url.startswith("tcp://[")))
    for option, value in _KEEPALIVE.items():
        made.set(option, value)
    return made


def _own_address() -> str:
    """Where other hosts find this one; its loopback if there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        # Nothing is sent: the kernel says from which address it would be, to one that nobody has.
        probe.connect(("203.0.113.1", 9))
        return str(probe.getsockname()[0])
    # A cluster may have no way out. There Debian has a loopback address for the host's own name.
    found = list[str]()
    with suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    for addresses in psutil.net_if_addrs().values():
        found += (each.address for each in addresses if each.family == socket.AF_INET)
    return next((each for each in found if not each.startswith("127.")), "127.0.0.1")


class Router:
    """The end that others dial. Never blocks: a peer that cannot be reached costs a counter."""

    def __init__(
        self,
        context: Context,
        tcp_url: str,
        ipc_path: str | None,
        max_message_bytes: int,
        key: Key | None = None,
    ) -> None:
        """The key is for tcp; the folder of an ipc path lets in this user alone."""
        self._socket = _new_socket(context, zmq.ROUTER, tcp_url)
        # Small frames are tracked as large ones are.
        self._socket.copy_threshold = 0
        # By route: messages of several frames, and when each has left over the slowest line.
        self._under_way: dict[bytes, list[tuple[zmq.MessageTracker, float]]] = {}
        # By route: messages in a row that found no room behind those that wait.
        self.num_unsent: Counter[bytes] = Counter()
        self._socket.set(zmq.SNDHWM, MAX_UNSENT)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        # One of two that claim the same routing id must go, or the other is never read nor freed.
        self._socket.set(zmq.ROUTER_HANDOVER, 1)
        self._socket.set(zmq.MAXMSGSIZE, max_message_bytes + (OVERHEAD_BYTES if key else 0))
        self._header = memoryview(bytearray(_HEADER_BUFFER_BYTES))
        self.has_more_frames = False
        self.connections = Connections(
            Monitor(self._socket, WATCHED), most_descriptors() // 4, is_locked=key is not None
        )
        if ipc_path is not None:
            self._bind(f"ipc://{ipc_path}")
        if key is not None:
            key.guard(self._socket)
            # Where the kernel's own queue is full, newcomers have knocked in vain.
            self._socket.set(zmq.BACKLOG, MAX_NEW_LOCKED)
        self._bind(tcp_url)
        self.url = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    @property
    def fd(self) -> int:
        """Edge-triggered: readable once when something changed; then drain until `receive` ends."""
        return int(self._socket.get(zmq.FD))

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def connectable_url(self, host: str | None = None) -> str:
        """The tcp url for somebody else: of that host, or else of the one that it listens on, which
        is never a wildcard."""
        own, _, port = self.url.removeprefix("tcp://").rpartition(":")
        if host is None and own in ("0.0.0.0", "[::]"):
            own = _own_address()
        return f"tcp://{host or own}:{port}"

    def has_input(self) -> bool:
        """Must be asked again after every send: a send consumes the descriptor's edge."""
        return bool(int(self._socket.get(_EVENTS)) & _POLLIN)

    def receive(self) -> tuple[bytes, memoryview, int] | None:
        """Route, header frame and its true size (it may exceed the frame); None when drained.

        The header is valid until the next call. Further frames are taken with `receive_into`.
        """
        try:
            route = self._socket.recv(_NOBLOCK)
        except zmq.Again:
            self.connections.note_drained()
            return None
        self.has_more_frames = True
        if not self.connections.is_first(route):
            size = self.receive_into(self._header)
            return route, self._header[: max(size, 0)], size
        # This takes longer, and tells over which connection it came.
        frame = self._socket.recv(copy=False)
        self.has_more_frames, size = frame.more, len(frame.buffer)
        kept = min(size, len(self._header))
        self._header[:kept] = frame.buffer[:kept]
        # A connection that is closed already is none any more.
        with suppress(zmq.ZMQError):
            self.connections.note_first(route, int(frame.get(zmq.SRCFD)))
        return route, self._header[:kept], size

    def receive_into(self, buffer: memoryview) -> int:
        """Receive the message's next frame; NO_FRAME, or its true size: what is over is lost."""
        if not self.has_more_frames:
            return NO_FRAME
        size = int(self._socket.recv_into(buffer))
        self.has_more_frames = bool(self._socket.get(_RCVMORE))
        return size

    def discard_rest(self) -> int:
        """Drop what is left of the message, or MAX_DISCARDED frames of it; how many there were."""
        for number in range(MAX_DISCARDED):
            if self.receive_into(_NOTHING) == NO_FRAME:
                return number
        return MAX_DISCARDED

    def send(self, route: bytes, frames: Sequence[wire.Frame]) -> bool:
        """Send without blocking; False if the peer is gone or does not take it now. A peer has only
        a few messages of several frames under way: one that reads none must not fill our memory."""
        under_way = self._under_way.get(route, []) if len(frames) > 1 else []
        if len(under_way) >= MAX_UNDER_WAY:
            under_way = [sent for sent in under_way if not sent[0].done]
            if len(under_way) >= MAX_UNDER_WAY:
                return False
        try:
            self._socket.send(route, _MORE)
        except zmq.ZMQError as error:
            if error.errno == zmq.EAGAIN:
                self.num_unsent[route] += 1
                return False
            self.num_unsent.pop(route, None)
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        if self.num_unsent:
            self.num_unsent.pop(route, None)
        # A peer that takes the first frame takes all. A small header is copied faster than shared.
        header, *others = frames
        self._socket.send(header, _MORE if others else _NOBLOCK)
        if others:
            # This tracks the last frame, which is the one that holds much.
            tracker = self._socket.send_multipart(others, _NOBLOCK, copy=False, track=True)
            assert tracker is not None
            due_at = time.monotonic() + memoryview(others[-1]).nbytes / wire.SLOWEST_BYTES_PER_S
            self._under_way[route] = [*under_way, (tracker, due_at)]
        return True

    def find_stuck(self, patience_s: float) -> list[bytes]:
        """The routes over which a message has not left for longer than the slowest line takes, and
        this: each may hold weights of another version, which nobody else needs any more."""
        stuck, before = [], time.monotonic() - patience_s
        for route, sent in [*self._under_way.items()]:
            self._under_way[route] = left = [each for each in sent if not each[0].done]
            if not left:
                del self._under_way[route]
            elif min(due_at for _, due_at in left) < before:
                stuck.append(route)
        return stuck

    def close(self) -> None:
        self.connections.close()
        self._socket.close()

    def _bind(self, url: str) -> None:
        try:
            self._socket.bind(url)
        except zmq.ZMQError as error:
            self.close()
            reason = zmq.strerror(error.errno or 0)
            if error.errno == errno.ENODEV:
                reason = "its host is no name or address of this host"
            advice = "name an address of this host, or 0.0.0.0 for all of them"
            if error.errno == zmq.EADDRINUSE:
                advice = "is another learner running? name another port, or * for any free one"
            raise ConfigError(f"cannot listen on {url}: {reason}; {advice}") from None


class Dealer:
    """The end of one connection that dials, which is an actor's."""

    def __init__(
        self,
        context: Context,
        url: str,
        max_frame_bytes: int = MAX_ANSWER_BYTES,
        key: Key | None = None,
    ) -> None:
        """A larger frame than allowed ends its connection, and so do more bytes without a message:
        frames of nothing that never end are 32 times as large in our memory. The key is for tcp."""
        self._socket = _new_socket(context, zmq.DEALER, url)
        self._socket.set(zmq.RCVHWM, MAX_UNREAD)
        self.has_key = key is not None and not url.startswith("ipc:")
        if key is not None and self.has_key:
            key.show(self._socket)
        self._socket.set(zmq.MAXMSGSIZE, max_frame_bytes + (OVERHEAD_BYTES if self.has_key else 0))
        self._url, self._redial_at = url, math.inf
        self.is_local = url.startswith("ipc:")
        # Nothing queues for a learner that is not there: what was said to it would be out of date.
        self._socket.set(zmq.IMMEDIATE, 1)
        for option, value in _REDIALLING.items():
            self._socket.set(option, value)
        try:
            self._monitor = Monitor(self._socket, _DIALLED)
        except zmq.ZMQError:
            self._socket.close()
            raise
        self.is_cut_short = False
        """Whether the last connection ended before both ends were known to talk by ZeroMQ."""
        self.is_key_one_sided = False
        """Whether one of both ends has a key, and the other one none."""
        # These are of the connection that there is now.
        self._is_connected = self._is_greeted = False
        self._connections, self._look_at = self._new_connections(), 0.0
        # By the route, which has no name here.
        self._allowances = {b"": max_frame_bytes + _HEADER_BUFFER_BYTES}
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._socket.connect(url)

    @property
    def is_greeted(self) -> bool:
        """Whether the connection that there is now has been greeted over. If not, what was sent
        since the last greeting may be lost, and so may the answers."""
        self._connections.read()
        return self._is_greeted

    def greet(self, frames: Sequence[wire.Frame]) -> bool:
        """Send what lets the other end know who is here; False if there is no connection now."""
        self._connections.read()
        if not self._is_connected or not self.send(frames):
            return False
        self._is_greeted = True
        # From now on the loss of a connection ends a wait.
        self._poller.register(self._monitor.socket, zmq.POLLIN)
        return True

    def send(self, frames: Sequence[wire.Frame]) -> bool:
        """Send without blocking; False if there is no connection now. Frames are not copied: they
        must stay as they are until the learner settled them."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def send_last(self, frames: Sequence[wire.Frame]) -> None:
        """Send what nothing will follow: closing waits a moment until it is out."""
        self._socket.set(zmq.LINGER, _LAST_WORD_MS)
        self.send(frames)

    def receive(self, timeout_s: float) -> list[memoryview] | None:
        """The next message's frames; None if none came in time, or if the connection that was
        greeted over is gone meanwhile. Weights are not copied."""
        if timeout_s > 0 and self._poller.poll(max(1, int(timeout_s * 1000))):
            # Unread, it would wake every wait to come.
            self._connections.read()
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            if (now := time.monotonic()) >= self._look_at:
                self._look_at = now + _LOOK_EVERY_S
                self._connections.look(self._allowances)
            if now >= self._redial_at:
                self._hang_up()
                self._redial_at = math.inf
                self._socket.connect(self._url)
            return None
        self._connections.is_first(b"")
        return [frame.buffer for frame in frames]

    def wait(self, timeout_s: float, wake_fd: int) -> bool:
        """Wait for a message, another connection or another descriptor; whether that woke us."""
        timeout_ms = int(1000 * min(max(0.0, timeout_s), _LOOK_EVERY_S))
        self._poller.register(wake_fd, zmq.POLLIN)
        woken = wake_fd in dict(self._poller.poll(timeout_ms))
        self._poller.unregister(wake_fd)
        return woken

    def close(self) -> None:
        self._monitor.close()
        self._socket.close()

    def _new_connections(self) -> Connections:
        connections = Connections(self._monitor)
        connections.follow = self._follow
        return connections

    def _hang_up(self) -> None:
        """Dial no more. ZeroMQ does not tell of the end of a connection that this ends, whose
        descriptor may be another's then."""
        with suppress(zmq.ZMQError):  # there is nothing that could be ended
            self._socket.disconnect(self._url)
        self._connections = self._new_connections()

    def _follow(self, event: int, _: int) -> None:
        if self.is_cut_short and self._redial_at < math.inf:
            return  # it is of a connection that was ended here
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._redial_at = math.inf
            self.is_cut_short = self.is_key_one_sided = False
        elif event == zmq.EVENT_DISCONNECTED:
            self._redial_at = time.monotonic() + REDIAL_S
            self.is_cut_short = not self._is_connected
            if self.is_cut_short:
                self._hang_up()
                if not (self.is_local or self.is_key_one_sided):
                    self.is_key_one_sided = wants_key(self._url, _ASK_S) == (not self.has_key)
        # Another thread tells of this one, perhaps after the handshake.
        if event != zmq.EVENT_CONNECTED:
            self._is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._is_greeted = False
