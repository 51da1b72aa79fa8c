"""Messages between the learner and the process of its ingest, over a stream socket.

A message is a msgpack array `[name, field, ...]`. Both ends are ours and of one release, so nothing
is checked. A `send` never waits: what the other side does not take yet is kept, in order. Only
`wait_for` stops the loop, for the moments in which neither side can go on without the other.

Runs on: event loop, of either process
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import msgpack

READ_BYTES = 1 << 18

Words = list[Any]


class ChannelClosedError(Exception):
    """The other side is gone."""


class Channel:
    """Owns the socket. `handle` gets every message; `on_close` is told once that no more come."""

    def __init__(
        self,
        end: socket.socket,
        handle: Callable[[Words], None],
        on_close: Callable[[], None],
    ) -> None:
        end.setblocking(False)
        self._socket = end
        self._handle = handle
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        # What the other side sends is as large as its accounts are, and it is trusted.
        self._unpacker = msgpack.Unpacker(max_buffer_size=0)
        self._early: deque[Words] = deque()
        self._unsent = bytearray()
        self.is_open = True
        self._loop.add_reader(end.fileno(), self._read)

    def send(self, *words: object) -> None:
        """Say something, unless nobody is there any more; with all else that is said right now."""
        if not self.is_open:
            return
        if not self._unsent:
            self._loop.call_soon(self._write)
        self._unsent += msgpack.packb(words)

    def wait_for(self, *names: str) -> Words:
        """Stop until one of these comes; what comes before it is handled afterwards.

        Never while a message is being handled.

        Raises:
            ChannelClosedError: it never comes.
        """
        self._socket.setblocking(True)
        try:
            self._socket.sendall(self._unsent)
            self._unsent.clear()
            while True:
                for words in self._unpacker:
                    if words[0] in names:
                        return list(words)
                    self._early.append(words)
                received = self._socket.recv(READ_BYTES)
                if not received:
                    raise ChannelClosedError
                self._unpacker.feed(received)
        except OSError:
            raise ChannelClosedError from None
        finally:
            self._socket.setblocking(False)
            # The descriptor says nothing of what has been read from it already.
            self._loop.call_soon(self._handle_all)

    def close(self) -> None:
        """Say nothing and hear nothing any more; twice does no harm."""
        if self.is_open:
            self._write()
            self.is_open = False
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()

    def _read(self) -> None:
        try:
            received = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            received = b""
        if received:
            self._unpacker.feed(received)
        self._handle_all()
        if not received:
            self._end()

    def _handle_all(self) -> None:
        while self._early and self.is_open:
            self._handle(self._early.popleft())
        for words in self._unpacker:
            if not self.is_open:
                return
            self._handle(words)

    def _write(self) -> None:
        if not self.is_open:
            return
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            self._loop.add_writer(self._socket.fileno(), self._write)
            return
        except ConnectionError:
            # What it said before it went is still to be read, and then its end.
            self._unsent.clear()
        self._loop.remove_writer(self._socket.fileno())

    def _end(self) -> None:
        if self.is_open:
            self.close()
            self._on_close()
