"""The learner thread tells the loop, and the loop asks of it, through these channels.

Runs on: event loop and learner thread
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from impala_async.config.run import StopSection
from impala_async.learner.handoff import Flag, Inbox, Mailbox
from impala_async.learner.loop.ledger import Settlement
from impala_async.learner.watchdog import Pulse
from impala_async.training.state import TrainingState
from impala_async.weights import Version, Weights

NOT_FINITE = "not_finite"
"""The reason of an end: there are no numbers to learn from."""


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


class FirstUpdate(NamedTuple):
    """Where the clock of a start begins, and the env steps that were trained by then."""

    at: float
    env_steps: int


class LearnerReport(NamedTuple):
    """A frozen reading of everything that the learner thread owns."""

    progress: Progress
    starved_at: float | None = None
    first_update: FirstUpdate | None = None
    metrics: Mapping[str, object] = MappingProxyType({})
    lag_histogram: Sequence[int] = ()


class Captured(NamedTuple):
    """All that a checkpoint needs from the learner thread, cloned at one moment."""

    progress: Progress
    training: TrainingState


@dataclass(frozen=True)
class Channels:
    """Where the thread's words go, and what the loop asks of it."""

    settlements: Inbox[Settlement]
    weights: Mailbox[Weights] | Inbox[Weights]
    reports: Mailbox[LearnerReport]
    captures: Mailbox[Captured]
    stops: Inbox[str]
    run_path: Path
    """Where it leaves what made it give up."""
    pulse: Pulse = field(default_factory=lambda: Pulse("the learner thread"))
    is_report_due: Flag = field(default_factory=Flag)
    is_capture_due: Flag = field(default_factory=Flag)
