"""One ROUTER on the event loop: drained in bursts, answered at once, guarded against bad input.

The descriptor of a ZeroMQ socket is edge-triggered, and a send may eat the edge, as may asking for
input. So in a learner only this file sends, asks and takes messages from a router, and it looks
again after whatever it did.

Runs on: event loop
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from impala_async.errors import ProtocolError
from impala_async.learner.loop.sessions import Answer
from impala_async.metrics.names import REGISTRY
from impala_async.metrics.report import Counters
from impala_async.wire import connections
from impala_async.wire import messages as wire
from impala_async.wire.session import reject
from impala_async.wire.sockets import Router

BURST = 32
# So many messages in a row find a peer's queue full until its connection is ended.
MAX_IN_VAIN = 16
# So many frames that nobody takes are a mistake. More cost all others the time in which they are
# dropped, and for so many times as long nobody is let in: most of the time is left to them.
MAX_SPARE_FRAMES, SHUT_SHARE = 16, 4
# A refusal quotes so much of an error, at most: it may wait for a peer that does not read.
MAX_QUOTED = 200
# Over one connection, until they are forgotten: an actor says it once or twice a second. To answer
# costs ten times what it costs to read, so no more are answered; but a learner that stood still
# hears them all at once, so only many more end the connection.
MAX_ANSWERED, MAX_HELLOS = 20, 200
# An actor whose connection is ended for that may come again after so long.
RETRY_S = 10.0
# ZMTP's own limit, which ZeroMQ does not enforce. Each session keeps the id of its connection.
MAX_ROUTE_BYTES = 255
BAD = "bad/"
BAD_REASONS = tuple(name.removeprefix(BAD) for name in REGISTRY if name.startswith(BAD))
WIRE_COUNTS = ("wire/messages", "wire/unroutable", *(BAD + reason for reason in BAD_REASONS))


@dataclass(eq=False)
class Endpoint:
    """Owns a router, takes what comes and sends what is answered, as soon as it is made."""

    loop: asyncio.AbstractEventLoop
    router: Router
    counters: Counters
    """They are of WIRE_COUNTS, and others may share them."""
    hear: Callable[[bytes, wire.Message, Router, float], Iterable[Answer]]
    """Answers a message of a route, whose further frames the router has."""
    after: Callable[[], None] = lambda: None
    """Runs once a burst."""

    def __post_init__(self) -> None:
        self.connections = self.router.connections
        # Hellos by their route, until somebody who has seen them forgets them.
        self.hellos: Counter[bytes] = Counter()
        self.num_unanswered = 0
        """The hellos that were not answered, since the start."""
        self._is_scheduled, self._is_open = False, True
        self.loop.add_reader(self.router.fd, self._drain)
        self.loop.add_reader(self.connections.fd, self.connections.read)
        self.look_again()

    def say(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            if answer.replaces:
                self.connections.cut(answer.replaces, connections.REPLACED)
            if self.send(answer.route, answer.frames):
                answer.on_sent()
            elif answer.instead:
                self.send(answer.route, answer.instead)

    def send(self, route: bytes, frames: Sequence[wire.Frame]) -> bool:
        if not self._is_open:
            return False
        was_sent = self.router.send(route, frames)
        if not was_sent:
            self.counters.add("wire/unroutable")
            if self.router.num_unsent[route] >= MAX_IN_VAIN:
                self.connections.cut(route, connections.DOES_NOT_READ)
        self.look_again()
        return was_sent

    def close(self) -> None:
        self._is_open = False
        self.loop.remove_reader(self.router.fd)
        self.loop.remove_reader(self.connections.fd)
        self.router.close()

    def look(
        self, allowances: Mapping[bytes, int], patience_s: float, *, is_memory_growing: bool = False
    ) -> bool:
        """End the connections over which too much comes, or nothing leaves for so long; whether
        the next look should be soon."""
        for route in self.router.find_stuck(patience_s):
            self.connections.cut(route, connections.DOES_NOT_READ)
        self.look_again()
        is_drained = not self._is_scheduled
        return self.connections.look(
            allowances, is_drained=is_drained, is_memory_growing=is_memory_growing
        )

    def look_again(self) -> None:
        """Drain soon if there is input, whether or not the descriptor said so."""
        if not self._is_scheduled and self.router.has_input():
            self._is_scheduled = True
            self.loop.call_soon(self._drain)

    def _drain(self) -> None:
        if not self._is_open:
            return
        # Until its end, whatever is sent need not look again: the end does.
        self._is_scheduled = True
        try:
            self._discard()
            for _ in range(BURST):
                if self.router.has_more_frames:
                    break
                arrived = self.router.receive()
                if arrived is None:
                    break
                self.counters.add("wire/messages")
                self._take(*arrived)
            self.after()
        finally:
            self._is_scheduled = False
        self.look_again()

    def _discard(self) -> bool:
        """Drop what nobody took of a message; False if it had more frames than a mistake has. Some
        may be left for the next turn, and the time that it took keeps newcomers out for a while."""
        began_at = time.monotonic()
        if self.router.discard_rest() <= MAX_SPARE_FRAMES:
            return True
        self.connections.hold_shut(SHUT_SHARE * (time.monotonic() - began_at))
        return False

    def _take(self, route: bytes, header: memoryview, size: int) -> None:
        message = None
        try:
            if route in self.connections.gone:
                return
            if len(route) > MAX_ROUTE_BYTES:
                self._turn_out(route, connections.CLAIMED_MUCH)
                return
            message = self._read_header(header, size)
            if isinstance(message, wire.Hello):
                self.hellos[route] += 1
            if self.hellos[route] > MAX_HELLOS:
                self._turn_out(route, connections.SAID_HELLO, RETRY_S)
            elif self.hellos[route] > MAX_ANSWERED and isinstance(message, wire.Hello):
                self.num_unanswered += 1
            else:
                self.say(self.hear(route, message, self.router, time.monotonic()))
        except ProtocolError as error:
            self.counters.add(BAD + error.reason)
            if error.reason == "unknown_session":
                refusal = reject("hello_again", "this session is over", 0.0)
            else:
                # This port was dialled for the other one, or the actor is of another version.
                code = "wrong_port" if isinstance(message, wire.Hello) else "bad_message"
                refusal = reject(code, f"{error.reason}: {str(error)[:MAX_QUOTED]}")
            self.send(route, [wire.pack(refusal)])
        finally:
            if not self._discard():
                self._turn_out(route, connections.SENT_TOO_MANY_FRAMES)

    def _turn_out(self, route: bytes, why: str, retry_after_s: float = -1.0) -> None:
        """End the connection of a peer that is there to be told so: where it has hung up with its
        messages waiting, the descriptor that they name may be its successor's."""
        self.router.has_input()  # ZeroMQ takes in who went.
        if self.send(route, [wire.pack(reject("bad_message", why, retry_after_s))]):
            self.connections.cut(route, why)

    def _read_header(self, header: memoryview, size: int) -> wire.Message:
        message = wire.unpack(header) if size == len(header) else None
        is_inline = isinstance(message, wire.Data) and message.body is not None
        if message is None or (size > wire.MAX_HEADER_BYTES and not is_inline):
            raise ProtocolError("oversized_header", f"a header of {size} bytes")
        if self.router.has_more_frames and not isinstance(message, wire.Data | wire.Spec):
            raise ProtocolError("wrong_frame_count", "more frames than this message has")
        return message
