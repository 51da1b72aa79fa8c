"""The process of a front that stands alone: it does what the learner says over the channel.

Its loop has the sockets and the channel, and nothing else. When the learner is gone, so is it.

Runs on: event loop of the ingest process
"""

import asyncio
import logging
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impala_async.config import RunConfig
from impala_async.errors import EXIT_BUG, ConfigError
from impala_async.interrupts import REQUESTS
from impala_async.learner.allocator import keep_freed_memory
from impala_async.learner.channel import Channel, ChannelClosedError, Words
from impala_async.learner.front import Accounts, Events, Front
from impala_async.learner.ledger import Settlement
from impala_async.learner.shared_memory import SharedMemory
from impala_async.learner.slots import Episodes, Slot, allocate_slots
from impala_async.metrics.report import merge
from impala_async.spec import Schema
from impala_async.weights import Lineage, Version, Weights

# A message to the learner wakes its interpreter: episodes wait for each other so long.
EPISODES_WAIT_S = 0.02


class FrontProcess:
    """Owns a `Front`, and speaks to the learner for it."""

    def __init__(self, end: socket.socket, memory: SharedMemory) -> None:
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_loop_error)
        self._over: asyncio.Future[int] = self._loop.create_future()
        self._channel = Channel(end, self._hear, self._on_end)
        self._slots: list[Slot] = []
        self._episodes: list[bytes] = []
        self._weights_memory: NDArray[np.uint8] | None = None
        self._at_end = ExitStack()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Until the learner is gone; the exit code."""
        with self._at_end:
            if not self._begin(*self._channel.wait_for("begin")[1:]):
                return 0
            for body in self._front.tasks().values():
                self._keep(body)
            return await self._over

    def _begin(
        self,
        settings: str,
        run_id: bytes,
        epoch: int,
        forks: list[list[int]],
        schema: bytes | None,
        accounts: Accounts | None,
        log_level: int,
    ) -> bool:
        """Bind; False, and said why, if that cannot be."""
        logging.basicConfig(level=log_level, handlers=[_Teller(self._channel)])
        self._config = RunConfig.model_validate_json(settings)
        events = Events(
            on_schema=self._on_schema,
            on_episodes=self._on_episodes,
            on_loss=lambda: None,
        )
        try:
            self._front = Front(
                self._config,
                run_id=run_id,
                lineage=Lineage(epoch, {before: at for before, at in forks}),
                schema=Schema.from_json(schema) if schema is not None else None,
                events=events,
                accounts=accounts,
            )
        except ConfigError as error:
            self._channel.send("refused", str(error))
            return False
        front = self._front
        self._at_end.callback(front.close)
        self._hearers: dict[str, Callable[..., None]] = {
            "open": self._open,
            "publish": self._publish,
            "release": front.release,
            "settle": lambda fields: front.settle(Settlement(**fields)),
            "give_up": front.give_up,
            "reap": front.reap,
            "close_admission": front.close_admission,
            "say_bye": lambda *words: self._keep(self._say_bye(*words)),
            "refresh": self._refresh,
            "accounts": lambda ticket: self._keep(self._account(ticket)),
        }
        self._channel.send("bound", front.data_url, front.weights_url)
        if schema is not None:
            # Nobody is heard before the learner can take what it sends, as on its own loop.
            self._open(*self._channel.wait_for("open")[1:])
        return True

    def _hear(self, words: Words) -> None:
        self._hearers[words[0]](*words[1:])

    def _open(self, schema: bytes, num_slots: int, layout_digest: bytes) -> None:
        """The learner has allocated the same before us."""
        known = Schema.from_json(schema)
        columns = self._config.learner.batch_columns
        self._slots = allocate_slots(known, columns, num_slots, self._memory.allocate)
        self._front.open(known, self._slots, self._submit, layout_digest)

    def _submit(self, index: int) -> None:
        self._tell_episodes()
        self._channel.send("full", index, self._slots[index].batch)

    def _publish(self, epoch: int, update: int, num_bytes: int, layout_digest: bytes) -> None:
        """Take the weights: the learner writes there again as soon as it hears that we have."""
        if self._weights_memory is None:
            self._weights_memory = self._memory.allocate(num_bytes)
        buffer = self._weights_memory.copy()
        self._front.publish(Weights(Version(epoch, update), buffer, layout_digest))
        self._channel.send("published")

    def _refresh(self, ticket: int) -> None:
        self._tell_episodes()
        self._channel.send("answer", ticket, merge(self._front.report()))

    async def _account(self, ticket: int) -> None:
        # A checkpoint is of one moment: what these have settled is counted there too.
        self._tell_episodes()
        self._channel.send("answer", ticket, await self._front.accounts())

    async def _say_bye(self, ticket: int, reason: str, timeout_s: float) -> None:
        await self._front.say_bye(reason, timeout_s)
        self._channel.send("answer", ticket, None)

    def _on_schema(self, schema: Schema) -> None:
        """No actor hears anything before the learner has built what this schema asks for."""
        self._channel.send("schema", schema.to_json())
        name, *words = self._channel.wait_for("open", "unfit")
        if name == "unfit":
            raise ValueError(words[0])
        self._open(*words)

    def _on_episodes(self, episodes: Episodes) -> None:
        if not self._episodes:
            self._loop.call_later(EPISODES_WAIT_S, self._tell_episodes)
        self._episodes.append(episodes.tobytes())

    def _tell_episodes(self) -> None:
        if self._episodes:
            self._channel.send("episodes", b"".join(self._episodes))
            self._episodes.clear()

    def _keep(self, body: Coroutine[Any, Any, None]) -> None:
        """Run it beside all else. The loop itself would forget it."""
        task = self._loop.create_task(body)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised: nothing can be trusted any more. Its learner says so too."""
        error = context.get("exception") or RuntimeError(context["message"])
        if isinstance(error, ChannelClosedError):
            self._end(0)
            return
        traceback.print_exception(error)
        self._channel.send("died", repr(error))
        self._end(EXIT_BUG)

    def _on_end(self) -> None:
        self._end(0)

    def _end(self, code: int) -> None:
        if not self._over.done():
            self._over.set_result(code)


class _Teller(logging.Handler):
    """The learner has the console."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        # Time, level and name are added there; a traceback, if there is one, is a part of the text.
        self.setFormatter(logging.Formatter("%(message)s"))
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.send("log", record.name, record.levelno, self.format(record))


async def serve(end: socket.socket, memory: SharedMemory) -> int:
    """Be the front of the learner at the other end."""
    try:
        return await FrontProcess(end, memory).run()
    except ChannelClosedError:
        return 0


def main() -> int:
    """What the learner starts, with two descriptors."""
    # Who ends a whole group of processes means the learner, and that ends us in good order.
    for number in REQUESTS:
        signal.signal(number, signal.SIG_IGN)
    keep_freed_memory()
    channel_fd, memory_fd = map(int, sys.argv[1:])

    import uvloop

    return uvloop.run(serve(socket.socket(fileno=channel_fd), SharedMemory(memory_fd)))


if __name__ == "__main__":
    sys.exit(main())
