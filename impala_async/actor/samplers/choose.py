"""What `actor.sampler = "auto"` takes: it plays a few steps with each sampler that may win.

First in this process, with the environment's own vector code where it has some. How long that takes
says what others could do at best; those that do not promise enough are not even made.

Runs on: sampler thread
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from impala_async.actor.samplers.measure import Measured, Play, measure
from impala_async.actor.samplers.stage import Stage, count_gpus, count_workers
from impala_async.actor.workers import Workers, count_cores
from impala_async.config.actor import ActorSection
from impala_async.config.env import EnvSection
from impala_async.config.policies import PoliciesSection
from impala_async.envs.make import build_envs
from impala_async.errors import EnvError, MismatchError

logger = logging.getLogger(__name__)

# A sampler must be faster by this much to be taken instead of a simpler one.
MARGIN = 0.9
# And must promise this much to be tried: environments are made anew for it.
PROMISE = 0.75
# What the step of a worker costs besides that of its environments.
HAND_OVER_S = 30e-6
# A policy that acts within this has nothing to gain from a GPU.
QUICK_ACT_S = 1e-3
# Workers of steps that wait, which leave the cores to others. Each is a process.
MOST_WAITING = 32


class Contest:
    """Holds the best stage so far, and closes those that lose; tells what was measured."""

    def __init__(self, usual: Stage, play: Play) -> None:
        self.best, self.best_s = usual, float("inf")
        self.told: list[str] = []
        self.play = play
        self.close = usual.close

    def measure_first(self, may_move: bool) -> Measured:
        """The stage that there is, and where its policy may move, also on a GPU."""
        found = self._measure(self.best)
        self.best_s = found.round_s
        if may_move and found.act_s > QUICK_ACT_S and count_gpus():
            moved = Stage(self.best.name, self.best.groups, "cuda")
            there = self._measure(moved)
            if there.round_s < MARGIN * found.round_s:
                self.best, self.best_s, found = moved, there.round_s, there
        return found

    def enter(self, stages: Sequence[Stage], close: Callable[[], None]) -> None:
        """Measure stages over the same environments, which `close` ends."""
        best, best_s = None, self.best_s
        with ExitStack() as losers:
            losers.callback(_quietly, close)
            for stage in stages:
                found = self._measure(stage)
                if found.round_s < MARGIN * best_s:
                    best, best_s = stage, found.round_s
            if best is not None:
                losers.pop_all()
                losers.callback(_quietly, self.close)
                self.best, self.best_s, self.close = best, best_s, close

    def could_win(self, name: str, at_best_s: float) -> bool:
        """Whether it is worth a try, if nothing stands in its way."""
        if at_best_s < PROMISE * self.best_s:
            return True
        self.told.append(f"{name} not tried, at best {1000 * at_best_s:.3g}")
        return False

    def _measure(self, stage: Stage) -> Measured:
        found = measure(stage, self.play)
        self.told.append(f"{stage} {1000 * found.round_s:.3g}")
        return found


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
    contest = Contest(usual, play)
    with ExitStack() as on_failure:
        on_failure.callback(lambda: _quietly(contest.close))
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
            stages = [Stage("parallel", [workers.whole()], device)]
            if workers.can_alternate:
                stages.append(Stage("alternating", workers.halves(), device))
            contest.enter(stages, workers.close)


def _try_serial(
    contest: Contest, env: EnvSection, num_envs: int, policies: PoliciesSection
) -> Measured:
    """One environment alone, and all of them if that promises enough."""
    device = contest.best.device
    alone = Stage("serial", [build_envs("serial", env, 1, policies)], device)
    try:
        found = measure(alone, contest.play)
    finally:
        alone.close()
    if contest.could_win("serial", found.env_s * num_envs):
        stage = Stage("serial", [build_envs("serial", env, num_envs, policies)], device)
        contest.enter([stage], stage.close)
    return found


@contextmanager
def _is_optional(what: str, level: int = logging.WARNING) -> Iterator[None]:
    """What cannot be had, or looks other than the learner knows it, is no candidate."""
    try:
        yield
    except (EnvError, MismatchError) as error:
        logger.log(level, "actor.sampler auto leaves out %s: %s", what, error)


def _quietly(close: Callable[[], None]) -> None:
    try:
        close()
    except EnvError as error:
        logger.warning("%s", error)
