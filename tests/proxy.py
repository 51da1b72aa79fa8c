"""A stretch of network between two ends that resets every connection when it is told to."""

import selectors
import socket
import struct
import threading
import time
from contextlib import contextmanager

# Another loopback address: its ports are free, whoever listens at the usual one.
HOST = "127.0.0.2"
LEARNER_HOST = "127.0.0.1"
_POLL_S = 0.005
_RESETTING = struct.pack("ii", 1, 0)


class Proxy(threading.Thread):
    """Listens at the learner's own ports on another address."""

    def __init__(self, *ports, every_s=None, is_read=False):
        """`every_s`: all connections are reset as often as that; else only by `reset`. `is_read`:
        what comes is kept."""
        super().__init__(name="proxy", daemon=True)
        self.num_resets = 0
        self.carried = bytearray()
        """All that came, from both sides, if it is read."""
        self._is_read = is_read
        self._every_s = every_s
        self._is_due = threading.Event()
        self._is_over = threading.Event()
        self._selector = selectors.DefaultSelector()
        # The other end of each connection.
        self._others = {}
        for port in ports:
            listener = socket.create_server((HOST, port))
            self._selector.register(listener, selectors.EVENT_READ, port)
        self.start()

    def reset(self):
        """Reset all connections, and wait until that is done."""
        num_before = self.num_resets
        self._is_due.set()
        while self.num_resets == num_before and self.is_alive():
            time.sleep(_POLL_S)

    def run(self):
        next_reset = time.monotonic() + (self._every_s or 0.0)
        while not self._is_over.is_set():
            for key, _ in self._selector.select(_POLL_S):
                if isinstance(key.data, int):
                    self._accept(key.fileobj, key.data)
                elif key.fileobj in self._others:
                    self._forward(key.fileobj)
            now = time.monotonic()
            if self._is_due.is_set() or (self._every_s and now >= next_reset):
                self._is_due.clear()
                self._reset_all()
                next_reset = now + (self._every_s or 0.0)
        self._reset_all()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()

    def close(self):
        self._is_over.set()
        self.join()

    def _accept(self, listener, port):
        near, _ = listener.accept()
        try:
            far = socket.create_connection((LEARNER_HOST, port))
        except OSError:
            near.close()
            return
        for end, other in ((near, far), (far, near)):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._others[end] = other
            self._selector.register(end, selectors.EVENT_READ)

    def _forward(self, end):
        try:
            arrived = end.recv(1 << 20)
            if self._is_read:
                self.carried += arrived
            self._others[end].sendall(arrived)
        except OSError:
            arrived = b""
        if not arrived:
            self._reset(end, self._others[end])

    def _reset_all(self):
        self._reset(*self._others)
        self.num_resets += 1

    def _reset(self, *ends):
        for end in ends:
            self._selector.unregister(end)
            del self._others[end]
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETTING)
            end.close()


@contextmanager
def proxy(*urls, **how):
    """A proxy in front of a learner's addresses, until the block ends."""
    opened = Proxy(*(int(url.rpartition(":")[2]) for url in urls), **how)
    try:
        yield opened
    finally:
        opened.close()
