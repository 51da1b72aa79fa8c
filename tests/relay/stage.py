"""A learner whose every word the test decides, an exchange on a thread of its own, and actors by
hand, all over real sockets."""

import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import zmq

from impala_async.relay.exchange import Exchange
from impala_async.relay.welcome import Translator
from impala_async.weights import Version
from impala_async.wire.codec import Frame
from impala_async.wire.local_link import LocalLink
from impala_async.wire.messages import PROTOCOL, Get, Hello, Message, Welcome, pack, unpack
from impala_async.wire.sockets import AddressError, Dealer, Poller, Router, new_context
from tests.actor.scripted import Heard, ScriptedLearner, settings_of
from tests.wire.ends import until

WITHIN_S = 10.0
ANY_PORT = "tcp://127.0.0.1:*"


class ByHand:
    """An actor of which the test decides what it says."""

    def __init__(self, stage: "Stage", number: int) -> None:
        self._stage = stage
        self.actor = bytes([number]) * 16
        self.data = stage.dial(stage.data)
        self.weights = stage.dial(stage.weights)
        self.session = b""

    def say(self, message: Message | bytes, *frames: Frame, to: Dealer | None = None) -> None:
        first = message if isinstance(message, bytes) else pack(message)
        until(lambda: (to or self.data).send([first, *frames]))

    def hear(self, from_: Dealer | None = None) -> tuple[Any, list[bytes]]:
        frames = (from_ or self.data).receive(WITHIN_S)
        assert frames is not None, "nothing came"
        return unpack(frames[0]), [bytes(frame) for frame in frames[1:]]

    def join(self, lease_s: float = 60.0, **changes: Any) -> tuple[Welcome, Heard]:
        """A session: the welcome that came, and the learner's way to answer it."""
        self.say(Hello(PROTOCOL, self.actor, "1", bytes(16), 0, 0))
        hello = self._stage.learner.data.hear(Hello)
        settings = settings_of(**changes.pop("settings", {}))
        self._stage.learner.welcome(hello, settings, lease_s=lease_s, **changes)
        welcome, _ = self.hear()
        self.session = welcome.session
        return welcome, hello

    def pull(self, have: Version) -> None:
        self.say(Get(self.session, *have), to=self.weights)


class Stage:
    """All that a test needs, and the thread on which the exchange lives."""

    def __init__(self, folder: Path, max_sockets: int = 1000) -> None:
        self.context = new_context()
        self.context.set(zmq.MAX_SOCKETS, max_sockets)
        self.learner = ScriptedLearner(self.context, folder)
        self.link = LocalLink()
        self.data = Router(self.context, ANY_PORT, self.link.data_path, 1 << 26)
        self.weights = Router(self.context, ANY_PORT, self.link.weights_path, 1 << 26)
        self.poller = Poller()
        self.exchange = Exchange(
            self.context,
            self.learner.url,
            (self.data, self.weights),
            self.poller,
            Translator(self.link, self.weights.port, is_far=False),
        )
        self._calls: Queue[tuple[Callable[[], Any], Queue[Any]]] = Queue()
        self._dealers: list[Dealer] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def dial(self, router: Router) -> Dealer:
        return self.dial_url(router.url)

    def dial_url(self, url: str) -> Dealer:
        self._dealers.append(Dealer(self.context, url))
        return self._dealers[-1]

    def crew(self, num_actors: int, **changes: Any) -> list[ByHand]:
        actors = [ByHand(self, number) for number in range(1, num_actors + 1)]
        for actor in actors:
            actor.join(**changes)
        return actors

    def ask(self, call: Callable[[], Any]) -> Any:
        """On the exchange's own thread, which has the sockets."""
        answer: Queue[Any] = Queue()
        self._calls.put((call, answer))
        return answer.get(timeout=WITHIN_S)

    def learner_is_back(self, url: str) -> bool:
        """A port that was closed may be taken for a moment more."""
        try:
            self.learner.data.router = Router(self.context, url, None, 1 << 26)
        except AddressError:
            return False
        return True

    def is_quiet(self) -> bool:
        """Nothing has come to the learner."""
        return not self.learner.weights.drain() and not self.learner.data.drain()

    def _run(self) -> None:
        while not self._is_over.is_set():
            self.poller.wait(0.01)
            self.exchange.flush()
            while not self._calls.empty():
                call, answer = self._calls.get()
                answer.put(call())

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self.exchange.close()
        for end in (*self._dealers, self.data, self.weights):
            end.close()
        self.learner.close()
        self.context.term()
        self.link.close()
