"""What libzmq tells of a socket's connections: who came, whose handshake was done, who went."""

import struct
from itertools import count
from typing import NamedTuple

import zmq

_EVENT = struct.Struct("=Hi")
_numbers = count()


class Happening(NamedTuple):
    """An event of libzmq (`zmq.EVENT_...`), its value (mostly a descriptor) and the endpoint."""

    event: int
    value: int
    endpoint: str


class Monitor:
    """Reads the events of one socket; made before that binds or connects, closed before it is."""

    def __init__(self, of: zmq.Socket[bytes], events: int) -> None:
        """`events`: of which kinds, one bit each."""
        address = f"inproc://monitor-{next(_numbers)}"
        self._of: zmq.Socket[bytes] = of
        # For pollers.
        self.socket: zmq.Socket[bytes] = of.context.socket(zmq.PAIR)
        self.socket.set(zmq.LINGER, 0)
        # An I/O thread waits for room to tell something: there is always some.
        self.socket.set(zmq.RCVHWM, 0)
        of.monitor(address, events)
        self.socket.connect(address)

    def read(self) -> list[Happening]:
        """What happened since the last call; does not wait."""
        happenings: list[Happening] = []
        while True:
            try:
                told = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return happenings
            event, value = _EVENT.unpack(told[0])
            happenings.append(Happening(event, value, told[1].decode(errors="replace")))

    def close(self) -> None:
        self._of.disable_monitor()
        self.socket.close()
