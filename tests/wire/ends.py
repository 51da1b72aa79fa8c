"""Real sockets for the tests of this room, and patience with them."""

import time
from collections.abc import Callable
from pathlib import Path

import zmq

from impala_async.wire.sockets import Dealer, Router, new_context

DEADLINE_S = 5.0
ANY_PORT = "tcp://127.0.0.1:*"
MAX_MESSAGE_BYTES = 1 << 20


class Ends:
    """Opens sockets, and closes them all."""

    def __init__(self) -> None:
        self.context = new_context()
        self.open: list[Router | Dealer | zmq.Socket[bytes]] = []

    def router(
        self, url: str = ANY_PORT, ipc: Path | None = None, max_bytes: int = MAX_MESSAGE_BYTES
    ) -> Router:
        router = Router(self.context, url, str(ipc) if ipc else None, max_bytes)
        self.open.append(router)
        return router

    def flooder(self, url: str) -> zmq.Socket[bytes]:
        """A router that keeps next to nothing, and sends whatever it is let."""
        flooder = self.context.socket(zmq.ROUTER)
        flooder.set(zmq.LINGER, 0)
        flooder.set(zmq.SNDHWM, 1)
        flooder.set(zmq.SNDTIMEO, 300)
        flooder.set(zmq.ROUTER_MANDATORY, 1)
        flooder.bind(url)
        self.open.append(flooder)
        return flooder

    def dealer(self, url: str) -> Dealer:
        dealer = Dealer(self.context, url)
        self.open.append(dealer)
        return dealer

    def close(self) -> None:
        for end in self.open:
            end.close()
        self.context.destroy(linger=0)


def until(condition: Callable[[], object]) -> None:
    """Wait for what real sockets do in their own time."""
    give_up_at = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up_at, "it never happened"
        time.sleep(0.001)


def take(router: Router) -> tuple[bytes, bytes, int]:
    """The next message's route, header and true size."""
    until(router.has_input)
    arrived = router.receive()
    assert arrived is not None
    route, header, size = arrived
    return route, bytes(header), size


def greeted(router: Router, dealer: Dealer) -> bytes:
    """The route to a dealer that has said something."""
    until(lambda: dealer.send([b"hello"]))
    return take(router)[0]
