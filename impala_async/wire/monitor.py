"""What libzmq tells of a socket's connections: who came, whose handshake was done, who went."""

import struct
from itertools import count
from typing import NamedTuple

import zmq

_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
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
        of.monitor(address, events)
        # For pollers.
        self.socket: zmq.Socket[bytes] = of.context.socket(zmq.PAIR)
        self.socket.set(zmq.LINGER, 0)
        # An I/O thread waits for room to tell something: there is always some.
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.connect(address)

    def read(self) -> list[Happening]:
        """What happened since the last call; does not wait."""
        happenings: list[Happening] = []
        # Asked often, mostly in vain: a look costs a fraction of a refused `recv`.
        while int(self.socket.get(_EVENTS)) & _POLLIN:
            told = self.socket.recv_multipart(zmq.NOBLOCK)
            event, value = _EVENT.unpack(told[0])
            happenings.append(Happening(event, value, told[1].decode(errors="replace")))
        return happenings

    def close(self) -> None:
        """Twice does no harm, as with a socket."""
        if not self.socket.closed:
            self._of.disable_monitor()
            self.socket.close()
