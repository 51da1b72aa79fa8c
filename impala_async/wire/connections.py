"""The connections of a socket, seen from outside: how much each has sent, and cutting one off.

ZeroMQ shows a message when it is whole, and limits no frames: 2 bytes on the wire are 64 in memory.
So the kernel is asked how many bytes have come over each tcp connection.
"""

import ctypes
import math
import resource
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

import zmq

Answer = TypeVar("Answer")

# All that somebody may send before it is known: a hello, a schema, and as much again.
STRANGER_BYTES = 2 << 16
# All strangers together may have so much under way. Each of them needs a thousandth of it. A share
# of what came before counts too: ZeroMQ keeps all that a handshake says.
STRANGERS_BYTES = 1 << 19
KEPT_SHARE = 32
MAX_STRANGERS = 1000
MANY_DESCRIPTORS = 65536
# ZeroMQ closes one that was cut off only when what it took from there is read. While more than so
# many wait for that, each for so long at most, nobody is let in; and so many are remembered.
MAX_LEAVING, LONGEST_LEAVE_S, MAX_GONE = 100, 10.0, 10_000
# Where a key keeps strangers' messages out, so many may come from one look to the next: each costs
# what a handshake does. While more come, looks are frequent: whoever floods a port is there first
# each time that it opens, and a newcomer knocks but once a second.
MAX_NEW_LOCKED = 1000
LONGEST_HOLD_S = 10.0
# Frames of nothing take 32 times as much memory as bytes. So where memory grows, more than so many
# bytes that are no whole message after so long are no trajectory on a slow line.
UNFINISHED_BYTES, UNFINISHED_S = 4096, 1.0
# A connection over which nothing whole has come takes up to 130 kB. Newcomers say hello within some
# round trips.
MUTE_S = 5.0
# Why one is cut off: it is a connection that ...
SENT_TOO_MANY_FRAMES = "sent a message of too many frames"
SENT_TOO_MUCH = "sent more than credit allows"
SENT_BEFORE = "sent much and had not joined"
CLAIMED_MUCH = "claimed a routing id longer than 255 bytes"
NEVER_JOINED = "never joined, as too many did not"
SHUT_OUT = "had not joined while the port was shut"
NEVER_WHOLE = "sent what was no whole message while memory grew"
SAID_NOTHING = "said nothing while memory grew"
SAID_HELLO = "said hello again and again"
DOES_NOT_READ = "did not read"
REPLACED = "gave way to another one of its session"
UNHEARD = "ended before a word of theirs was read, as they do without the key of this run"
_BEGINNINGS = zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED
# A failed handshake is not watched: while libzmq 4.3.5 tells of a frame that it cannot decrypt, it
# loses the errno by which it would close the connection, and the descriptor stays open for ever.
WATCHED = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
# SO_ATTACH_FILTER, with one instruction that drops all, and SO_DETACH_FILTER: all that comes to a
# listener is from newcomers, who knock again after a second. To unbind it would end all others.
_DROP = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
_FILTERS = {True: (26, struct.pack("@HP", 1, ctypes.addressof(_DROP))), False: (27, bytes(4))}
# tcpi_bytes_received, since Linux 4.1.
_BYTES_RECEIVED = struct.Struct("=128xQ")
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_EVENT = struct.Struct("=Hi")
_numbers = count()


class Monitor:
    """Reads the events of one socket; made before that binds or connects, closed before it is."""

    def __init__(self, of: zmq.Socket[bytes], events: int) -> None:
        """`events`: of which kinds, one bit each."""
        address = f"inproc://monitor-{next(_numbers)}"
        self._of = of
        of.monitor(address, events)
        self.socket: zmq.Socket[bytes] = of.context.socket(zmq.PAIR)
        """The socket that pollers watch."""
        self.socket.set(zmq.LINGER, 0)
        # An I/O thread waits for room to tell something: there is always some.
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.connect(address)

    def read(self) -> list[tuple[int, int]]:
        """Return what came since the last call: each event, and its value, mostly a descriptor."""
        found: list[tuple[int, int]] = []
        # Asked often, mostly in vain: a look costs a fraction of a refused `recv`.
        while int(self.socket.get(_EVENTS)) & _POLLIN:
            found.append(_EVENT.unpack(self.socket.recv_multipart(zmq.NOBLOCK)[0]))
        return found

    def close(self) -> None:
        if not self.socket.closed:
            self._of.disable_monitor()
            self.socket.close()


@dataclass(slots=True)
class _Connection:
    # That of its first message.
    route: bytes = b""
    # All bytes by the last look before which a message of it was whole; and, of a peer, accepted.
    heard_bytes: int = 0
    accepted_bytes: int = 0
    # When little was under way last; over ipc nobody asks.
    whole_at: float = math.inf
    opened_at: float = field(default_factory=time.monotonic)

    def note(self, received: int, *, is_heard: bool, is_known: bool) -> None:
        """So many bytes have come by now; since the last look a whole message was among them."""
        if is_heard:
            self.heard_bytes = received
            if is_known:
                self.accepted_bytes = received
        if received - self.heard_bytes <= UNFINISHED_BYTES or self.whole_at == math.inf:
            self.whole_at = time.monotonic()


class Connections:
    """Owns the monitor of a socket. Nothing that fails here is worth more than this look:
    a connection may end at any moment, and its descriptor be another's."""

    def __init__(
        self, monitor: Monitor, max_strangers: int = MAX_STRANGERS, *, is_locked: bool = False
    ) -> None:
        """`is_locked`: nothing that is said without the key comes through."""
        # The counts since the start, by the reason.
        self.cut_off: Counter[str] = Counter()
        self.shut_s = 0.0
        """For how long nobody was let in, since the start, until the last look."""
        self._shut_at = math.inf
        self.is_locked = is_locked
        self._monitor = monitor
        self.num_left = 0
        """How many are gone that had said nothing whole, since the start: those that hung up, and
        those without the key, which ZeroMQ ends."""
        # Hears of every event.
        self.follow: Callable[[int, int], object] = lambda event, value: None
        # The connections by descriptor, in the order of their coming.
        self._open: dict[int, _Connection] = {}
        self._strangers: dict[int, None] = {}
        self._routes: dict[bytes, int] = {}
        # Routes of connections that another thread has not told us of yet, by descriptor.
        self._early: dict[int, bytes] = {}
        self._heard: set[bytes] = set()
        # Descriptors over which too much had come at the last look.
        self._doubtful: set[int] = set()
        self._max_strangers = min(MAX_STRANGERS, max_strangers)
        # Routes of those that were cut off: whatever still comes from there is dropped.
        self.gone: dict[bytes, None] = {}
        # Descriptors of those of them that ZeroMQ has not closed yet, and when they were cut off.
        self._leaving: dict[int, float] = {}
        self._listener, self._is_shut, self._shut_until = -1, False, -math.inf
        # Those that came since all was read: each may bring a thousand messages, and hang up.
        self._num_new = 0

    @property
    def fd(self) -> int:
        """Readable when somebody came or went: then `read`."""
        return int(self._monitor.socket.get(zmq.FD))

    def is_first(self, route: bytes) -> bool:
        """A message came from there; whether it is not known yet over which connection."""
        if route in self._heard:
            return False
        self._heard.add(route)
        return route not in self._routes

    def note_first(self, route: bytes, fd: int) -> None:
        self.read()
        if fd in self._leaving:
            self._note_gone(route)
        elif fd not in self._open:
            self._early[fd] = route
        else:
            connection = self._open[fd]
            self._routes.pop(connection.route, None)
            connection.route, self._routes[route] = route, fd

    @property
    def _are_many_new(self) -> bool:
        return self._num_new > (MAX_NEW_LOCKED if self.is_locked else MAX_LEAVING)

    def note_drained(self) -> None:
        """All that had come is read."""
        self._num_new *= self.is_locked

    def read(self) -> None:
        """Take in who came and who went. Too many strangers make the oldest go."""
        for event, fd in self._monitor.read():
            self.follow(event, fd)
            self.num_left += fd in self._open and not self._open[fd].route
            self._forget(fd)
            self._leaving.pop(fd, None)
            if event == zmq.EVENT_LISTENING:
                self._listener = fd
            if event in _BEGINNINGS:
                self._num_new += 1
                self._open[fd], self._strangers[fd] = _Connection(), None
                if route := self._early.pop(fd, b""):
                    self._open[fd].route, self._routes[route] = route, fd
        while len(self._strangers) > self._max_strangers:
            self._cut(next(iter(self._strangers)), NEVER_JOINED)
        self._shut(self._is_shut or self._are_many_new)

    def look(
        self,
        allowances: Mapping[bytes, int],
        *,
        is_drained: bool = False,
        is_memory_growing: bool = False,
    ) -> bool:
        """End those that send too much; whether the next look should be soon: there is a doubt, or
        more came than a port with a key lets in.
        A peer that is known has an allowance, by its route: the bytes that may be under way."""
        self.read()
        heard, self._heard = self._heard, set()
        under_way: dict[int, int] = {}
        doubtful: dict[int, str] = {}
        for fd, connection in self._open.items():
            allowed = allowances.get(connection.route)
            if allowed is None:
                self._strangers.setdefault(fd)
            else:
                self._strangers.pop(fd, None)
            received = _bytes_received(fd)
            if received is None:
                continue
            connection.note(
                received, is_heard=connection.route in heard, is_known=allowed is not None
            )
            why = SENT_BEFORE if allowed is None else SENT_TOO_MUCH
            if allowed is None:
                kept = (received - connection.accepted_bytes) // KEPT_SHARE
                under_way[fd] = max(received - connection.heard_bytes, kept)
                allowed = STRANGER_BYTES
            if received - connection.accepted_bytes > allowed:
                doubtful[fd] = why
        # Those of whom most is under way go, until all strangers together have sent little.
        excess = sum(under_way.values()) - STRANGERS_BYTES
        for fd in sorted(under_way, key=under_way.__getitem__, reverse=True):
            if excess > 0:
                doubtful[fd] = SENT_BEFORE
            excess -= under_way[fd]
        if is_memory_growing:
            doubtful |= self._not_whole()
        # Once more: what it sent may be waiting for us, who were busy.
        for fd in self._doubtful & doubtful.keys():
            self._cut(fd, doubtful[fd])
        self._doubtful = doubtful.keys() & self._open.keys()
        is_flooded = self.is_locked and self._are_many_new
        self._num_new *= not (is_drained or self.is_locked)
        self._open_or_shut(under_way.keys() & self._strangers.keys())
        return is_flooded or bool(self._doubtful)

    def hold_shut(self, seconds: float) -> None:
        """Let nobody in for so long, beyond what was said before; ten seconds from now at most."""
        now = time.monotonic()
        self._shut_until = min(max(self._shut_until, now) + seconds, now + LONGEST_HOLD_S)
        self._shut(True)

    def cut(self, route: bytes, why: str) -> None:
        """End the connection of a peer, which may connect again."""
        # It may be gone, and its descriptor another's.
        self.read()
        if route in self._routes:
            self._cut(self._routes[route], why)

    def close(self) -> None:
        self._monitor.close()

    def _not_whole(self) -> dict[int, str]:
        """Those over which nothing whole has come for too long, by descriptor."""
        now, found = time.monotonic(), {}
        for fd, connection in self._open.items():
            if now - connection.whole_at > UNFINISHED_S:
                found[fd] = NEVER_WHOLE
            elif not connection.route and now - connection.opened_at > MUTE_S:
                found[fd] = SAID_NOTHING
        return found

    def _open_or_shut(self, strangers: Set[int]) -> None:
        is_held = time.monotonic() < self._shut_until
        # A port that is shut keeps out nobody who is in: they could keep it so, one by one.
        for fd in strangers if is_held else ():
            self._cut(fd, SHUT_OUT)
        since = time.monotonic() - LONGEST_LEAVE_S
        num_leaving = sum(at > since for at in self._leaving.values())
        self._shut(is_held or num_leaving > MAX_LEAVING or self._are_many_new)

    def _forget(self, fd: int) -> None:
        self._strangers.pop(fd, None)
        self._doubtful.discard(fd)
        if (connection := self._open.pop(fd, None)) is not None:
            self._routes.pop(connection.route, None)

    def _shut(self, is_shut: bool) -> None:
        """Let nobody in, or everybody again, where there is a listener: who dials has none."""
        now = time.monotonic()
        self.shut_s += max(now - self._shut_at, 0.0)
        self._shut_at = now if is_shut else math.inf
        if is_shut != self._is_shut and self._listener >= 0:
            _ask(self._listener, lambda own: own.setsockopt(socket.SOL_SOCKET, *_FILTERS[is_shut]))
            self._is_shut = is_shut

    def _note_gone(self, route: bytes) -> None:
        self.gone[route] = None
        if len(self.gone) > MAX_GONE:
            del self.gone[next(iter(self.gone))]

    def _cut(self, fd: int, why: str) -> None:
        """Shut it down: ZeroMQ, which owns the descriptor, notices and closes it."""
        if route := self._open[fd].route:
            self._note_gone(route)
        self._forget(fd)
        self._leaving[fd] = time.monotonic()
        _ask(fd, lambda own: own.shutdown(socket.SHUT_RDWR))
        self.cut_off[why] += 1


def most_descriptors() -> int:
    """How many this process may open, having asked for as many as it is allowed. The soft limit
    is for programs that use `select`; a thousand actors need two thousand."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (MANY_DESCRIPTORS if each == resource.RLIM_INFINITY else each for each in limits)
    wanted = min(hard, MANY_DESCRIPTORS)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, limits[1]))
    return max(soft, wanted)


def _bytes_received(fd: int) -> int | None:
    """How much has come over a tcp connection; None if it is none, or not any more."""
    size = _BYTES_RECEIVED.size
    info = _ask(fd, lambda own: own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size))
    return int(_BYTES_RECEIVED.unpack(info)[0]) if info and len(info) == size else None


def _ask(fd: int, ask: Callable[[socket.socket], Answer]) -> Answer | None:
    """Ask a connection of ZeroMQ's; None if it is closed by now, and the descriptor a file's."""
    try:
        own = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
    except OSError:
        return None
    try:
        return ask(own)
    except OSError:
        return None
    finally:
        own.detach()
