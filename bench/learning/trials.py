"""A trained policy is put to trials where its return in training says little: a score for a run.

In self-play the return says how far the policy is ahead of its copy, and a return that is negative
throughout has no floor that one would know without the random policy's. Both are measured here.
"""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from impala_async.envs.batch import EnvBatch, Obs
from impala_async.evaluation.play import build_players
from impala_async.policy import AnyPolicy
from impala_async.runs.folder import RunFolder
from impala_async.schema import POLICY
from impala_async.training.checkpoint import open_newest_or

NUM_ENVS = 64
GAMES_PER_COLUMN = 16
SEED = 10_000

Choose = Callable[[Obs], dict[str, NDArray[Any]]]


def return_at_the_end(run: Path) -> float | None:
    """The mean return of the last 100 episodes: what is left of it when all steps are trained."""
    mean: float | None = json.loads((run / "summary.json").read_text())["mean_return_100"]
    return mean


def unbeaten_by_random(run: Path) -> float:
    """The share of games that the first policy of a team does not lose to random legal actions.

    The lower one of playing its likeliest actions and of sampling them. Sides are dealt, and an
    action that is not legal ends the trial with a score of 0.
    """
    envs, policy = _load(run)
    learned = next(iter(policy.members.values()))
    shares = []
    with closing(envs):
        for choose in (_greedy(learned), _sampled(learned)):
            returns, num_illegal = _play_a_side(envs, choose)
            if num_illegal:
                return 0.0
            shares.append(float(np.mean(np.array(returns) >= 0)))
    return min(shares)


def saved_of_random(run: Path) -> float:
    """How much of what random actions lose the greedy policy saves: 0.3 is 30 % less negative."""
    envs, policy = _load(run)
    choices = envs.action_spec.parts[0].choices[0]
    rng = np.random.default_rng(SEED)

    def at_random(obs: Obs) -> dict[str, NDArray[Any]]:
        return {"": rng.integers(0, choices, envs.num_envs, np.int32)}

    with closing(envs):
        learned, random = (
            float(np.mean(_play(envs, choose))) for choose in (_greedy(policy), at_random)
        )
    return 1 - learned / random


def _load(run: Path) -> tuple[EnvBatch, AnyPolicy]:
    """Environments of a run, and what its newest checkpoint plays in them."""
    folder = RunFolder(run)
    envs, policy = build_players(folder.load_config(), NUM_ENVS)
    open_newest_or(None, folder.checkpoints).load_into(policy)
    return envs, policy


def _greedy(policy: AnyPolicy) -> Choose:
    return lambda obs: policy.act(obs, {}).actions


def _sampled(policy: AnyPolicy) -> Choose:
    generator = torch.Generator().manual_seed(SEED)
    return lambda obs: policy.act(obs, {}, generator).actions


def _play_a_side(envs: EnvBatch, choose: Choose) -> tuple[list[float], int]:
    """Returns of the first policy's side, and how many of its actions were not legal."""
    rng = np.random.default_rng(SEED)
    num_illegal = 0
    is_learned = np.ones(envs.num_envs, np.bool_)

    def both(obs: Obs) -> dict[str, NDArray[Any]]:
        nonlocal num_illegal
        legal = obs["action_mask"] > 0
        is_learned[:] = obs[POLICY] == 0
        actions = choose(obs)[""]
        # Where nothing is legal the game is over, and the action is for a reset.
        is_asked = is_learned & legal.any(-1)
        num_illegal += int((~legal[np.arange(len(legal)), actions] & is_asked).sum())
        at_random = np.where(legal, rng.random(legal.shape), -1).argmax(-1)
        return {"": np.where(is_learned, actions, at_random).astype(np.int32)}

    return _play(envs, both, is_counted=is_learned), num_illegal


def _play(
    envs: EnvBatch, choose: Choose, is_counted: NDArray[np.bool_] | None = None
) -> list[float]:
    """Returns of the columns that count when they end: as many of each, or short games would count
    for more than long ones.
    """
    obs = envs.reset(SEED)
    totals = np.zeros(envs.num_envs)
    returns: list[list[float]] = [[] for _ in range(envs.num_envs)]
    while min(map(len, returns)) < GAMES_PER_COLUMN:
        step = envs.step(choose(obs))
        obs = step.obs
        totals += step.rewards
        is_over = step.terminated | step.truncated
        counts = is_over if is_counted is None else is_over & is_counted
        for column in np.flatnonzero(counts).tolist():
            returns[column].append(float(totals[column]))
        totals[is_over] = 0
    return [total for column in returns for total in column[:GAMES_PER_COLUMN]]
