"""Who reaches a port may say anything: the learner lives, and the actors at work feel little."""

import contextlib
import itertools
import json
import os
import random
import re
import threading
import time

import psutil
import pytest
import zmq

from impala_async.config.run import RunConfig
from impala_async.policy import build_policy
from impala_async.wire import messages as wire
from impala_async.wire.sockets import Dealer, Router, new_context
from tests.columns import flat_schema
from tests.e2e.harness import CARTPOLE, ENDLESS, identities_hold, module, wait_until
from tests.learner.columns import planes_of
from tests.wire import raw_peer
from tests.wire.pure_actor import PureActor

pytestmark = pytest.mark.e2e


def test_a_learner_s_sockets_have_no_heartbeats_of_their_own():
    """One of them aborts where a peer has hung up with messages waiting."""
    context = new_context()
    router = Router(context, "tcp://127.0.0.1:*", None, 1 << 20)
    dealer = Dealer(context, router.url)
    assert router._socket.get(zmq.HEARTBEAT_IVL) == dealer._socket.get(zmq.HEARTBEAT_IVL) == 0
    dealer.close()
    router.close()
    context.term()


SCHEMA = flat_schema(4, 2, 50)
ROUND_S = 0.25


class Hoarder:
    """Joins as an actor of CartPole, takes its credit, says that it lives, and sends nothing, or
    no more than a few messages."""

    def __init__(self, strangers, columns, num_messages=0):
        self._columns, self._num_left = columns, num_messages
        self.num_settled = 0
        self.has_credit = False
        self.data, self.weights = strangers.dial(strangers.data), strangers.dial(strangers.weights)
        self._actor = PureActor(
            *(random.randbytes(16), SCHEMA, strangers.layout, columns),
            say=self.data.send,
            encode=self._encode,
        )

    @property
    def session(self):
        return self._actor.side.session if self._actor.side.has_session else b""

    def go_on(self):
        now = time.monotonic()
        if self.session:
            self.weights.send([wire.pack(wire.Heartbeat(self.session, {}))])
        while frames := self.data.receive(0):
            message = self._actor.hear(wire.unpack(frames[0]), now)
            if isinstance(message, wire.Grant):
                self._take(message)
        self._actor.tick(now)

    def _take(self, grant):
        self.has_credit |= grant.granted > 0
        self.num_settled = grant.settled
        if grant.granted > grant.settled and self._num_left:
            self._num_left -= 1
            self._actor.side.put(self._actor.side.named)

    def _encode(self, seq, version):
        header = wire.Data(self.session, seq, *version, 50, self._columns, 0, 0, None)
        planes = planes_of(SCHEMA, self._columns)
        return wire.encode_data(header, planes.obs, planes.small, ())


class Strangers:
    """Hoarders, deserters, volleys of small messages, messages without end, hellos by the hundred,
    and one that asks for weights and does not read them."""

    def __init__(self, site):
        saved = json.loads((site.run_dir / "config.json").read_text())
        config = RunConfig.model_validate(saved["config"])
        policy = build_policy(SCHEMA, config.model, config.policies, seed=0, device="cpu")
        self.layout = policy.layout.digest
        self.data, self.weights = site.service["data_url"], site.service["weights_url"]
        self._context = new_context()
        self._dealers = []
        self._is_over = threading.Event()
        batch = config.learner.batch_columns
        self.hoarders = [Hoarder(self, batch) for _ in range(4)]
        self.deserters = [Hoarder(self, batch // 2, num_messages=1) for _ in range(40)]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def dial(self, url):
        self._dealers.append(Dealer(self._context, url))
        return self._dealers[-1]

    def close(self):
        self._is_over.set()
        self._thread.join()
        for dealer in self._dealers:
            dealer.close()
        self._context.term()

    def _run(self):
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
                greeter.send(
                    [wire.pack(wire.Hello(wire.PROTOCOL, os.urandom(16), build, bytes(16), 0, 0))]
                )
            session = self.hoarders[0].session or bytes(16)
            with contextlib.suppress(OSError):
                deaf.sendall(raw_peer.message(wire.pack(wire.Get(session, 0, 0))) * 20)
            if self._is_over.wait(ROUND_S):
                deaf.close()
                return

    def _volley(self, url):
        """A thousand small messages; and it hangs up while they wait."""
        with raw_peer.connect(url) as raw:
            raw.sendall(raw_peer.message(b"\x91\x00") * 1000)
            raw_peer.hang_up(raw)

    def _endless(self, url, num_frames):
        with raw_peer.connect(url) as raw:
            raw.sendall(raw_peer.EMPTY_AND_MORE * num_frames)
            time.sleep(0.01)


# Its steps take time, but no processor.
SLEEPY = """
import time
import gymnasium

class Sleepy(gymnasium.Wrapper):
    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
    def step(self, action):
        time.sleep(0.001)
        return super().step(action)
"""


def at_work(site):
    """A learner with an actor."""
    path = module(site.folder, "sleepy", SLEEPY)
    learner = site.learner("env.id=sleepy:Sleepy", *ENDLESS, config=CARTPOLE, **path)
    site.actor(**path)
    site.wait_report("training", lambda r: r["updates"] > 10)
    return learner


def join_late(site, learner):
    """Another actor comes."""
    actor = site.actor(**module(site.folder, "sleepy", SLEEPY))

    def has_joined():
        number = re.search(r"INFO actor (\d+): ", actor.log)
        return number is not None and f"actor {number[1]} joined" in learner.log

    wait_until("it has joined", has_joined, 40.0)


def settle_one(strangers):
    """The time from a newcomer's hello to its first message in a batch; its process runs before."""
    started = time.monotonic()
    newcomer = Hoarder(strangers, columns=4, num_messages=1)

    def is_settled():
        newcomer.go_on()
        return newcomer.num_settled > 0

    wait_until("its message is settled", is_settled, 40.0)
    return time.monotonic() - started


def test_strangers_end_nothing(site):
    learner = at_work(site)
    strangers = Strangers(site)
    # Each has to wait until the credit of the one before it lapses.
    wait_until("two have credit", lambda: sum(s.has_credit for s in strangers.hoarders) > 1, 40.0)
    wait_until("some deserted", lambda: any(s.num_settled for s in strangers.deserters), 40.0)
    join_late(site, learner)
    after = site.wait_report("who sends too much is cut off", lambda r: r["wire/cut"] > 0)
    site.wait_report("training goes on", lambda r: r["updates"] > after["updates"] + 10)
    strangers.close()
    assert learner.process.poll() is None
    assert all(identities_hold(report) for report in site.reports())
    assert "\nERROR all is lost" not in learner.log
    assert "Traceback" not in learner.log


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_strangers_for_a_minute_cost_little(site):
    learner = at_work(site)
    quiet = rate_of(site, 20.0)
    memory = memory_of(learner)
    strangers = Strangers(site)
    busy = rate_of(site, 60.0)
    grown = memory_of(learner) - memory
    num_lines = learner.log.count("\n")
    joined_s = settle_one(strangers)
    join_late(site, learner)
    strangers.close()
    num_deserted = sum(deserter.num_settled > 0 for deserter in strangers.deserters)
    print(
        f"{num_deserted} deserted, {busy / quiet:.3f} of the rate, {grown / 1e6:.0f} MB, "
        f"the first message of a new one settled after {joined_s:.1f} s"
    )
    assert busy >= 0.9 * quiet
    assert grown < 50e6
    assert num_lines < 25 * 90
    assert joined_s < 3.0


def memory_of(learner):
    """The least of some seconds, in bytes: a burst is over after a fraction of one."""
    process = psutil.Process(learner.process.pid)
    found = []
    for _ in range(30):
        found.append(process.memory_info().rss)
        time.sleep(0.1)
    return float(min(found))


def rate_of(site, seconds):
    """Env steps per second over a while."""
    first = site.wait_report("a report", lambda r: True)
    last = site.wait_report(
        "a while later", lambda r: r["time_s"] >= first["time_s"] + seconds, seconds + 20.0
    )
    steps = last["env_steps_trained"] - first["env_steps_trained"]
    return float(steps / (last["time_s"] - first["time_s"]))
