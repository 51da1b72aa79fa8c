"""What `actor.sampler = "auto"` takes: it plays a few steps with each sampler that may win.

First in this process, with the environment's own vector code where it has some. How long that takes
says what others could do at best; those that do not promise enough are not even made. In lockstep
nothing is measured, since a run must not depend on how busy a machine was.

Steps that wait, as for a simulator or a network, leave the cores to others meanwhile: there may be
a worker for each environment then, however few cores there are.

    a round is a step of all columns, acting included

Runs on: sampler thread
"""

import logging
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any, NamedTuple

from impala_async.actor.cores import count_cores
from impala_async.actor.crew import Crew
from impala_async.actor.samplers.protocols import ActingPolicy, SamplerTimers
from impala_async.actor.samplers.stage import CPU, Stage, count_workers, pick_device
from impala_async.actor.unroll import MessageBuffer
from impala_async.actor.worker import LookUp
from impala_async.config_actor import ActorSection
from impala_async.config_env import EnvSection
from impala_async.config_policies import PoliciesSection
from impala_async.envs.make import build_envs
from impala_async.errors import EnvError, MismatchError
from impala_async.spec import Schema

logger = logging.getLogger(__name__)

# Of each sampler; a round that takes longer is the only one.
BUDGET_S = 0.15
MAX_ROUNDS = 100
# A sampler must be faster by this much to be taken instead of a simpler one.
MARGIN = 0.9
# And must promise this much to be tried: environments are made anew for it.
PROMISE = 0.75
# What the step of a worker costs besides that of its environments.
HAND_OVER_S = 30e-6
# A policy that acts within this has nothing to gain from a GPU.
QUICK_ACT_S = 1e-3
# Steps wait if the process computes for less than this share of their time.
WAIT_SHARE = 0.5
# Each is a process with an interpreter of its own.
MOST_WAITING = 32


class Measured(NamedTuple):
    """Seconds of a round, how much of it environments and policy took, and whether the steps waited
    more than they computed."""

    round_s: float
    env_s: float
    act_s: float
    is_waiting: bool = False


class Play(NamedTuple):
    """What is needed to play a stage, besides the stage."""

    schema: Schema
    make_player: Callable[[str], tuple[ActingPolicy, Any]]
    """On a device: a policy, and the generator that it acts with."""
    look_up: LookUp


class Choice:
    """Measures stages and remembers the best; `close_others` closes all but the one chosen."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self._held: list[tuple[Callable[[], None], list[Stage]]] = []
        self.best: Stage | None = None
        self.best_s = float("inf")
        self.chosen: Stage | None = None
        self.told: list[str] = []

    def hold(self, close: Callable[[], None], stages: list[Stage]) -> None:
        """What closes these stages, which share their environments."""
        self._held.append((close, stages))

    def close_others(self) -> None:
        for close, stages in self._held:
            if self.chosen not in stages:
                try:
                    close()
                except EnvError as error:
                    logger.warning("%s", error)

    def try_out(self, stage: Stage) -> Measured:
        """Measure, and keep it if it is the best so far."""
        found = measure(stage, self.play)
        self.told.append(f"{stage.name} {1000 * found.round_s:.3g}")
        if found.round_s < MARGIN * self.best_s:
            self.best, self.best_s = stage, found.round_s
        return found

    def could_win(self, name: str, at_best_s: float) -> bool:
        """Whether it is worth a try, if nothing stands in its way."""
        if at_best_s < PROMISE * self.best_s:
            return True
        self.told.append(f"{name} not tried, at best {1000 * at_best_s:.3g}")
        return False


def measure(stage: Stage, play: Play) -> Measured:
    """Play with a stage's environments, which a later reset starts anew."""
    buffers = Scrap(play.schema)
    policy, rng = play.make_player(stage.device)
    sampler = stage.build_sampler(
        play.schema, policy, rng, buffers=buffers, newest=lambda: None, seed=0
    )
    rounds: list[float] = []
    spent: list[SamplerTimers] = []
    ends_at = time.monotonic() + BUDGET_S
    # The first one warms up. It may be all there is time for; of two groups it is not whole.
    least = len(stage.groups)
    cpu_s, num_sleeps = time.process_time(), _count_sleeps()
    while len(rounds) < least or (len(rounds) <= MAX_ROUNDS and time.monotonic() < ends_at):
        play.look_up()
        before = time.perf_counter()
        for _ in stage.groups:
            for finished in sampler.step():
                buffers.give_back(finished.buffer)
        rounds.append(time.perf_counter() - before)
        spent.append(sampler.timers.take())
    # A busy machine takes the processor away too, but then nothing here went to sleep.
    is_waiting = time.process_time() - cpu_s < WAIT_SHARE * sum(
        one.env_time_s for one in spent
    ) and _count_sleeps() - num_sleeps >= len(rounds)
    rounds, spent = rounds[1:] or rounds, spent[1:] or spent
    return Measured(
        median(rounds),
        median(one.env_time_s for one in spent),
        median(one.act_time_s for one in spent),
        is_waiting,
    )


def _count_sleeps() -> int:
    """How often this thread gave up its processor by itself."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def choose_stage(
    usual: Stage,
    actor: ActorSection,
    env: EnvSection,
    num_envs: int,
    policies: PoliciesSection,
    play: Play,
) -> Stage:
    """The stage with the shortest round, told in the log with what was measured.

    `usual` is the one in this process, and is closed here if another one is better.
    """
    choice = Choice(play)
    choice.hold(usual.close, [usual])
    with ExitStack() as stack:
        stack.callback(choice.close_others)
        choice.best = usual
        # A fault here is not the end: the sampler will meet it, and tells it as it does all others.
        with _is_optional("measuring"):
            _compare(choice, usual, actor, env, num_envs, policies)
        choice.chosen = choice.best
    logger.info(
        "actor.sampler auto takes %s; ms for a step of all %d columns: %s",
        choice.chosen.name,
        usual.num_columns,
        ", ".join(choice.told) or "not measured",
    )
    return choice.chosen


def _compare(
    choice: Choice,
    usual: Stage,
    actor: ActorSection,
    env: EnvSection,
    num_envs: int,
    policies: PoliciesSection,
) -> None:
    found = choice.try_out(usual)
    single_s, is_waiting = found.env_s / num_envs, found.is_waiting
    if usual.name == "vector" and (alone := _try_serial(choice, env, num_envs, policies)):
        single_s, is_waiting = alone.env_s, alone.is_waiting
    num_workers = count_workers("auto", actor.num_workers, num_envs)
    if is_waiting and actor.num_workers is None:
        num_workers = min(num_envs, max(num_workers, MOST_WAITING))
        choice.told.append(f"steps wait more than they compute, so {num_workers} workers")
    at_best_s = max(found.act_s, single_s * num_envs / num_workers) + num_workers * HAND_OVER_S
    if min(num_workers, num_workers if is_waiting else count_cores()) < 2:
        choice.told.append("no workers for want of cores or environments")
    elif choice.could_win("workers", at_best_s):
        best = choice.best, choice.best_s
        with _is_optional("workers"):
            crew = Crew("parallel", env, num_envs, num_workers, policies, choice.play.look_up)
            _try_workers(choice, crew, actor, found.act_s)
            return
        # A crew that failed once is not to be chosen for what it did before.
        choice.best, choice.best_s = best


def _try_serial(
    choice: Choice, env: EnvSection, num_envs: int, policies: PoliciesSection
) -> Measured | None:
    """One environment alone, where vector code is not all there is."""
    # Nothing is wrong with an environment that is only a vector.
    with _is_optional("serial", logging.INFO):
        alone = Stage("serial", [build_envs("serial", env, 1, policies)])
        try:
            found = measure(alone, choice.play)
        finally:
            alone.close()
        if choice.could_win("serial", found.env_s * num_envs):
            stage = Stage("serial", [build_envs("serial", env, num_envs, policies)])
            choice.hold(stage.close, [stage])
            choice.try_out(stage)
        return found
    return None


def _try_workers(choice: Choice, crew: Crew, actor: ActorSection, act_s: float) -> None:
    """The same workers serve all samplers that have some."""
    whole = [crew.whole()]
    stages = [Stage("parallel", whole)]
    choice.hold(crew.close, stages)
    if crew.can_alternate:
        stages.append(Stage("alternating", crew.halves()))
    device = pick_device(actor.device)
    if device != CPU and act_s > QUICK_ACT_S:
        stages.append(Stage("central", whole, device))
    for stage in stages:
        choice.try_out(stage)


@contextmanager
def _is_optional(what: str, level: int = logging.WARNING) -> Iterator[None]:
    """What cannot be had, or looks other than the learner knows it, is no candidate."""
    try:
        yield
    except (EnvError, MismatchError) as error:
        logger.log(level, "actor.sampler auto leaves out %s: %s", what, error)


class Scrap:
    """Message buffers that nobody reads."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._free: list[MessageBuffer] = []

    def take(self, num_columns: int) -> MessageBuffer:
        return self._free.pop() if self._free else MessageBuffer(self._schema, num_columns)

    def give_back(self, buffer: MessageBuffer) -> None:
        self._free.append(buffer)
