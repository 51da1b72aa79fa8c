"""`actor.sampler = "auto"` plays a few steps with each setup that may win, and takes the best.

First in this process, which says what env workers could do at best: if that is not enough, they are
not even started. Rounds are compared: to step all columns once, acting included.

Runs on: sampler thread
"""

import logging
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any, NamedTuple

from impala_async.actor.sampler import sampler_for
from impala_async.actor.sending import MessageBuffer
from impala_async.actor.setup import Setup, close_quietly, count_cores, count_gpus, count_workers
from impala_async.actor.workers import LookUp, WorkerEnvs
from impala_async.config.actor import ActorSection
from impala_async.config.run import ActorSettings
from impala_async.errors import EnvError, MismatchError
from impala_async.policy import AnyPolicy
from impala_async.schema import Schema

logger = logging.getLogger(__name__)

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
# A setup is tried for so long; a round that takes longer is the only one.
BUDGET_S = 0.15
# Steps wait if the process computes for less than this share of their time.
WAIT_SHARE = 0.5


class Measured(NamedTuple):
    """Seconds of a round, of its steps and of acting; whether steps wait more than they compute."""

    round_s: float
    env_s: float
    act_s: float
    is_waiting: bool = False


class Play(NamedTuple):
    """All that is needed to try a setup, besides the setup."""

    schema: Schema
    make_player: Callable[[str], tuple[AnyPolicy, Any]]
    """On a device: a policy, and the generator that it acts with."""
    look_up: LookUp


def measure(setup: Setup, play: Play) -> Measured:
    """Play with a setup's environments, which a later reset starts anew."""
    # Nobody reads the messages.
    free: list[MessageBuffer] = []
    width = setup.columns_per_message
    policy, rng = play.make_player(setup.device)
    sampler = sampler_for(setup.envs)(
        play.schema,
        setup.envs,
        policy,
        rng,
        take_buffer=lambda: free.pop() if free else MessageBuffer(play.schema, width),
        newest=lambda: None,
        seed=0,
    )
    rounds: list[Measured] = []
    ends_at = time.monotonic() + BUDGET_S
    cpu_s, num_sleeps = time.process_time(), _count_sleeps()
    # The first one warms up. It may be all there is time for.
    while not rounds or time.monotonic() < ends_at:
        play.look_up()
        before = time.perf_counter()
        free += [finished.buffer for finished in sampler.step()]
        round_s, (env_s, act_s, _) = time.perf_counter() - before, sampler.take_times()
        rounds.append(Measured(round_s, env_s, act_s))
    # A busy machine takes the processor away too, but then nothing here went to sleep.
    is_idle = time.process_time() - cpu_s < WAIT_SHARE * sum(one.env_s for one in rounds)
    is_waiting = is_idle and _count_sleeps() - num_sleeps >= len(rounds)
    round_s, env_s, act_s, _ = map(median, zip(*(rounds[1:] or rounds), strict=True))
    return Measured(round_s, env_s, act_s, is_waiting)


def _count_sleeps() -> int:
    """How often this thread gave up its processor by itself."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class Contest:
    """Holds the best setup so far, closes those that lose, and notes what was measured."""

    def __init__(self, usual: Setup, play: Play) -> None:
        self.best, self.found = usual, Measured(float("inf"), 0.0, 0.0)
        self.told: list[str] = []
        self._play = play

    def enter(self, setup: Setup) -> None:
        """Measure a setup, which may be over the environments of the best one."""
        with ExitStack() as loser:
            if setup.envs is not self.best.envs:
                loser.callback(close_quietly, setup.envs)
            found = measure(setup, self._play)
            self.told.append(f"{setup} {1000 * found.round_s:.3g}")
            if found.round_s < MARGIN * self.found.round_s:
                loser.pop_all()
                if setup.envs is not self.best.envs:
                    close_quietly(self.best.envs)
                self.best, self.found = setup, found


def choose_setup(usual: Setup, settings: ActorSettings, num_envs: int, play: Play) -> Setup:
    """The setup with the shortest round, told in the log with what was measured.

    `usual` is the one in this process, and is closed here if another one is better.
    """
    contest = Contest(usual, play)
    with ExitStack() as on_failure:
        on_failure.callback(lambda: close_quietly(contest.best.envs))
        # A fault here is not the end: the sampler will meet it, and tells it as it does all others.
        with _is_optional("measuring"):
            contest.enter(usual)
            may_move = settings.actor.device == "auto" and contest.found.act_s > QUICK_ACT_S
            if may_move and count_gpus():
                contest.enter(usual._replace(device="cuda"))
            num_workers = _count_worthwhile(contest, settings.actor, num_envs)
            with _is_optional("workers"):
                if num_workers:
                    envs = WorkerEnvs(
                        settings.env, num_envs, num_workers, settings.policies, play.look_up
                    )
                    contest.enter(Setup("parallel", envs, contest.best.device))
        on_failure.pop_all()
    logger.info(
        "actor.sampler auto takes %s; ms for a step of all %d columns: %s",
        contest.best,
        usual.envs.num_envs,
        ", ".join(contest.told) or "not measured",
    )
    return contest.best


def _count_worthwhile(contest: Contest, actor: ActorSection, num_envs: int) -> int:
    """How many workers to try; 0 if they could not win."""
    found, told = contest.found, contest.told
    num_workers = count_workers(actor.num_workers, num_envs)
    if found.is_waiting and actor.num_workers is None:
        num_workers = min(num_envs, max(num_workers, MOST_WAITING))
        told.append(f"steps wait more than they compute, so {num_workers} workers")
    if num_workers < 2 or (count_cores() < 2 and not found.is_waiting):
        told.append("no workers for want of cores or environments")
        return 0
    at_best_s = max(found.act_s, found.env_s / num_workers) + num_workers * HAND_OVER_S
    if at_best_s >= PROMISE * found.round_s:
        told.append(f"workers not tried, at best {1000 * at_best_s:.3g}")
        return 0
    return num_workers


@contextmanager
def _is_optional(what: str) -> Iterator[None]:
    """An environment that cannot be had, or not as the learner knows it, is no candidate."""
    try:
        yield
    except (EnvError, MismatchError) as error:
        logger.warning("actor.sampler auto leaves out %s: %s", what, error)
