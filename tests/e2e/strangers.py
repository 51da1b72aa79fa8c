"""What strangers do to a learner, all at once, in a thread: none of it costs them much."""

import contextlib
import itertools
import json
import os
import random
import threading
import time

from impala_async.config.run import RunConfig
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema
from impala_async.team import build_policy
from impala_async.wire.codec import encode_data
from impala_async.wire.messages import (
    PROTOCOL,
    Data,
    Get,
    Grant,
    Heartbeat,
    Hello,
    Spec,
    Welcome,
    pack,
    unpack,
)
from impala_async.wire.sockets import Dealer, new_context
from tests.e2e.harness import Site
from tests.learner.columns import planes_of
from tests.wire import raw_peer

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
        self.data, self.weights = strangers.dial(strangers.data), strangers.dial(strangers.weights)
        self._layout = strangers.layout
        self._hello = pack(Hello(PROTOCOL, random.randbytes(16), "0", bytes(16), 0, 0))
        self.session = b""
        self.has_credit = False

    def go_on(self) -> None:
        if not self.session:
            self.data.send([self._hello])
        else:
            self.weights.send([pack(Heartbeat(self.session, {}))])
        while frames := self.data.receive(0):
            message = unpack(frames[0])
            if isinstance(message, Welcome):
                self.session = message.session
                self.data.send([self._spec(message), SCHEMA.to_json()])
            elif isinstance(message, Grant):
                self.has_credit |= message.granted > 0
                self.num_settled = message.settled
                if message.granted > message.settled and self._num_left:
                    self._num_left -= 1
                    self._send(message)

    def _send(self, grant: Grant) -> None:
        columns, seq = self._columns, grant.settled
        header = Data(self.session, seq, grant.epoch, grant.update, 50, columns, 0, 0, None)
        planes = planes_of(SCHEMA, columns)
        self.data.send(encode_data(header, planes.obs, planes.small, ()))

    def _spec(self, welcome: Welcome) -> bytes:
        return pack(Spec(welcome.session, SCHEMA.digest, self._layout, self._columns, 1))


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
