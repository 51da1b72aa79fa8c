"""Every crossing between the event loop and the threads: the only file that knows both.

Slot indices go to a thread through an `IndexQueue`. Records come back in order through an `Inbox`;
values of which only the newest counts through a `Mailbox`. `Channels` are all that the learner
thread and the loop have of these.

Runs on: event loop and threads; each method says which.
"""

import asyncio
import errno
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from impala_async.config.run import StopSection
from impala_async.errors import ServiceError
from impala_async.learner.watchdog import Pulse
from impala_async.metrics.window import WindowStat
from impala_async.weights import Version, Weights

if TYPE_CHECKING:
    from impala_async.learner.loop.ledger import Settlement
    from impala_async.training.state import TrainingState

Value = TypeVar("Value")

NOT_FINITE = "not_finite"
"""The reason of an end: there are no numbers to learn from."""


class ClosedError(Exception):
    """The service is stopping: the thread that sees this returns."""


class IndexQueue:
    """Slot indices from one side to the other. Bounded by the number of slots, so puts never wait.

    Owns its three numbers: the wait of each `get`, the depth after each `put` and the capacity.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self._items: deque[int] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_drained = False
        self._get_wait = WindowStat("get_wait")
        self._depth = WindowStat("depth")

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: int) -> None:
        """From any side; never waits."""
        with self._changed:
            assert len(self._items) < self.capacity, f"{self.name}: more indices than slots"
            self._items.append(item)
            self._depth.push(len(self._items))
            self._changed.notify()

    def get(self, timeout: float | None = None) -> int:
        """From a thread: wait; raises queue.Empty after the timeout, ClosedError at the end."""
        started = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._is_closed, timeout)
            if self._is_closed and not (self._is_drained and self._items):
                raise ClosedError(self.name)
            if not self._items:
                raise queue.Empty
            self._get_wait.push((time.monotonic() - started) * 1000)
            return self._items.popleft()

    def take_all(self) -> list[int]:
        """Take what is left after the close: for the accounts."""
        with self._changed:
            items = list(self._items)
            self._items.clear()
            return items

    def close(self, *, is_drained: bool = False) -> None:
        """From any side: every waiter wakes and raises ClosedError, drained: once it is empty."""
        with self._changed:
            self._is_closed, self._is_drained = True, is_drained
            self._changed.notify_all()

    def report(self) -> dict[str, object]:
        """The three numbers, under the names of the registry."""
        prefix = f"queue/{self.name}"
        with self._changed:
            return {
                f"{prefix}_get_wait_ms": self._get_wait.mean,
                f"{prefix}_depth_quantiles": self._depth.quantiles,
                f"{prefix}_capacity": self.capacity,
            }


class Inbox(Generic[Value]):
    """Records from a thread to the loop: all of them, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[Value], None]) -> None:
        self._loop = loop
        self._take = take

    def post(self, value: Value) -> None:
        """From a thread; never waits. After the loop has ended nobody is there to listen."""
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
        """From a thread; replaces a value that has not been taken yet."""
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
        error: BaseException | None = None
        try:
            body()
        except ClosedError:
            pass
        except BaseException as raised:  # a thread has no caller: the loop is told instead
            error = raised
        done.post(error)

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


# -------------------- what the learner thread and the loop say to each other


class Progress(NamedTuple):
    """How far training is; what a checkpoint continues from."""

    epoch: int
    update: int = 0
    env_steps_trained: int = 0

    @property
    def version(self) -> Version:
        return Version(self.epoch, self.update)

    def reached(self, stop: StopSection) -> str | None:
        """The limit that is reached, of those on what is made."""
        if stop.env_steps is not None and self.env_steps_trained >= stop.env_steps:
            return "env_steps"
        return "updates" if stop.updates is not None and self.update >= stop.updates else None


class LearnerReport(NamedTuple):
    """A frozen reading of everything that the learner thread owns."""

    progress: Progress
    starved_at: float | None = None
    first_update: tuple[float, int] | None = None
    """Where the clock of a start begins, and the env steps that were trained by then."""
    metrics: Mapping[str, object] = MappingProxyType({})
    lag_histogram: Sequence[int] = ()


class Captured(NamedTuple):
    """All that a checkpoint needs from the learner thread, cloned at one moment, or gives back."""

    progress: Progress
    training: "TrainingState"


@dataclass(frozen=True)
class Channels:
    """Where the thread's words go, and what the loop asks of it."""

    settlements: "Inbox[Settlement]"
    weights: Mailbox[Weights] | Inbox[Weights]
    reports: Inbox[LearnerReport]
    captures: Inbox[Captured]
    stops: Inbox[str]
    run_path: Path
    """Where it leaves what made it give up."""
    pulse: Pulse = field(default_factory=lambda: Pulse("the learner thread"))
    # Requests of the loop, which the thread looks at when it has time.
    is_report_due: threading.Event = field(default_factory=threading.Event)
    is_capture_due: threading.Event = field(default_factory=threading.Event)
