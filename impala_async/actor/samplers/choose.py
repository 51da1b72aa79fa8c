"""`actor.sampler = "auto"` plays a few steps with each sampler that may win, and takes the best.

First in this process, with the environment's own vector code where it has some. How long that takes
says what others could do at best; those that do not promise enough are not even made. Rounds
are compared: to step all columns once, acting included.

Runs on: sampler thread
"""

import logging
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any, NamedTuple

from impala_async.actor.samplers.protocols import ActingPolicy, SamplerTimers
from impala_async.actor.samplers.setup import Setup, close_quietly, count_gpus, count_workers
from impala_async.actor.sending import MessageBuffer
from impala_async.actor.worker import LookUp
from impala_async.actor.workers import Workers, count_cores
from impala_async.config.actor import ActorSection
from impala_async.config.env import EnvSection
from impala_async.config.policies import PoliciesSection
from impala_async.envs.make import build_envs
from impala_async.errors import EnvError, MismatchError
from impala_async.schema import Schema

logger = logging.getLogger(__name__)

# A sampler must be faster by this much to be taken instead of a simpler one.
MARGIN = 0.9
# And must promise this much to be tried: environments are made anew for it.
PROMISE = 0.75
# The step of a worker costs so much besides that of its environments.
HAND_OVER_S = 30e-6
# A policy that acts within this has nothing to gain from a GPU.
QUICK_ACT_S = 1e-3
# Workers of steps that wait, which leave the cores to others. Each is a process.
MOST_WAITING = 32
# A setup is tried for so long; a round that takes longer is the only one.
BUDGET_S = 0.15
MAX_ROUNDS = 100
# Steps wait if the process computes for less than this share of their time.
WAIT_SHARE = 0.5


class Measured(NamedTuple):
    """Seconds of a round, how much of it environments and policy took, and whether the steps waited
    more than they computed."""

    round_s: float
    env_s: float
    act_s: float
    is_waiting: bool = False


class Play(NamedTuple):
    """All that is needed to try a setup, besides the setup."""

    schema: Schema
    make_player: Callable[[str], tuple[ActingPolicy, Any]]
    """On a device: a policy, and the generator that it acts with."""
    look_up: LookUp


def measure(setup: Setup, play: Play) -> Measured:
    """Play with a setup's environments, which a later reset starts anew."""
    buffers = Scrap(play.schema)
    policy, rng = play.make_player(setup.device)
    sampler = setup.build_sampler(
        play.schema, policy, rng, buffers=buffers, newest=lambda: None, seed=0
    )
    rounds: list[float] = []
    spent: list[SamplerTimers] = []
    ends_at = time.monotonic() + BUDGET_S
    # The first one warms up. It may be all there is time for; of two groups it is not whole.
    least = len(setup.groups)
    cpu_s, num_sleeps = time.process_time(), _count_sleeps()
    while len(rounds) < least or (len(rounds) <= MAX_ROUNDS and time.monotonic() < ends_at):
        play.look_up()
        before = time.perf_counter()
        for _ in setup.groups:
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


class Scrap:
    """Message buffers that nobody reads."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._free: list[MessageBuffer] = []

    def take(self, num_columns: int) -> MessageBuffer:
        return self._free.pop() if self._free else MessageBuffer(self._schema, num_columns)

    def give_back(self, buffer: MessageBuffer) -> None:
        self._free.append(buffer)


class Contest:
    """Holds the best setup so far, and closes those that lose; tells what was measured."""

    def __init__(self, usual: Setup, play: Play) -> None:
        self.best, self.best_s = usual, float("inf")
        self.told: list[str] = []
        self.play = play
        self.owner: Setup | Workers = usual

    def measure_first(self, may_move: bool) -> Measured:
        """The setup that there is, and where its policy may move, also on a GPU."""
        found = self._measure(self.best)
        self.best_s = found.round_s
        if may_move and found.act_s > QUICK_ACT_S and count_gpus():
            moved = Setup(self.best.name, self.best.groups, "cuda")
            there = self._measure(moved)
            if there.round_s < MARGIN * found.round_s:
                self.best, self.best_s, found = moved, there.round_s, there
        return found

    def enter(self, setups: Sequence[Setup], owner: Setup | Workers) -> None:
        """Measure setups over the same environments, which `owner` closes."""
        best, best_s = None, self.best_s
        with ExitStack() as losers:
            losers.callback(close_quietly, owner)
            for setup in setups:
                found = self._measure(setup)
                if found.round_s < MARGIN * best_s:
                    best, best_s = setup, found.round_s
            if best is not None:
                losers.pop_all()
                losers.callback(close_quietly, self.owner)
                self.best, self.best_s, self.owner = best, best_s, owner

    def could_win(self, name: str, at_best_s: float) -> bool:
        """Whether it is worth a try, if nothing stands in its way."""
        if at_best_s < PROMISE * self.best_s:
            return True
        self.told.append(f"{name} not tried, at best {1000 * at_best_s:.3g}")
        return False

    def _measure(self, setup: Setup) -> Measured:
        found = measure(setup, self.play)
        self.told.append(f"{setup} {1000 * found.round_s:.3g}")
        return found


def choose_setup(
    usual: Setup,
    actor: ActorSection,
    env: EnvSection,
    num_envs: int,
    policies: PoliciesSection,
    play: Play,
) -> Setup:
    """The setup with the shortest round, told in the log with what was measured.

    `usual` is the one in this process, and is closed here if another one is better.
    """
    contest = Contest(usual, play)
    with ExitStack() as on_failure:
        on_failure.callback(lambda: close_quietly(contest.owner))
        # A fault here is not the end: the sampler will meet it, and tells it as it does all others.
        with _is_optional("measuring"):
            _compare(contest, actor, env, num_envs, policies)
        on_failure.pop_all()
    logger.info(
        "actor.sampler auto takes %s; ms for a step of all %d columns: %s",
        contest.best,
        usual.num_columns,
        ", ".join(contest.told) or "not measured",
    )
    return contest.best


def _compare(
    contest: Contest,
    actor: ActorSection,
    env: EnvSection,
    num_envs: int,
    policies: PoliciesSection,
) -> None:
    found = contest.measure_first(may_move=actor.device == "auto")
    device = contest.best.device
    single_s, is_waiting = found.env_s / num_envs, found.is_waiting
    if contest.best.name == "vector":
        # Nothing is wrong with an environment that is only a vector.
        with _is_optional("serial", logging.INFO):
            alone = _try_serial(contest, env, num_envs, policies)
            single_s, is_waiting = alone.env_s, alone.is_waiting
    num_workers = count_workers("auto", actor.num_workers, num_envs)
    if is_waiting and actor.num_workers is None:
        num_workers = min(num_envs, max(num_workers, MOST_WAITING))
        contest.told.append(f"steps wait more than they compute, so {num_workers} workers")
    at_best_s = max(found.act_s, single_s * num_envs / num_workers) + num_workers * HAND_OVER_S
    if num_workers < 2 or (count_cores() < 2 and not is_waiting):
        contest.told.append("no workers for want of cores or environments")
    elif contest.could_win("workers", at_best_s):
        with _is_optional("workers"):
            workers = Workers(
                "parallel", env, num_envs, num_workers, policies, contest.play.look_up
            )
            setups = [Setup("parallel", [workers.whole()], device)]
            if workers.can_alternate:
                setups.append(Setup("alternating", workers.halves(), device))
            contest.enter(setups, workers)


def _try_serial(
    contest: Contest, env: EnvSection, num_envs: int, policies: PoliciesSection
) -> Measured:
    """One environment alone, and all of them if that promises enough."""
    device = contest.best.device
    alone = Setup("serial", [build_envs("serial", env, 1, policies)], device)
    try:
        found = measure(alone, contest.play)
    finally:
        alone.close()
    if contest.could_win("serial", found.env_s * num_envs):
        setup = Setup("serial", [build_envs("serial", env, num_envs, policies)], device)
        contest.enter([setup], setup)
    return found


@contextmanager
def _is_optional(what: str, level: int = logging.WARNING) -> Iterator[None]:
    """An environment that cannot be had, or not as the learner knows it, is no candidate."""
    try:
        yield
    except (EnvError, MismatchError) as error:
        logger.log(level, "actor.sampler auto leaves out %s: %s", what, error)
