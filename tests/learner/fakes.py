"""Stand-ins for what surrounds the learner thread, all of them synchronous.

`Listener` is the loop's side of its channels, `FakeLoader` hands out batches by a script,
`FakeStep` is an update that does nothing but remember.
"""

import queue
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from impala_async.learner.handoff import Channels, ClosedError, Inbox, Mailbox
from impala_async.learner.loader import LoadedBatch
from impala_async.learner.watchdog import Watchdog
from impala_async.metrics.timer import TimerStat
from impala_async.training.step import StepResult
from impala_async.weights import Weights


class Listener:
    """Hears everything that a learner thread says, on the thread that posts it."""

    def __init__(self):
        loop = SimpleNamespace(call_soon_threadsafe=lambda call, *given: call(*given))
        self.settlements, self.weights, self.reports = [], [], []
        self.captures, self.stops, self.counts, self.cuts, self.common = [], [], [], [], []
        self.channels = Channels(
            settlements=Inbox(loop, self.settlements.append),
            weights=Mailbox(loop, self.weights.append),
            reports=Inbox(loop, self.reports.append),
            counts=Mailbox(loop, self.counts.append),
            cuts=Mailbox(loop, self.cuts.append),
            common=Mailbox(loop, self.common.append),
            captures=Inbox(loop, self.captures.append),
            stops=Inbox(loop, self.stops.append),
            run_path=Path(),
            watchdog=Watchdog(60.0),
        )

    @property
    def updates(self):
        """The updates of the versions that were published."""
        return [weights.version.update for weights in self.weights]


class FakeBatch:
    """A step and a test only see which batch it was, and where it was kept."""

    def __init__(self, number):
        self.number = number
        self.kept = []

    def keep(self, path, about, **others):
        self.kept.append((path, about, others))
        return "it is kept"


def batch_of(number, updates=(0, 0, 0, 0), valid_rows=(3, 3, 3, 3), returns=()):
    """A loaded batch, told by versions and valid rows of its columns."""
    slot = SimpleNamespace(
        batch=number,
        filled_B=np.ones(len(updates), np.bool_),
        updates_B=np.array(updates, np.int64),
        actors_B=np.zeros(len(updates), np.int64),
        returns=returns,
        columns=SimpleNamespace(mask_CT=np.arange(9) < np.array(valid_rows)[:, None]),
    )
    tensors = FakeBatch(number)
    return LoadedBatch(number, tensors, slot)


class FakeLoader:
    """Hands out a script: batches, None for an empty wait, a callable to be called first.

    At the end of the script it is closed.
    """

    def __init__(self, script):
        self._script = list(script)
        self.num_slots, self.is_closed = 3, False
        self.released, self.timeouts = [], []
        self.load_timer, self.load_wait_timer = TimerStat(), TimerStat()

    def get(self, *, timeout):
        self.timeouts.append(timeout)
        while self._script:
            step = self._script.pop(0)
            if step is None:
                raise queue.Empty
            if isinstance(step, LoadedBatch):
                return step
            step()
        raise ClosedError("full")

    def release(self, loaded):
        self.released.append(loaded.place)

    def num_waiting(self):
        return sum(isinstance(step, LoadedBatch) for step in self._script)

    def close(self):
        self.is_closed = True


class FakeStep:
    """An update of one number; not finite where `nonfinite` names the use, from 0.

    Then these columns fail: all of them, unless `failing` says which. All others
    make `num_updates` updates.
    """

    def __init__(self, nonfinite=(), failing=slice(None), num_updates=1):
        self.policy, self.tensors = self, (torch.zeros(3),)
        self.uses = []
        self.num_rows = []
        self.first_passes, self.begun = [], []
        self._nonfinite, self._failing, self._num_updates = set(nonfinite), failing, num_updates
        self._num_failed = 0
        self.stats = {"loss/total": 0.5}

    def begin(self, batch):
        self.begun.append(batch.number)
        return batch

    def run(self, batch, alive_B, env_steps_trained, *, is_first_pass, num_rows):
        is_failed_B = torch.zeros_like(alive_B)
        if len(self.uses) in self._nonfinite:
            is_failed_B[self._failing] = alive_B[self._failing]
        is_applied = bool((alive_B & ~is_failed_B).any())
        self.num_rows.append(num_rows)
        self.uses.append((batch.number, alive_B.tolist(), env_steps_trained))
        self.first_passes.append(is_first_pass)
        self.tensors[0].add_(int(is_applied))
        self._num_failed = 0 if is_applied else self._num_failed + 1
        what = ("loss/value", "loss/total") if is_failed_B.any() else ()
        num_updates = self._num_updates if is_applied else 0
        return StepResult(num_updates, is_failed_B, self.stats, self._num_failed, what)

    def capture(self):
        return len(self.uses)

    def take(self, version):
        """The number of updates, as weights."""
        flat = self.tensors[0].to(torch.uint8).repeat(4)
        is_finite = bool(flat.view(torch.float32).isfinite().all())
        return Weights(version, flat.numpy(), b"") if is_finite else None

    @property
    def batches(self):
        return [number for number, _, _ in self.uses]
