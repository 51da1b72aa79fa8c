"""What strangers do to a learner, all at once, in a thread: none of it costs them much."""

import contextlib
import itertools
import json
import os
import random
import threading
import time

from impala_async.config.run import RunConfig
from impala_async.policy import build_policy
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema
from impala_async.weights import Version
from impala_async.wire.codec import Frame, encode_data
from impala_async.wire.messages import (
    PROTOCOL,
    Data,
    Get,
    Grant,
    Heartbeat,
    Hello,
    pack,
    unpack,
)
from impala_async.wire.sockets import Dealer, new_context
from tests.e2e.harness import Site
from tests.learner.columns import planes_of
from tests.wire import raw_peer
from tests.wire.pure_actor import PureActor

SCHEMA = Schema(
    ObsSpec((ArraySpec("", (4,), "float32"),)),
    ActionSpec((ActionPart("", "discrete", (2,)),)),
    50,
)
ROUND_S = 0.25


class Hoarder:
    """Joins as an actor of CartPole, takes its credit, says that it lives, and sends nothing, or
    no more than a few messages."""

    def __init__(self, strangers: "Strangers", columns: int, num_messages: int = 0) -> None:
        self._columns, self._num_left = columns, num_messages
        self.num_settled = 0
        self.has_credit = False
        self.data, self.weights = strangers.dial(strangers.data), strangers.dial(strangers.weights)
        self._actor: PureActor[Version] = PureActor(
            *(random.randbytes(16), SCHEMA, strangers.layout, columns),
            say=self.data.send,
            encode=self._encode,
        )

    @property
    def session(self) -> bytes:
        return self._actor.side.session if self._actor.side.has_session else b""

    def go_on(self) -> None:
        now = time.monotonic()
        if self.session:
            self.weights.send([pack(Heartbeat(self.session, {}))])
        while frames := self.data.receive(0):
            message = self._actor.hear(unpack(frames[0]), now)
            if isinstance(message, Grant):
                self._take(message)
        self._actor.tick(now)

    def _take(self, grant: Grant) -> None:
        self.has_credit |= grant.granted > 0
        self.num_settled = grant.settled
        if grant.granted > grant.settled and self._num_left:
            self._num_left -= 1
            self._actor.side.put(self._actor.side.named)

    def _encode(self, seq: int, version: Version) -> list[Frame]:
        header = Data(self.session, seq, *version, 50, self._columns, 0, 0, None)
        planes = planes_of(SCHEMA, self._columns)
        return encode_data(header, planes.obs, planes.small, ())


class Strangers:
    """Hoarders, deserters, volleys of small messages, messages without end, hellos by the hundred,
    and one that asks for weights and does not read them."""

    def __init__(self, site: Site) -> None:
        saved = json.loads((site.run_dir / "config.json").read_text())
        config = RunConfig.model_validate(saved["config"])
        policy = build_policy(SCHEMA, config.model, config.policies, seed=0, device="cpu")
        self.layout = policy.layout.digest
        self.data, self.weights = site.service["data_url"], site.service["weights_url"]
        self._context = new_context()
        self._dealers: list[Dealer] = []
        self._is_over = threading.Event()
        batch = config.learner.batch_columns
        self.hoarders = [Hoarder(self, batch) for _ in range(4)]
        self.deserters = [Hoarder(self, batch // 2, num_messages=1) for _ in range(40)]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def dial(self, url: str) -> Dealer:
        self._dealers.append(Dealer(self._context, url))
        return self._dealers[-1]

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        for dealer in self._dealers:
            dealer.close()
        self._context.term()

    def _run(self) -> None:
        greeter, deaf = self.dial(self.data), raw_peer.connect(self.weights)
        for number in itertools.count():
            for hoarder in (*self.hoarders, *self.deserters):
                hoarder.go_on()
            for url in (self.data, self.weights):
                with contextlib.suppress(OSError):
                    self._volley(url)
                    self._endless(url, 20_000 if number % 8 else 2_000_000)
            for _ in range(100):
                build = "9.9\nERROR all is lost"
                greeter.send([pack(Hello(PROTOCOL, os.urandom(16), build, bytes(16), 0, 0))])
            session = self.hoarders[0].session or bytes(16)
            with contextlib.suppress(OSError):
                deaf.sendall(raw_peer.message(pack(Get(session, 0, 0))) * 20)
            if self._is_over.wait(ROUND_S):
                deaf.close()
                return

    def _volley(self, url: str) -> None:
        """A thousand small messages; and it hangs up while they wait."""
        with raw_peer.connect(url) as raw:
            raw.sendall(raw_peer.message(b"\x91\x00") * 1000)
            raw_peer.hang_up(raw)

    def _endless(self, url: str, num_frames: int) -> None:
        with raw_peer.connect(url) as raw:
            raw.sendall(raw_peer.EMPTY_AND_MORE * num_frames)
            time.sleep(0.01)
