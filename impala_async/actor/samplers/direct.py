"""The samplers that act for all columns at once and step them in their own thread.

One loop for both autoreset modes; they differ in how a step becomes rows:

    NEXT_STEP   all columns share a cursor and travel as one message. The step after an end is a
                row of its own (masked), so nothing needs to be added.
    SAME_STEP   a step that ends a column's episode gives two rows: the transition, and a masked
                one with the final observation, after which comes the reset one. So the columns'
                cursors part, and each column travels as its own message.

A trajectory's buffer is taken at the beginning of the step that needs it, not at the end of the
step that filled the last one: a finished message is never held back by the wait for a buffer.

Runs on: sampler thread
"""

from abc import ABC, abstractmethod
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from impala_async.actor.samplers.protocols import (
    ActingPolicy,
    BufferSource,
    ChosenActions,
    Newest,
    SamplerTimers,
)
from impala_async.actor.unroll import Finished, Unroll
from impala_async.envs.vector import EnvBatch, Step
from impala_async.spec import Schema


class DirectSampler(ABC):
    """The loop; `_write` makes rows of a step."""

    def __init__(
        self,
        schema: Schema,
        envs: EnvBatch,
        policy: ActingPolicy,
        rng: Any,
        *,
        buffers: BufferSource,
        newest: Newest,
        seed: int,
    ) -> None:
        self.timers = SamplerTimers()
        self._envs = envs
        self._policy = policy
        self._rng = rng
        self._buffers = buffers
        self._newest = newest
        self._obs = envs.reset(seed)
        self._unrolls = self._make_unrolls(schema)
        self._is_any_waiting = True

    def step(self) -> list[Finished]:
        """Step every column once; the messages that this completed, mostly none."""
        finished = self._begin() if self._is_any_waiting else []
        timers = self.timers
        before = perf_counter()
        chosen = self._policy.act(self._obs, self._rng)
        acted = perf_counter()
        step = self._envs.step(chosen.actions)
        timers.env_time_s += perf_counter() - acted
        timers.act_time_s += acted - before
        timers.num_steps += 1
        self._obs = step.obs
        finished += self._write(chosen, step)
        if finished:
            self._is_any_waiting = True
        return finished

    def close(self) -> None:
        """Close the environments; trajectories that are not full are lost."""
        self._envs.close()

    @abstractmethod
    def _make_unrolls(self, schema: Schema) -> list[Unroll]: ...

    @abstractmethod
    def _write(self, chosen: ChosenActions, step: Step) -> list[Finished]: ...

    def _begin(self) -> list[Finished]:
        """Open the trajectories that are due, with the newest weights.

        Columns in mid-trajectory act with them too, and keep the older version of their first
        row: lag is never understated.
        """
        before = perf_counter()
        due = [unroll for unroll in self._unrolls if unroll.needs_buffer]
        buffers = [self._buffers.take(unroll.num_columns) for unroll in due]
        weights = self._newest()
        self.timers.wait_time_s += perf_counter() - before
        if weights is not None:
            self._policy.load(weights)
        for unroll, buffer in zip(due, buffers, strict=True):
            unroll.begin(buffer, self._policy.version)
        self._is_any_waiting = False
        return []


class NextStepSampler(DirectSampler):
    """All columns in one message."""

    def _make_unrolls(self, schema: Schema) -> list[Unroll]:
        unroll = Unroll(schema, self._envs.num_envs)
        unroll.start(self._obs)
        return [unroll]

    def _write(self, chosen: ChosenActions, step: Step) -> list[Finished]:
        finished = self._unrolls[0].append(
            chosen.actions,
            chosen.log_probs,
            step.rewards,
            step.terminated,
            step.truncated,
            step.obs,
        )
        return [] if finished is None else [finished]
