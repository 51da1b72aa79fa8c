"""The front in a process of its own, as the learner sees it: each call is a message to there.

So the learner's interpreter is left to the learner, which feels it when its updates are short and
messages many. Columns are written into slots that both processes have in common; here only a slot's
index arrives. Everything that is decided about actors is decided there, by the same classes.

Runs on: event loop
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impala_async.config import RunConfig
from impala_async.errors import ConfigError, ProcessLostError, ServiceError, how_it_ended
from impala_async.learner.channel import Channel, ChannelClosedError, Words
from impala_async.learner.front import Accounts, Events, Front
from impala_async.learner.ingest_process import IngestProcess
from impala_async.learner.ledger import Settlement
from impala_async.learner.recorder import Recorder
from impala_async.learner.slots import Slot
from impala_async.spec import Schema
from impala_async.weights import Lineage, Weights
from impala_async.wire.codec import EPISODE

DIED = "the ingest process is gone"
UNANSWERED = "the ingest process does not answer"
# What it is asked takes it milliseconds.
SILENT_REAPS = 20
ANSWER_S = 20.0


class RemoteFront:
    """Has the methods of `Front`. Ends its process when it is closed."""

    def __init__(
        self,
        process: IngestProcess,
        config: RunConfig,
        *,
        run_id: bytes,
        lineage: Lineage,
        schema: Schema | None,
        events: Events,
        accounts: Accounts | None,
        on_death: Callable[[BaseException], None],
    ) -> None:
        self.memory = process.memory
        self._process = process
        self._events = events
        self._on_death = on_death
        self._slots: list[Slot] = []
        self._submit: Callable[[int], None] = lambda index: None
        self._report: dict[str, object] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._num_asked = 0
        self._weights_memory: NDArray[np.uint8] | None = None
        self._next_weights: Weights | None = None
        self._is_taking_weights = False
        self._is_closing = False
        self._num_silent = 0
        self._hearers: dict[str, Callable[..., None]] = {
            "full": self._on_full,
            "episodes": self._on_episodes,
            "published": self._on_published,
            "schema": self._on_schema,
            "answer": self._on_answer,
            "log": _on_log,
            "died": self._die,
        }
        self._channel = Channel(process.end_of_channel, self._hear, self._on_end)
        self._channel.send(
            "begin",
            config.model_dump_json(by_alias=True),
            run_id,
            lineage.epoch,
            sorted(lineage.forks.items()),
            schema.to_json() if schema else None,
            accounts,
            logging.getLogger().level,
        )
        self.data_url, self.weights_url = self._wait_until_bound()

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """None here: the other side has a loop of its own."""
        return {}

    @property
    def num_actors(self) -> int:
        """At the last refresh."""
        num_actors = self._report.get("num_actors", 0)
        assert isinstance(num_actors, int)
        return num_actors

    def open(
        self,
        schema: Schema,
        slots: list[Slot],
        submit: Callable[[int], None],
        layout_digest: bytes,
    ) -> None:
        """There are slots for trajectories of this schema, in the memory that both sides have."""
        self._slots, self._submit = slots, submit
        self._channel.send("open", schema.to_json(), len(slots), layout_digest)

    def publish(self, weights: Weights) -> None:
        """The newest are copied to the other side as soon as it has taken those before."""
        self._next_weights = weights
        if not self._is_taking_weights:
            self._pass_on()

    def release(self, slot: int) -> None:
        """A slot is empty again; its columns are credit now."""
        self._channel.send("release", slot)

    def settle(self, settlement: Settlement) -> None:
        """The learner is done with a batch."""
        self._channel.send("settle", vars(settlement))

    def give_up(self, batch: int) -> None:
        """A batch never reached the learner."""
        self._channel.send("give_up", batch)

    def reap(self) -> None:
        """Once a second: end what is over, and a process that hears but does not answer."""
        self._channel.send("reap")
        self._num_silent = self._num_silent + 1 if self._answers else 0
        if self._num_silent > SILENT_REAPS:
            self._die(UNANSWERED)

    def close_admission(self) -> None:
        """Nothing more comes in."""
        self._channel.send("close_admission")

    async def say_bye(self, reason: str, timeout_s: float) -> None:
        """Tell every actor, and wait a moment until they have understood."""
        await self._ask("say_bye", reason, timeout_s)

    async def refresh(self) -> None:
        """Hear what there is to report now. All that was said before has come when it returns."""
        self._report = await self._ask("refresh") or self._report

    async def accounts(self) -> Accounts:
        """For a checkpoint: the ledger, and what actors need not send again."""
        accounts = await self._ask("accounts")
        if accounts is None:
            raise ServiceError(f"{DIED}, and the accounts with it")
        return dict(accounts)

    def report(self) -> dict[str, object]:
        return self._report

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._channel.close()
        self._forget_asked()
        self._process.end()

    def _wait_until_bound(self) -> tuple[str, str]:
        """Its addresses; ConfigError when it cannot have those of the settings."""
        try:
            name, *words = self._channel.wait_for("bound", "refused")
        except ChannelClosedError:
            self.close()
            how = how_it_ended(self._process.end())
            raise ProcessLostError(f"the ingest process did not start: it {how}") from None
        if name == "refused":
            self.close()
            raise ConfigError(words[0])
        return words[0], words[1]

    async def _ask(self, name: str, *words: object) -> Any:
        """The answer; None when nobody gives it."""
        if not self._channel.is_open:
            return None
        self._num_asked += 1
        ticket = self._num_asked
        answer = self._answers[ticket] = asyncio.get_running_loop().create_future()
        self._channel.send(name, ticket, *words)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            self._die(UNANSWERED)
            return None

    def _pass_on(self) -> None:
        weights, self._next_weights = self._next_weights, None
        if weights is None or not self._channel.is_open:
            return
        if self._weights_memory is None:
            self._weights_memory = self.memory.allocate(weights.buffer.nbytes)
        self._weights_memory[:] = weights.buffer
        self._is_taking_weights = True
        self._channel.send(
            "publish", *weights.version, weights.buffer.nbytes, weights.layout_digest
        )

    def _hear(self, words: Words) -> None:
        self._num_silent = 0
        self._hearers[words[0]](*words[1:])

    def _on_full(self, index: int, batch: int) -> None:
        self._slots[index].batch = batch
        self._submit(index)

    def _on_episodes(self, episodes: bytes) -> None:
        self._events.on_episodes(np.frombuffer(episodes, EPISODE))

    def _on_published(self) -> None:
        self._is_taking_weights = False
        self._pass_on()

    def _on_schema(self, text: bytes) -> None:
        """The first actor's: it waits, with all others, until we have built what it asks for."""
        try:
            self._events.on_schema(Schema.from_json(text))
        except ValueError as error:
            self._channel.send("unfit", str(error))

    def _on_answer(self, ticket: int, value: object) -> None:
        answer = self._answers.pop(ticket)
        if not answer.done():
            answer.set_result(value)

    def _on_end(self) -> None:
        """It does not end before we do, unless something is wrong."""
        self._die(DIED)

    def _die(self, told: str) -> None:
        """Say once what has happened, and expect nothing more from there."""
        if not self._is_closing:
            self.close()
            code = self._process.end()
            is_killed = told == DIED and code < 0
            how = f"{DIED}: it {how_it_ended(code)}; go on with --resume"
            self._on_death(ProcessLostError(how) if is_killed else RuntimeError(told))

    def _forget_asked(self) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result(None)
        self._answers.clear()


def open_front(
    process: IngestProcess | None,
    config: RunConfig,
    run_id: bytes,
    lineage: Lineage,
    schema: Schema | None,
    events: Events,
    accounts: Accounts | None,
    *,
    tap: Recorder | None,
    on_death: Callable[[BaseException], None],
) -> Front | RemoteFront:
    """Bind, here or in the process that was started for it, and go on with these accounts."""
    if process is None:
        return Front(
            config,
            run_id=run_id,
            lineage=lineage,
            schema=schema,
            events=events,
            accounts=accounts,
            tap=tap,
        )
    return RemoteFront(
        process,
        config,
        run_id=run_id,
        lineage=lineage,
        schema=schema,
        events=events,
        accounts=accounts,
        on_death=on_death,
    )


def _on_log(name: str, level: int, text: str) -> None:
    logging.getLogger(name).log(level, "%s", text)
