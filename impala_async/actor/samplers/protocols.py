"""A sampler asks the others for these: a policy, buffers, newer weights. It has timers.

Runs on: sampler thread
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from impala_async.actor.sending import MessageBuffer
from impala_async.policy import Action
from impala_async.weights import Version, Weights

Newest = Callable[[], Weights | None]
"""Weights newer than those in use, or None. Asked at trajectory boundaries only; it may wait."""


class ActingPolicy(Protocol):
    """The side of a policy that a sampler sees. `rng` is the policy's business."""

    @property
    def version(self) -> Version: ...

    def first_state(self, num_columns: int, /) -> dict[str, NDArray[np.float32]]: ...

    def act(
        self, obs: dict[str, NDArray[Any]], state: Mapping[str, NDArray[np.float32]], rng: Any, /
    ) -> Action:
        """Choose for C columns; the sampler may write to the state that comes with it."""
        ...

    def load(self, weights: Weights) -> None: ...


class BufferSource(Protocol):
    """Where message buffers come from; the reader of a finished message gives them back to it."""

    def take(self, num_columns: int) -> MessageBuffer:
        """A buffer that nobody reads any more; may wait until there is one."""
        ...


@dataclass
class SamplerTimers:
    """Where a sampler's time went since the last `take`; one thread owns it."""

    act_time_s: float = 0.0
    env_time_s: float = 0.0
    num_steps: int = 0
    """Steps of every column, or of every column of a group."""

    def take(self) -> "SamplerTimers":
        """A copy; the sums begin anew."""
        taken = replace(self)
        self.act_time_s = self.env_time_s = 0.0
        self.num_steps = 0
        return taken
