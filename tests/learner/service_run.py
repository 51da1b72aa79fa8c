"""A learner service in this process, and threads that send it valid random columns."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from impala_async.config.run import RunConfig
from impala_async.learner.loop.saver import Restored, load_newest
from impala_async.learner.service import LearnerService
from impala_async.metrics.names import Value
from impala_async.metrics.sinks.jsonl import JsonlSink
from impala_async.policy import Policy
from impala_async.runs.folder import RunFolder
from impala_async.schema import Schema
from impala_async.wire.codec import encode_data
from impala_async.wire.messages import (
    PROTOCOL,
    Bye,
    ByeOk,
    Data,
    Grant,
    Hello,
    Message,
    Spec,
    Welcome,
    pack,
    unpack,
)
from impala_async.wire.sockets import Dealer, new_context
from tests.learner.columns import planes_of, small_schema
from tests.learner.hand_actor import DEADLINE_S, Actor, until
from tests.learner.server_harness import config_of

SCHEMA = small_schema()


class RandomActor(threading.Thread):
    """An actor that sends whatever it may, as if it had acted with the newest version."""

    poll_s = 0.01

    def __init__(self, url: str, layout: bytes, *, mean_return: float = 1.0) -> None:
        super().__init__(name="random_actor", daemon=True)
        self.uuid = id(self).to_bytes(16, "big")
        self.byes: list[Bye] = []
        self.num_sent = 0
        self._url = url
        self._layout = layout
        self._mean_return = mean_return
        self._is_over = threading.Event()
        self._columns = 2
        self._granted = self._seq = 0
        self._session = bytes(16)
        self._version = (0, 0)

    def run(self) -> None:
        context = new_context()
        self._socket = Dealer(context, self._url)
        try:
            self._say(Hello(PROTOCOL, self.uuid, "random_actor", bytes(16), 0, 0))
            while not self._is_over.is_set():
                frames = self._socket.receive(self.poll_s)
                while frames is not None:
                    self._take(unpack(frames[0]))
                    frames = self._socket.receive(0)
                while self._may_send() and not self._is_over.is_set():
                    self._send()
        finally:
            self._socket.close()
            context.term()

    def leave(self) -> None:
        self._is_over.set()
        self.join(DEADLINE_S)

    def _say(self, message: Message, *frames: bytes) -> None:
        while not self._socket.send([pack(message), *frames]) and not self._is_over.is_set():
            time.sleep(0.001)

    def _take(self, message: Message) -> None:
        if isinstance(message, Welcome):
            self._session = message.session
            spec = Spec(self._session, SCHEMA.digest, self._layout, self._columns, 1)
            self._say(spec, SCHEMA.to_json())
        elif isinstance(message, Grant):
            self._granted = max(self._granted, message.granted)
            self._version = max(self._version, (message.epoch, message.update))
        elif isinstance(message, Bye):
            self.byes.append(message)
            self._say(ByeOk(message.session))

    def _may_send(self) -> bool:
        return self._granted > self._seq and not self.byes

    def _send(self) -> None:
        planes = planes_of(SCHEMA, self._columns, seed=self._seq)
        epoch, update = max(self._version, (1, 0))
        header = Data(self._session, self._seq, epoch, update, SCHEMA.rows, 2, 0, 0, None)
        episodes = [(self._mean_return, 3)] * self._columns
        first, *frames = encode_data(header, planes.obs, planes.small, episodes)
        while not self._socket.send([first, *frames]) and not self._is_over.is_set():
            time.sleep(0.001)
        self._seq += 1
        self.num_sent += 1


class LastSink:
    """Keeps every report; may be told to fail."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Value]] = []
        self.error: Exception | None = None

    def write(self, report: dict[str, Value]) -> None:
        self.lines.append(report)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        pass


class ServiceRun:
    """One start of a service: its folder, its reports, and the task that runs it."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        *,
        schema: Schema | None,
        restored: Restored | None,
        make: Callable[..., LearnerService],
    ) -> None:
        self.folder = folder
        self.config = config
        self.sink = LastSink()
        sinks = [JsonlSink(folder.metrics), self.sink]
        self.service = make(config, folder, sinks, schema=schema, restored=restored)
        self.task = asyncio.create_task(self.service.run())
        self.random_actors: list[RandomActor] = []
        self.actors: list[Actor] = []

    @property
    def layout(self) -> bytes:
        return Policy(SCHEMA, self.config.model, seed=0).layout.digest

    async def place(self) -> dict[str, Any]:
        """`service.json`, once it is there."""
        found: list[dict[str, Any]] = []

        def is_bound() -> bool:
            assert not self.task.done(), self.task.exception()
            place = self.folder.read_json("service.json")
            found.extend([place] if place else [])
            return bool(found)

        await until(is_bound, "service.json")
        return found[0]

    async def start_actors(self, num_actors: int = 2, **settings: Any) -> None:
        url = (await self.place())["data_url"]
        new = [RandomActor(url, self.layout, **settings) for _ in range(num_actors)]
        for random_actor in new:
            random_actor.start()
        self.random_actors += new

    async def actor(self) -> Actor:
        place = await self.place()
        made = Actor(place["data_url"], place["weights_url"], SCHEMA)
        made.layout = self.layout
        self.actors.append(made)
        return made

    async def trained(self, num_updates: int) -> None:
        """Until a report says so."""
        await until(
            lambda: bool(self.sink.lines) and self.number("updates") >= num_updates, "updates"
        )

    def number(self, name: str) -> Any:
        return self.sink.lines[-1][name]

    async def end(self) -> int:
        return await asyncio.wait_for(self.task, DEADLINE_S)

    @property
    def summary(self) -> dict[str, Any]:
        summary = self.folder.read_json("summary.json")
        assert summary is not None
        return summary

    @property
    def reports(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.folder.metrics.read_text().splitlines()]

    async def close(self) -> None:
        for random_actor in self.random_actors:
            random_actor.leave()
        for actor in self.actors:
            actor.close()
        if not self.task.done():
            self.service.stop("test over")
        await asyncio.wait([self.task], timeout=DEADLINE_S)


@asynccontextmanager
async def service_run(
    path: Path,
    *,
    schema: Schema | None = SCHEMA,
    is_resumed: bool = False,
    make: Callable[..., LearnerService] = LearnerService,
    **sections: dict[str, Any],
) -> AsyncIterator[ServiceRun]:
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
