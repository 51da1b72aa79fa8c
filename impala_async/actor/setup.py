"""How an actor samples: its environments, wherever they are stepped, and the policy's device.

Environments are made before anything is agreed with the learner, since the schema follows from it.

Runs on: sampler thread
"""

import logging
import os
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch
from gymnasium.vector import AutoresetMode

from impala_async.actor.workers import LookUp, WorkerEnvs
from impala_async.config.actor import ActorSection, SamplerName
from impala_async.config.env import EnvSection
from impala_async.config.policies import ONE_POLICY, PoliciesSection
from impala_async.envs.batch import EnvBatch
from impala_async.envs.make import build_envs, build_usual
from impala_async.errors import EnvError, MismatchError

logger = logging.getLogger(__name__)

CPU = "cpu"
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


class Setup(NamedTuple):
    """A sampler is built over this. The name is the one in the config."""

    name: SamplerName
    envs: EnvBatch
    device: str = CPU

    def __str__(self) -> str:
        return self.name if self.device == CPU else f"{self.name} on {self.device}"

    @property
    def columns_per_message(self) -> int:
        is_whole = self.envs.autoreset is not AutoresetMode.SAME_STEP
        return self.envs.num_envs if is_whole else 1


def close_quietly(envs: EnvBatch) -> None:
    """A fault in close must not hide why it is closed."""
    try:
        envs.close()
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
        return Setup(*build_usual(env, num_envs, policies), device)
    if sampler == "parallel":
        num_workers = count_workers(actor.num_workers, num_envs)
        return Setup(sampler, WorkerEnvs(env, num_envs, num_workers, policies, look_up), device)
    return Setup(sampler, build_envs(sampler, env, num_envs, policies), device)


def count_workers(wanted: int | None, num_envs: int) -> int:
    """As many as were asked for, or as there are cores and environments for."""
    if wanted is None:
        return min(count_cores(), num_envs)
    if wanted > num_envs:
        raise MismatchError(
            f"--num-envs: actor.num_workers is {wanted}, and each steps at least one "
            f"environment, got {num_envs}: start more, or set fewer workers"
        )
    return wanted


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


def count_cores() -> int:
    """How many this process may use: those of its affinity, and no more than its quota.

    At least one. A container's quota counts in whole cores; containers see theirs as the root.
    """
    try:
        lines = OWN_CGROUP.read_text().splitlines()
    except OSError:
        lines = []
    (own, *_) = [*(line[3:] for line in lines if line.startswith("0::")), "/"]
    found = [len(os.sched_getaffinity(0))]
    for group in (PurePosixPath(own), *PurePosixPath(own).parents):
        try:
            quota, period = (CGROUPS / str(group).lstrip("/") / "cpu.max").read_text().split()
            found.append(int(quota) // int(period))
        except (OSError, ValueError):
            continue  # there is no such file, or it says "max"
    return max(1, min(found))


def count_gpus() -> int:
    """How many torch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
