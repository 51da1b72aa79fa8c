"""How an actor samples: its environments, wherever they are stepped, the policy's device, and the
sampler over both.

Environments are made before anything is agreed with the learner, since the schema follows from it.

    serial, vector, parallel   `DirectSampler` over one batch of environments
    alternating                `AlternatingSampler` over two such batches

Runs on: sampler thread
"""

import logging
from collections.abc import Sequence
from time import perf_counter
from typing import Any, cast

import torch
from gymnasium.vector import AutoresetMode

from impala_async.actor.samplers.direct import DirectSampler, build_sampler
from impala_async.actor.samplers.protocols import (
    ActingPolicy,
    BufferSource,
    Newest,
    SamplerTimers,
)
from impala_async.actor.sending import Finished
from impala_async.actor.worker import LookUp
from impala_async.actor.workers import WorkerEnvs, Workers, count_cores
from impala_async.config.actor import WITH_WORKERS, ActorSection, SamplerName
from impala_async.config.env import EnvSection
from impala_async.config.policies import ONE_POLICY, PoliciesSection
from impala_async.envs.batch import EnvBatch
from impala_async.envs.make import build_envs, build_usual
from impala_async.errors import EnvError, MismatchError
from impala_async.policy import Action
from impala_async.schema import Schema

logger = logging.getLogger(__name__)

CPU = "cpu"


class AlternatingSampler:
    """Two groups of equal width: the environments of one step while the policy acts for the other.

    Each group has its own workers, columns and messages. A call of `step`, and what goes on
    meanwhile:

        policy     acts for A    (waits)      acts for B    (waits)      acts for A
        group A    ..............steps─────────────────────┐.............steps──────
        group B    steps─────────────────────┐.............steps─────────────────────
                   └──── one call ───────────┘└──── the next one ───────┘

    Both groups end their trajectories with the same row, the first one first, so they swap weights
    together, and never within a trajectory. (Where each column has its own end, `DirectSampler`
    says what holds.)
    """

    def __init__(self, samplers: Sequence[DirectSampler], groups: Sequence[WorkerEnvs]) -> None:
        # Environments are stepped past their sampler.
        self._acting, self._stepping = zip(samplers, groups, strict=True)
        self.timers = SamplerTimers()
        for sampler in samplers:
            sampler.timers = self.timers
        # The stepping group does this; nothing before its first turn.
        self._under_way: Action | None = None

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


Sampler = DirectSampler | AlternatingSampler
"""Over one group of environments, or over two."""


class Setup:
    """Groups of environments that are stepped together: one, or two that alternate."""

    def __init__(self, name: SamplerName, groups: Sequence[EnvBatch], device: str = CPU) -> None:
        self.name = name
        self.groups = list(groups)
        self.device = device
        self.obs_spec, self.action_spec = groups[0].obs_spec, groups[0].action_spec
        self.num_columns = sum(envs.num_envs for envs in groups)
        is_whole = groups[0].autoreset is not AutoresetMode.SAME_STEP
        self.columns_per_message = groups[0].num_envs if is_whole else 1

    def __str__(self) -> str:
        return self.name if self.device == CPU else f"{self.name} on {self.device}"

    @property
    def num_streams(self) -> int:
        """How many messages are written side by side."""
        return self.num_columns // self.columns_per_message

    def build_sampler(
        self,
        schema: Schema,
        policy: ActingPolicy,
        rng: Any,
        *,
        buffers: BufferSource,
        newest: Newest,
        seed: int,
    ) -> Sampler:
        """A sampler over all of it, which closes it in its own `close`."""
        # A second group plays with the weights that the first one got.
        asks: list[Newest] = [newest, lambda: None]
        samplers = [
            build_sampler(schema, envs, policy, rng, buffers=buffers, newest=ask, seed=seed)
            for envs, ask in zip(self.groups, asks, strict=False)
        ]
        if len(samplers) == 1:
            return samplers[0]
        return AlternatingSampler(samplers, [cast(WorkerEnvs, envs) for envs in self.groups])

    def close(self) -> None:
        """Close all groups, then raise the fault of the first one that failed to."""
        faults = []
        for envs in self.groups:
            try:
                envs.close()
            except EnvError as error:
                faults.append(error)
        if faults:
            raise faults[0]


def close_quietly(owner: Setup | Sampler | Workers) -> None:
    """A fault in close must not hide why it is closed."""
    try:
        owner.close()
    except EnvError as error:
        logger.warning("%s", error)


def make_setup(
    sampler: SamplerName,
    actor: ActorSection,
    env: EnvSection,
    num_envs: int,
    policies: PoliciesSection = ONE_POLICY,
    look_up: LookUp = lambda: None,
) -> Setup:
    """The setup of a sampler by name; for `auto` that of `envs.make`, unmeasured.

    Raises:
        EnvError: the environment cannot be made so.
        MismatchError: this actor's own number of environments, or this host, does not fit.
    """
    device = pick_device(actor.device)
    if sampler == "auto":
        name, envs = build_usual(env, num_envs, policies)
        return Setup(name, [envs], device)
    if sampler not in WITH_WORKERS:
        return Setup(sampler, [build_envs(sampler, env, num_envs, policies)], device)
    num_workers = count_workers(sampler, actor.num_workers, num_envs)
    workers = Workers(sampler, env, num_envs, num_workers, policies, look_up)
    return Setup(
        sampler, workers.halves() if sampler == "alternating" else [workers.whole()], device
    )


def count_workers(sampler: SamplerName, wanted: int | None, num_envs: int) -> int:
    """As many as were asked for, or as there are cores and environments for."""
    if sampler == "alternating" and num_envs % 2:
        raise MismatchError(
            f"--num-envs: actor.sampler alternating steps two groups of one size, got {num_envs}: "
            "give it an even number"
        )
    if wanted is not None:
        if wanted > num_envs:
            raise MismatchError(
                f"--num-envs: actor.num_workers is {wanted}, and each steps at least one "
                f"environment, got {num_envs}: start more, or set fewer workers"
            )
        return wanted
    most = min(count_cores(), num_envs)
    return max(2, most - most % 2) if sampler == "alternating" else most


def pick_device(name: str) -> str:
    """The device that `actor.device` names, `auto` unmeasured; MismatchError when this host has no
    such one."""
    if name in ("auto", CPU):
        return CPU
    if int(name.partition(":")[2] or 0) >= (num_gpus := count_gpus()):
        raise MismatchError(
            f"actor.device: {name} is not on this machine, which has {num_gpus} GPUs that torch "
            "can use: set it to cpu or auto"
        )
    return name


def count_gpus() -> int:
    """How many torch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
