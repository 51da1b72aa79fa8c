"""Real sockets for the tests of this room, and patience with them."""

import time

import zmq

from impala_async.wire.sockets import MAX_ANSWER_BYTES, Dealer, Router, new_context

DEADLINE_S = 5.0
ANY_PORT = "tcp://127.0.0.1:*"
MAX_MESSAGE_BYTES = 1 << 20


class Ends:
    """Opens sockets, and closes them all."""

    def __init__(self):
        self.context = new_context()
        self.open = []

    def router(self, url=ANY_PORT, ipc=None, max_bytes=MAX_MESSAGE_BYTES, key=None):
        router = Router(self.context, url, str(ipc) if ipc else None, max_bytes, key)
        self.open.append(router)
        return router

    def flooder(self, url):
        """A router that keeps next to nothing, and sends whatever it is let."""
        flooder = self.context.socket(zmq.ROUTER)
        flooder.set(zmq.LINGER, 0)
        flooder.set(zmq.SNDHWM, 1)
        flooder.set(zmq.SNDTIMEO, 300)
        flooder.set(zmq.ROUTER_MANDATORY, 1)
        flooder.bind(url)
        self.open.append(flooder)
        return flooder

    def dealer(self, url, max_frame_bytes=MAX_ANSWER_BYTES, key=None):
        dealer = Dealer(self.context, url, max_frame_bytes, key)
        self.open.append(dealer)
        return dealer

    def close(self):
        for end in self.open:
            end.close()
        self.context.destroy(linger=0)


def until(condition):
    """Wait for what real sockets do in their own time."""
    give_up_at = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up_at, "it never happened"
        time.sleep(0.001)


def take(router):
    """The next message's route, header and true size."""
    until(router.has_input)
    route, header, size = router.receive()
    return route, bytes(header), size


def greeted(router, dealer):
    """The route to a dealer that has said something."""
    until(lambda: dealer.send([b"hello"]))
    return take(router)[0]
