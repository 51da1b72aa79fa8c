"""The sampler of two groups: the environments of one step while the policy acts for the other.

Each group has its own workers, columns and messages. A call of `step`, and what goes on meanwhile:

    policy     acts for A    (waits)      acts for B    (waits)      acts for A
    group A    ..............steps─────────────────────┐.............steps──────
    group B    steps─────────────────────┐.............steps─────────────────────
               └──── one call ───────────┘└──── the next one ───────┘

Newer weights are asked for by the first group only. Both groups end their trajectories with the
same row, the first one first, so they swap together, and never within a trajectory. (Where each
column has its own end, `DirectSampler` says what holds.)

Runs on: sampler thread
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from impala_async.actor.samplers.direct import DirectSampler, build_sampler
from impala_async.actor.samplers.protocols import (
    ActingPolicy,
    BufferSource,
    ChosenActions,
    Newest,
    SamplerTimers,
)
from impala_async.actor.sending import Finished
from impala_async.actor.workers import WorkerEnvs
from impala_async.schema import Schema

Group = tuple[DirectSampler, WorkerEnvs]
"""A sampler, and its environments, which are stepped past it."""


class AlternatingSampler:
    """Two groups of equal width."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._acting, self._stepping = groups
        self.timers = SamplerTimers()
        for sampler, _ in groups:
            sampler.timers = self.timers
        # What the stepping group does; nothing before its first turn.
        self._under_way: ChosenActions | None = None

    def step(self) -> list[Finished]:
        """Act for one group, then take the other one's step; the messages that are complete."""
        (sampler, envs), (other, other_envs) = self._acting, self._stepping
        finished, chosen = sampler.choose()
        envs.send(chosen.actions)
        self._acting, self._stepping = self._stepping, self._acting
        other_chosen, self._under_way = self._under_way, chosen
        if other_chosen is None:
            return finished
        before = perf_counter()
        step = other_envs.receive()
        self.timers.env_time_s += perf_counter() - before
        return finished + other.take(other_chosen, step)

    def close(self) -> None:
        """Close both groups; trajectories that are not full are lost."""
        try:
            self._acting[0].close()
        finally:
            self._stepping[0].close()


def build_alternating(
    schema: Schema,
    groups: Sequence[WorkerEnvs],
    policy: ActingPolicy,
    rng: Any,
    *,
    buffers: BufferSource,
    newest: Newest,
    seed: int,
) -> AlternatingSampler:
    """As `build_sampler`, over two groups of equal width."""
    # The second one plays with what the first one got.
    asks: list[Newest] = [newest, lambda: None]
    return AlternatingSampler(
        [
            (
                build_sampler(schema, envs, policy, rng, buffers=buffers, newest=ask, seed=seed),
                envs,
            )
            for envs, ask in zip(groups, asks, strict=True)
        ]
    )
