"""Crossings from threads to the event loop, and the threads: the only file that knows both.

Runs on: event loop and threads; each method says which.
"""

import asyncio
import errno
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from impala_async.errors import ServiceError
from impala_async.learner.watchdog import Watchdog
from impala_async.weights import NO_VERSION, Version, Weights

if TYPE_CHECKING:
    from impala_async.learner.slots import Settlement
    from impala_async.training.checkpoint import TrainingState

Value = TypeVar("Value")

NOT_FINITE, ACTOR_LOST = "not_finite", "actor_lost"
"""Reasons of an end: there are no numbers to learn from, or somebody who is waited for is gone."""


class ClosedError(Exception):
    """The service is stopping: the thread that sees this returns."""


class Inbox(Generic[Value]):
    """Records from a thread to the loop: all of them, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[Value], None]) -> None:
        self._loop, self._take = loop, take

    def post(self, value: Value) -> None:
        """Hand over from a thread; never waits. After the loop has ended nobody listens."""
        try:
            self._loop.call_soon_threadsafe(self._take, value)
        except RuntimeError:
            if not self._loop.is_closed():
                raise


class Mailbox(Generic[Value]):
    """Values from a thread to the loop, of which only the newest counts."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[Value], None]) -> None:
        self._inbox: Inbox[None] = Inbox(loop, self._deliver)
        self._take = take
        self._newest: deque[Value] = deque(maxlen=1)

    def post(self, value: Value) -> None:
        """Hand over from a thread; replaces a value that has not been taken yet."""
        self._newest.append(value)
        self._inbox.post(None)

    def _deliver(self, _: None) -> None:
        # Another delivery may have taken it, with those that it replaced.
        if self._newest:
            self._take(self._newest.pop())


async def on_thread(name: str, body: Callable[[], None]) -> None:
    """Run a body in a thread of its own and wait for its end; what it raises is raised here.

    A process that dies does not wait for such a thread, as it would for one of the loop's pool.
    Where the system gives no thread, for now perhaps, that is an OSError.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[BaseException | None] = loop.create_future()

    def end(error: BaseException | None) -> None:
        if not ended.done():
            ended.set_result(error)

    done = Inbox(loop, end)

    def run() -> None:
        try:
            body()
        except BaseException as error:  # a thread has no caller: the loop is told instead
            done.post(None if isinstance(error, ClosedError) else error)
        else:
            done.post(None)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as refused:
        raise OSError(errno.EAGAIN, str(refused)) from None
    error = await ended
    if isinstance(error, Exception):
        raise error
    if error is not None:
        # A loop would take what is no Exception for its own end.
        raise ServiceError(f"the {name} thread: {error!r}") from error


class Progress(NamedTuple):
    """How far training is; what a checkpoint continues from."""

    epoch: int
    update: int = 0
    env_steps_trained: int = 0

    @property
    def version(self) -> Version:
        return Version(self.epoch, self.update)


class LearnerReport(NamedTuple):
    """A frozen reading of everything that the learner thread owns."""

    progress: Progress
    starved_at: float | None = None
    first_update: tuple[float, int] | None = None
    """Where the clock of a start begins, and the env steps that were trained by then."""
    metrics: Mapping[str, object] = MappingProxyType({})
    lag_histogram: Sequence[int] = ()
    others: Sequence[bytes] = ()
    """The newest reports of the other ranks, as JSON."""
    updates: bytes = b""
    """A line of JSON for each pass since the last reading, where they are logged."""


class Captured(NamedTuple):
    """All that a checkpoint needs from the learner thread, cloned at one moment, or gives back."""

    progress: Progress
    training: "TrainingState"
    is_save_due: bool = False
    """It is to be saved, by all ranks."""


@dataclass(frozen=True)
class Channels:
    """Where the thread's words go, and what the loop asks of it."""

    settlements: "Inbox[Settlement]"
    weights: Mailbox[Weights] | Inbox[Weights]
    reports: Inbox[LearnerReport]
    counts: Mailbox[tuple[Sequence[int], Sequence[int]]]
    """How many actors have joined each rank, and how many sessions it has."""
    cuts: Mailbox[int]
    """The updates for which other ranks are ready and this one lacks its batch."""
    common: Mailbox[Version]
    """The newest checkpoint that all ranks have."""
    captures: Inbox[Captured]
    stops: Inbox[str]
    run_path: Path
    """The folder where it leaves what made it give up."""
    watchdog: Watchdog
    # Requests of the loop, which the thread looks at when it has time.
    is_report_due: threading.Event = field(default_factory=threading.Event)
    is_capture_due: threading.Event = field(default_factory=threading.Event)
    is_save_due: threading.Event = field(default_factory=threading.Event)
    # The loop knows these, and other ranks are told: why the run ends, once it does, and the last
    # returns.
    end_reasons: list[str] = field(default_factory=list)
    returns: list[Sequence[float]] = field(default_factory=lambda: [()])
    count_actors: Callable[..., tuple[int, int]] = lambda **_: (0, 0)
    # The newest report of this rank, for rank 0 to merge.
    reported: list[bytes] = field(default_factory=lambda: [b"{}"])
    # The newest checkpoint that this rank has written in this start.
    saved: list[Version] = field(default_factory=lambda: [NO_VERSION])
    # The mean return of all by which the goal is reached, once it is.
    goals: list[float] = field(default_factory=list)
