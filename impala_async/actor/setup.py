"""How an actor samples: its environments, wherever they are stepped, and the policy's device.

`actor.sampler = "auto"` plays a few steps with each setup that may win, and takes the best, and so
does `actor.num_envs = "auto"` with numbers of columns. Compared is what a round costs a column: to
step all of them once, acting included.

Runs on: sampler thread
"""

import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from gymnasium.vector import AutoresetMode

from impala_async.actor.sampler import sampler_for
from impala_async.actor.unroll import MessageBuffer, plan_buffers
from impala_async.actor.workers import LookUp, WorkerEnvs
from impala_async.config.actor import ActorSection, SamplerName
from impala_async.config.env import EnvSection
from impala_async.config.policies import ONE_POLICY, PoliciesSection
from impala_async.config.run import ActorSettings
from impala_async.envs.batch import EnvBatch
from impala_async.envs.make import build_envs, build_usual
from impala_async.errors import EnvError, MismatchError
from impala_async.metrics.host import count_cores
from impala_async.policy import AnyPolicy
from impala_async.schema import Schema

logger = logging.getLogger(__name__)

CPU = "cpu"

# A setup must be faster by this much to be taken instead of a simpler one.
MARGIN = 0.9
# Workers must promise this much to be tried: environments are made anew for them.
PROMISE = 0.75
# The step of a worker costs so much besides that of its environments.
HAND_OVER_S = 30e-6
# A policy that acts within this has nothing to gain from a GPU.
QUICK_ACT_S = 1e-3
# Workers of steps that wait, which leave the cores to others. Each is a process.
MOST_WAITING = 32
# Where the number of columns is not given it begins here, and is doubled while a round is short.
FIRST_COLUMNS = 8
SHORT_ROUND_S = 2e-3
# A setup is tried for so long; a round that takes longer is the only one.
BUDGET_S = 0.15
# Steps wait if the process computes for less than this share of their time.
WAIT_SHARE = 0.5


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
    actor: ActorSection,
    env: EnvSection,
    num_envs: int,
    policies: PoliciesSection = ONE_POLICY,
    look_up: LookUp = lambda: None,
    local: int = 0,
) -> Setup:
    """The setup of `actor.sampler`; for `auto` that of `envs.make`, unmeasured. EnvError if the
    environment cannot be made so, MismatchError if this host has no such device. `local` is the
    number of this actor among those of its host."""
    sampler, device = actor.sampler, pick_device(actor.device, local)
    if sampler == "auto":
        return Setup(*build_usual(env, num_envs, policies), device)
    if sampler == "parallel":
        num_workers = min(actor.num_workers or count_cores(), num_envs)
        return Setup(sampler, WorkerEnvs(env, num_envs, num_workers, policies, look_up), device)
    return Setup(sampler, build_envs(sampler, env, num_envs, policies), device)


def pick_device(name: str, local: int = 0) -> str:
    """The device that `actor.device` names, `auto` unmeasured; MismatchError if it is not here.
    Without a number, the actors of a host take its GPUs in turn."""
    if name in ("auto", CPU):
        return CPU
    if int(name.partition(":")[2] or 0) >= (num_gpus := count_gpus()):
        raise MismatchError(
            f"actor.device: {name} is not on this machine, which has {num_gpus} GPUs that torch "
            "can use: set it to cpu or auto"
        )
    return f"{name}:{local % num_gpus}" if name == "cuda" else name


def count_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class Measured(NamedTuple):
    """Seconds of a round, of its steps and of acting; whether steps wait more than they compute."""

    round_s: float
    env_s: float
    act_s: float
    is_waiting: bool = False


def measure(setup: Setup, schema: Schema, policy: AnyPolicy, look_up: LookUp) -> Measured:
    """Play with a setup's environments, which a later reset starts anew."""
    # Nobody reads the messages.
    free: list[MessageBuffer] = []
    width = setup.columns_per_message
    sampler = sampler_for(setup.envs)(
        schema,
        setup.envs,
        policy,
        policy.new_generator(),
        take_buffer=lambda: free.pop() if free else MessageBuffer(schema, width),
        newest=lambda: None,
        seed=0,
    )
    rounds: list[tuple[float, float, float]] = []
    ends_at = time.monotonic() + BUDGET_S
    cpu_s, num_sleeps = time.process_time(), _count_sleeps()
    # The first one warms up. It may be all there is time for.
    while not rounds or time.monotonic() < ends_at:
        look_up()
        before = time.perf_counter()
        free += [finished.buffer for finished in sampler.step()]
        round_s, (env_s, act_s, _) = time.perf_counter() - before, sampler.take_times()
        rounds.append((round_s, env_s, act_s))
    # A busy machine takes the processor away too, but then nothing here went to sleep.
    is_idle = time.process_time() - cpu_s < WAIT_SHARE * sum(env_s for _, env_s, _ in rounds)
    is_waiting = is_idle and _count_sleeps() - num_sleeps >= len(rounds)
    round_s, env_s, act_s = map(median, zip(*(rounds[1:] or rounds), strict=True))
    return Measured(round_s, env_s, act_s, is_waiting)


def _count_sleeps() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


@dataclass(eq=False)
class Trials:
    """The best setup of those that were tried, and what is told of each."""

    best: Setup
    """The usual one at first."""
    settings: ActorSettings
    schema: Schema
    make_policy: Callable[[str], AnyPolicy]
    look_up: LookUp
    most: int = 0
    """Where columns may become more, they are at most so many."""
    local: int = 0
    """The number of this actor among those of its host."""

    def __post_init__(self) -> None:
        self.opened, self.told = [self.best.envs], list[str]()
        self._found, self._growth = Measured(float("inf"), 0.0, 0.0), 1.0

    def choose(self, num_envs: int) -> Setup:
        """The setup whose columns cost least, told in the log with what was measured. The usual one
        is closed here if another is better."""
        is_chosen = False
        try:
            self.enter(self.best)
            if self.most:
                num_envs = self.widen(num_envs)
            if self.settings.actor.sampler == "auto":
                self.enter_others(num_envs)
            is_chosen = True
        except (EnvError, MismatchError, MemoryError) as error:
            # No policy can be built here, or the memory is short.
            if not isinstance(error, EnvError) and not self.told:
                raise
            # A fault of the setup that is taken is met again by the sampler, which tells it.
            logger.warning("no other setup is tried: %s", error)
            is_chosen = True
        finally:
            for envs in self.opened:
                if not is_chosen or envs is not self.best.envs:
                    close_quietly(envs)
        logger.info(
            "actor.sampler %s takes %s with %d columns; ms for a step of all columns: %s",
            *(self.settings.actor.sampler, self.best, self.best.envs.num_envs),
            ", ".join(self.told) or "not measured",
        )
        return self.best

    def enter(self, setup: Setup) -> bool:
        """Measure it; whether it is the best so far."""
        if (setup.envs.obs_spec, setup.envs.action_spec) != (self.schema.obs, self.schema.action):
            self.told.append(f"{setup} looks other")
            return False
        width = setup.columns_per_message
        plan_buffers(self.schema, width, setup.envs.num_envs // width)
        found = measure(setup, self.schema, self.make_policy(setup.device), self.look_up)
        num_columns, num_before = setup.envs.num_envs, self.best.envs.num_envs
        of = f" of {num_columns} columns" if self.most else ""
        self.told.append(f"{setup}{of} {1000 * found.round_s:.3g}")
        if found.round_s / num_columns >= MARGIN * self._found.round_s / num_before:
            return False
        self.best, self._found = setup, found
        return True

    def widen(self, num_envs: int) -> int:
        """Try ever more columns while they pay; how many there may be now."""
        settings, device, most = self.settings, self.best.device, self.most
        while num_envs < most and self._found.round_s < SHORT_ROUND_S:
            num_envs = min(2 * num_envs, most)
            of = settings.env, num_envs, settings.policies, self.look_up
            wider = make_setup(settings.actor, *of)
            self.opened.append(wider.envs)
            before = self.best.envs
            if not self.enter(wider._replace(device=device)):
                break
            self.opened.remove(before)
            close_quietly(before)
        num_best = self.best.envs.num_envs
        if not self._found.is_waiting:
            return num_best
        # Those that wait cost nothing but a process each.
        num_envs = max(num_best, min(most, MOST_WAITING))
        self._growth = num_envs / num_best
        return num_envs

    def enter_others(self, num_envs: int) -> None:
        """Try a GPU, and workers, where they may win."""
        actor, settings = self.settings.actor, self.settings
        if actor.device == "auto" and self._found.act_s > QUICK_ACT_S and count_gpus():
            self.enter(self.best._replace(device=pick_device("cuda", self.local)))
        round_s, env_s, act_s = (self._growth * seconds for seconds in self._found[:3])
        found = Measured(round_s, env_s, act_s, self._found.is_waiting)
        if num_workers := _count_worthwhile(found, actor, num_envs, self.told):
            of = settings.env, num_envs, num_workers, settings.policies, self.look_up
            self.opened.append(WorkerEnvs(*of))
            self.enter(Setup("parallel", self.opened[-1], self.best.device))


def _count_worthwhile(found: Measured, actor: ActorSection, num_envs: int, told: list[str]) -> int:
    """How many workers to try; 0, and in `told` why, if they could not win."""
    num_workers = min(actor.num_workers or count_cores(), num_envs)
    if found.is_waiting and actor.num_workers is None:
        num_workers = min(num_envs, max(num_workers, MOST_WAITING))
        told.append(f"steps wait more than they compute, so {num_workers} workers")
    if num_workers < 2 or (count_cores() < 2 and not found.is_waiting):
        told.append("no workers for want of cores or environments")
        return 0
    at_best_s = max(found.act_s, found.env_s / num_workers) + num_workers * HAND_OVER_S
    if at_best_s >= PROMISE * found.round_s:
        wants = f"and under {1000 * PROMISE * found.round_s:.3g} is worth a try"
        told.append(f"workers not tried, at best {1000 * at_best_s:.3g}, {wants}")
        return 0
    return num_workers
