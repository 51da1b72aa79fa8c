"""A learner service in this process, and threads that send it valid random columns."""

import asyncio
import json
import threading
import time
from contextlib import asynccontextmanager

from impala_async.learner.loop.saver import load_newest
from impala_async.learner.service import LearnerService
from impala_async.metrics.sinks import JsonlSink
from impala_async.policy import Policy
from impala_async.runs.folder import RunFolder
from impala_async.weights import Version
from impala_async.wire.messages import Data, encode_data, unpack
from impala_async.wire.sockets import Dealer, new_context
from tests.learner.columns import planes_of, small_schema
from tests.learner.hand_actor import DEADLINE_S, Actor, until
from tests.learner.server_harness import config_of
from tests.wire.pure_actor import PureActor

SCHEMA = small_schema()
COLUMNS = 2


class RandomActor(threading.Thread):
    """An actor that sends whatever it may, as if it had acted with the newest version."""

    def __init__(self, url, layout, *, mean_return=1.0):
        super().__init__(name="random_actor", daemon=True)
        self._url, self._mean_return = url, mean_return
        self._is_over = threading.Event()
        self._actor = PureActor(
            *(id(self).to_bytes(16, "big"), SCHEMA, layout.digest, COLUMNS),
            say=lambda frames: self._socket.send(frames),
            encode=self._encode,
            now=time.monotonic(),
        )

    @property
    def goodbyes(self):
        """The reason for which the learner ended, each time."""
        return self._actor.goodbyes

    def run(self):
        context = new_context()
        self._socket = Dealer(context, self._url)
        try:
            while not self._is_over.is_set():
                frames = self._socket.receive(0.01)
                while frames is not None:
                    self._actor.hear(unpack(frames[0]), time.monotonic())
                    frames = self._socket.receive(0)
                self._go_on()
        finally:
            self._socket.close()
            context.term()

    def leave(self):
        self._is_over.set()
        self.join(DEADLINE_S)

    def _go_on(self):
        """Send while there is credit, always with one more in hand."""
        side = self._actor.side
        self._actor.tick(time.monotonic())
        while side.outbox.num_unsent == 0 and not self.goodbyes and side.put(None):
            self._actor.tick(time.monotonic())

    def _encode(self, seq, trajectory):
        side = self._actor.side
        planes = planes_of(SCHEMA, COLUMNS, seed=seq)
        version = max(side.named, Version(1, 0))
        header = Data(side.session, seq, *version, SCHEMA.rows, COLUMNS, 0, 0, None)
        return encode_data(header, planes.obs, planes.small, [(self._mean_return, 3)] * COLUMNS)


class LastSink:
    """Keeps every report; may be told to fail."""

    def __init__(self):
        self.lines = []
        self.error = None

    def write(self, report):
        self.lines.append(report)
        if self.error is not None:
            raise self.error

    def close(self):
        pass


class ServiceRun:
    """One start of a service: its folder, its reports, and the task that runs it."""

    def __init__(self, folder, config, *, schema, restored, make):
        self.folder, self.config, self.sink = folder, config, LastSink()
        sinks = [JsonlSink(folder.metrics), self.sink]
        self.service = make(config, folder, sinks, schema=schema, restored=restored)
        self.task = asyncio.create_task(self.service.run())
        self.random_actors, self.actors = [], []

    @property
    def layout(self):
        return Policy(SCHEMA, self.config.model, seed=0).layout

    async def place(self):
        """`service.json`, once it is there."""

        def find():
            assert not self.task.done(), self.task.exception()
            return self.folder.read_json("service.json")

        found = await until(find, "service.json")
        return found

    async def start_actors(self, num_actors=2, **settings):
        url = (await self.place())["data_url"]
        for _ in range(num_actors):
            self.random_actors.append(RandomActor(url, self.layout, **settings))
            self.random_actors[-1].start()

    async def actor(self):
        place = await self.place()
        made = Actor(place["data_url"], place["weights_url"], SCHEMA)
        made.layout = self.layout.digest
        self.actors.append(made)
        return made

    async def trained(self, num_updates):
        """Wait until a report tells of so many updates."""
        await until(lambda: self.sink.lines and self.number("updates") >= num_updates, "updates")

    def number(self, name):
        return self.sink.lines[-1][name]

    async def end(self):
        return await asyncio.wait_for(self.task, DEADLINE_S)

    @property
    def summary(self):
        return self.folder.read_json("summary.json")

    @property
    def reports(self):
        return [json.loads(line) for line in self.folder.metrics.read_text().splitlines()]

    async def close(self):
        for random_actor in self.random_actors:
            random_actor.leave()
        for actor in self.actors:
            actor.close()
        if not self.task.done():
            self.service.stop("test over")
        await asyncio.wait([self.task], timeout=DEADLINE_S)


@asynccontextmanager
async def service_run(path, *, schema=SCHEMA, is_resumed=False, make=LearnerService, **sections):
    """A service at work in a run folder, ended at the latest with the block."""
    folder = RunFolder(path)
    config = config_of(SCHEMA, **sections)
    folder.begin(config)
    restored = load_newest(folder) if is_resumed else None
    made = ServiceRun(folder, config, schema=schema, restored=restored, make=make)
    try:
        yield made
    finally:
        await made.close()
