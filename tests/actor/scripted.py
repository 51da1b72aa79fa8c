"""A learner whose every word the test decides, at real sockets, and the actor that it talks to.

The test's own thread is the learner; the actor's calls run on a thread of their own, one after
the other, as on a sampler thread. Nothing here waits without a limit.
"""

import select
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from impala_async.actor.client import Client
from impala_async.actor.unroll import Finished
from impala_async.config.run import (
    ActorSection,
    ActorSettings,
    EnvSection,
    RunConfig,
    TrajectorySection,
)
from impala_async.schema import ArraySpec, Schema
from impala_async.weights import NO_VERSION, Version, Weights, WeightsLayout
from impala_async.wire import messages as wire
from impala_async.wire.session import reject
from impala_async.wire.sockets import Router, new_context
from tests.actor.fakes import schema_of
from tests.proxy import LEARNER_HOST
from tests.wire.ends import until

WITHIN_S = 20.0
WELCOME = wire.Welcome(
    *(b"r" * 16, 2, b"s" * 16, 0, 5556, "/ipc/d", "/ipc/w", "/nonce", b"n" * 16, 10.0, 2.0, 64)
)
LAYOUT = WeightsLayout((ArraySpec("w", (4,), "float32"),))
# The arguments of `Client.join`.
ACTOR_SPEC = schema_of(3), [LAYOUT], 2, 1
V1 = Version(1, 1)


class Heard(NamedTuple):
    """A message, and how to answer whoever sent it."""

    router: Router
    route: bytes
    message: Any
    frames: list[bytes]

    def answer(self, message, *frames):
        """Sent as soon as weights that were sent before have left."""
        until(lambda: self.try_to_answer(message, *frames))

    def try_to_answer(self, message, *frames):
        """Whether it could be sent."""
        return self.router.send(self.route, [wire.pack(message), *frames])

    def answer_raw(self, *frames):
        assert self.router.send(self.route, frames)


class Ear:
    """One of the learner's ports, and what came there."""

    def __init__(self, context, ipc_path, key):
        self.router = Router(context, "tcp://127.0.0.1:*", ipc_path, 1 << 26, key)
        self._scratch = memoryview(bytearray(1 << 22))
        self._heard = deque()

    def next(self, within_s=WITHIN_S):
        """The next message, whatever it is."""
        give_up_at = time.monotonic() + within_s
        while not self._heard:
            self._listen()
            if not self._heard:
                assert time.monotonic() < give_up_at, "nothing came"
                select.select([self.router.fd], [], [], 0.005)
        return self._heard.popleft()

    def hear(self, kind, within_s=WITHIN_S):
        """The next message, which must be of this kind."""
        heard = self.next(within_s)
        assert isinstance(heard.message, kind), heard.message
        return heard

    def find(self, kind):
        """The next message of this kind; others before it are passed over."""
        give_up_at = time.monotonic() + WITHIN_S
        while not isinstance((heard := self.next()).message, kind):
            assert time.monotonic() < give_up_at, f"no {kind.__name__} came"
        return heard

    def drain(self):
        """All that is here now."""
        self._listen()
        heard, self._heard = list(self._heard), deque()
        return heard

    def _listen(self):
        while (arrived := self.router.receive()) is not None:
            route, header, _ = arrived
            message, frames = wire.unpack(header), []
            while self.router.has_more_frames:
                size = self.router.receive_into(self._scratch)
                frames.append(bytes(self._scratch[:size]))
            self._heard.append(Heard(self.router, route, message, frames))


class ScriptedLearner:
    """Both ports, a nonce, and the words that a learner has."""

    def __init__(self, context, folder, key=None):
        self.folder = folder
        self.nonce = b"n" * 16
        (folder / "nonce").write_bytes(self.nonce)
        self.data = Ear(context, str(folder / "d"), key)
        self.weights = Ear(context, str(folder / "w"), key)
        self.run_id = b"r" * 16
        self._num_sessions = 0

    @property
    def url(self):
        return self.data.router.url

    def welcome(self, hello, settings, **changes):
        """Open a session; over tcp, unless `nonce_path` is changed to one that can be read."""
        self._num_sessions += 1
        welcome = wire.Welcome(
            run_id=self.run_id,
            epoch=1,
            session=self._num_sessions.to_bytes(16, "big"),
            number=3,
            weights_port=self.weights.router.port,
            ipc_data=str(self.folder / "d"),
            ipc_weights=str(self.folder / "w"),
            nonce_path=str(self.folder / "no-nonce"),
            nonce=self.nonce,
            lease_s=10.0,
            heartbeat_s=5.0,
            max_columns=64,
        )._replace(**changes)
        if "heartbeat_s" not in changes:
            welcome = welcome._replace(heartbeat_s=min(5.0, welcome.lease_s))
        hello.answer(welcome, wire.encode_settings(settings.model_dump(mode="json")))
        return welcome

    def close(self):
        self.data.router.close()
        self.weights.router.close()


class Actor:
    """A client, and the thread on which all of its calls run."""

    def __init__(self, context, url, connect_s):
        self.stop = threading.Event()
        self.client = Client(context, url, should_stop=self.stop.is_set, connect_s=connect_s)
        self._thread = ThreadPoolExecutor(1, "sampler")

    def begin(self, call, *args):
        return self._thread.submit(call, *args)

    def begin_connect(self):
        return self.begin(self.client.connect)

    def do(self, call, *args):
        return self.begin(call, *args).result(WITHIN_S)

    def pump_until(self, is_enough):
        give_up_at = time.monotonic() + WITHIN_S
        while not is_enough():
            assert time.monotonic() < give_up_at
            self.client.pump(0.01)

    @contextmanager
    def pumping(self):
        """While the learner does something, the actor looks out for it."""
        is_enough = threading.Event()
        pumped = self.begin(self.pump_until, is_enough.is_set)
        yield
        is_enough.set()
        pumped.result(WITHIN_S)

    def unroll(self, value=1):
        """Write a trajectory that shows a number, and hand it over."""
        buffer = self.client.take_buffer()
        buffer.obs.fill(value)
        buffer.small.fill(value)
        self.client.send(Finished(buffer, V1, []))
        return buffer

    def end(self):
        self.stop.set()
        self._thread.submit(self.client.leave).result(WITHIN_S)
        self._thread.shutdown()


class Session:
    """The learner's view of an actor that has joined."""

    def __init__(self, spec, welcome):
        self.welcome = welcome
        self.id = welcome.session
        self.spec = spec.message
        self.schema = Schema.from_json(spec.frames[0])
        self._spec = spec

    def grant(self, granted, settled=0, version=NO_VERSION, verdicts=None, session=None):
        self.say(wire.Grant(session or self.id, granted, settled, *version, verdicts or []))

    def reject(self, code, text="no"):
        # As a learner says it: again at once, or never.
        self.say(reject(code, text, 0.0 if code == "hello_again" else -1.0))

    def bye(self, reason):
        self.say(wire.Bye(self.id, wire.BYE_REASONS.index(reason)))

    def say(self, message):
        self._spec.answer(message)

    def say_raw(self, *frames):
        self._spec.answer_raw(*frames)


class Scene:
    """A learner and an actor that look at each other."""

    def __init__(self, context, folder, key):
        self.context = context
        self.learner = ScriptedLearner(context, folder, key)
        self._actors = []

    def actor(self, connect_s=WITHIN_S, *, host=LEARNER_HOST, where=None):
        where = str(where or self.learner.url.replace(LEARNER_HOST, host))
        actor = Actor(self.context, where, connect_s)
        self._actors.append(actor)
        return actor

    def join(self, actor, spec, settings=None, **welcome):
        connected = actor.begin_connect()
        self.learner.welcome(
            self.learner.data.hear(wire.Hello), settings or settings_of(), **welcome
        )
        connected.result(WITHIN_S)
        joined = actor.begin(actor.client.join, *spec)
        spec = self.learner.data.hear(wire.Spec)
        joined.result(WITHIN_S)
        return Session(spec, actor.client.side.welcome)

    def at_work(self, num_sent=0, settings=None, *, spec=ACTOR_SPEC, host=LEARNER_HOST, **welcome):
        """An actor that has sent some trajectories, none of them settled; and its session."""
        actor = self.actor(host=host)
        session = self.join(actor, spec, settings, **welcome)
        session.grant(num_sent)
        for seq in range(num_sent):
            actor.do(actor.unroll, seq)
            assert seq_of(self.data_of(actor)) == seq
        return actor, session

    def give(self, version, *, have=None):
        """Answer the next pull; `have` is what it must have."""
        get = self.learner.weights.find(wire.Get)
        assert have is None or get.message[1:] == have
        get.answer(*reply_of(weights_of(version.update, version)))

    def welcome_back(self, settings=None, **welcome):
        """The actor says hello again, on a thread that is in the middle of a call."""
        hello = self.learner.data.find(wire.Hello)
        answered = self.learner.welcome(hello, settings or settings_of(), **welcome)
        # It may have said hello once more before it saw the answer.
        return Session(self.learner.data.find(wire.Spec), answered)

    def data_of(self, actor):
        """The `Data` that the actor sends, once it has seen its credit."""
        with actor.pumping():
            return self.learner.data.hear(wire.Data)

    def stays_blocked(self, call):
        """Whether a call is still waiting after the actor has shown twice that it lives."""
        earlier, num_beats = self.learner.weights.drain(), 0
        while num_beats < 2:
            heard = earlier.pop(0) if earlier else self.learner.weights.next()
            if isinstance(heard.message, wire.Get) and heard.message[1:] == NO_VERSION:
                # It asks again when it is told that there are no weights yet.
                heard.answer(wire.NotModified(*NO_VERSION))
            num_beats += isinstance(heard.message, wire.Heartbeat) and not earlier
        return not call.done()

    def close(self):
        for actor in self._actors:
            actor.end()
        self.learner.close()


@contextmanager
def open_scene(folder, key=None):
    context = new_context()
    scene = Scene(context, folder, key)
    try:
        yield scene
    finally:
        scene.close()
        context.term()


def settings_of(env_id="some:Env", *, reconnect_s=WITHIN_S, max_lag=100, **sections):
    config = RunConfig(
        env=EnvSection(id=env_id), actor=ActorSection(reconnect_s=reconnect_s), **sections
    )
    return ActorSettings.of(config).model_copy(update={"max_lag": max_lag})


def settings_for(probe, rows=4, seed=0, sampler="auto", **kwargs):
    """The settings of one of our own environments."""
    settings = settings_of(
        f"bench.probes:{probe}", trajectory=TrajectorySection(rows=rows), seed=seed
    )
    env = settings.env.model_copy(update={"kwargs": kwargs})
    actor = settings.actor.model_copy(update={"sampler": sampler})
    return settings.model_copy(update={"env": env, "actor": actor})


def weights_of(value, version):
    return Weights(version, np.full(4, value, np.float32).view(np.uint8))


def reply_of(weights, layout=LAYOUT):
    reply = wire.WeightsReply(*weights.version, layout.digest, weights.digest())
    return reply, weights.buffer.tobytes()


def body_of(heard):
    """The body of `Data`, however it travelled."""
    body = heard.message.body
    return body if body is not None else b"".join(heard.frames)


def seq_of(heard):
    return heard.message.seq
