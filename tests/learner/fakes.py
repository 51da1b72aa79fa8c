"""Stand-ins for what surrounds the learner thread, all of them synchronous.

`Listener` is the loop's side of its channels, `FakeLoader` hands out batches by a script,
`FakeStep` is an update that does nothing but remember.
"""

import queue
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from impala_async.learner.handoff import (
    Captured,
    Channels,
    ClosedError,
    Inbox,
    LearnerReport,
    Mailbox,
)
from impala_async.learner.loader import LoadedBatch
from impala_async.learner.slots import Settlement
from impala_async.learner.watchdog import Watchdog
from impala_async.metrics.timer import TimerStat
from impala_async.training.step import StepResult
from impala_async.weights import Version, Weights


class InlineLoop:
    """A loop that runs every callback at once, on the thread that posts it."""

    def call_soon_threadsafe(self, callback: Callable[..., None], *arguments: Any) -> None:
        callback(*arguments)

    def is_closed(self) -> bool:
        return False


class Listener:
    """Hears everything that a learner thread says, in one order of `events` and by kind."""

    def __init__(self) -> None:
        loop: Any = InlineLoop()
        self.settlements: list[Settlement] = []
        self.weights: list[Weights] = []
        self.reports: list[LearnerReport] = []
        self.captures: list[Captured] = []
        self.stops: list[str] = []
        self.channels = Channels(
            settlements=Inbox(loop, self.settlements.append),
            weights=Mailbox(loop, self.weights.append),
            reports=Inbox(loop, self.reports.append),
            captures=Inbox(loop, self.captures.append),
            stops=Inbox(loop, self.stops.append),
            run_path=Path(),
            watchdog=Watchdog(60.0),
        )

    @property
    def versions(self) -> list[Version]:
        return [weights.version for weights in self.weights]

    @property
    def report(self) -> dict[str, Any]:
        return self.reports[-1].metrics


class FakeBatch:
    """What a step gets to see: it only remembers which batch it was, and where it was kept."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.kept: list[tuple[Any, ...]] = []

    def keep(self, path: Path, about: dict[str, str], **others: Any) -> str:
        self.kept.append((path, about, others))
        return "it is kept"


def batch_of(number, updates=(0, 0, 0, 0), valid_rows=(3, 3, 3, 3)):
    """A loaded batch, told by versions and valid rows of its columns."""
    updates_B = np.array(tuple(updates), np.int64)
    mask_CT = np.arange(9) < np.array(tuple(valid_rows))[:, None]
    slot: Any = SimpleNamespace(
        batch=number,
        filled_B=np.ones(len(updates_B), np.bool_),
        updates_B=updates_B,
        ranks_B=np.zeros_like(updates_B),
        columns=SimpleNamespace(mask_CT=mask_CT),
    )
    tensors: Any = FakeBatch(number)
    return LoadedBatch(number, tensors, slot)


class FakeLoader:
    """Hands out a script: batches, None for an empty wait, a callable to be called first.

    At the end of the script it is closed.
    """

    def __init__(self, script: Iterable[LoadedBatch | Callable[[], None] | None]) -> None:
        self._script = list(script)
        self.released: list[int] = []
        self.num_slots = 3
        self.is_closed = False
        self.timeouts: list[float | None] = []
        self.load_timer = TimerStat()
        self.load_wait_timer = TimerStat()

    def get(self, *, timeout: float | None) -> LoadedBatch:
        self.timeouts.append(timeout)
        while self._script:
            step = self._script.pop(0)
            if step is None:
                raise queue.Empty
            if isinstance(step, LoadedBatch):
                return step
            step()
        raise ClosedError("full")

    def release(self, loaded: LoadedBatch) -> int | None:
        self.released.append(loaded.place)
        return None

    def num_waiting(self) -> int:
        return sum(isinstance(step, LoadedBatch) for step in self._script)

    def close(self) -> None:
        self.is_closed = True


class FakeStep:
    """An update of one number; not finite where `nonfinite` names the use, from 0.

    Then these columns fail: all of them, unless `failing` says which. Of what does not fail it
    makes `num_updates`.
    """

    def __init__(self, nonfinite=(), failing=None, num_updates=1):
        self.policy = self
        self.tensors = (torch.zeros(3),)
        self.uses: list[tuple[int, list[bool], int]] = []
        self.first_passes: list[bool] = []
        self._nonfinite = set(nonfinite)
        self._failing = None if failing is None else list(failing)
        self._num_updates = num_updates
        self._num_failed = 0

    def run(self, batch, alive_B, env_steps_trained, *, is_first_pass):
        is_failed_B = torch.zeros_like(alive_B)
        if len(self.uses) in self._nonfinite:
            is_failed_B[slice(None) if self._failing is None else self._failing] = True
            is_failed_B &= alive_B
        is_applied = bool((alive_B & ~is_failed_B).any())
        self.uses.append((batch.number, alive_B.tolist(), env_steps_trained))
        self.first_passes.append(is_first_pass)
        if is_applied:
            self.tensors[0].add_(1)
        num_updates = self._num_updates if is_applied else 0
        stats = {"loss/total": 0.5}
        self._num_failed = 0 if is_applied else self._num_failed + 1
        return StepResult(
            num_updates,
            is_failed_B,
            stats,
            self._num_failed,
            ("loss/value", "loss/total") if is_failed_B.any() else (),
        )

    def capture(self) -> Any:
        return len(self.uses)

    @property
    def batches(self) -> list[int]:
        return [number for number, _, _ in self.uses]


class FakeSnapshot:
    """The number of updates, as weights."""

    def __init__(self, step: FakeStep) -> None:
        self._number = step.tensors[0]

    def take(self, version: Version) -> Weights | None:
        flat = self._number.to(torch.uint8).repeat(4)
        is_finite = bool(flat.view(torch.float32).isfinite().all())
        return Weights(version, flat.numpy(), b"") if is_finite else None
