"""Play whole episodes: the environments and the policy of a run, and how each episode went."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from impala_async.config.run import RunConfig
from impala_async.envs.batch import EnvBatch, Step
from impala_async.envs.describe import check_numbers
from impala_async.envs.faults import tell_stderr
from impala_async.envs.make import build_envs
from impala_async.errors import EnvError
from impala_async.evaluation import MAX_STEPS, SEED
from impala_async.metrics.report import format_return
from impala_async.output import Wait
from impala_async.policy import AnyPolicy, build_policy, check_defaults, check_log_probs
from impala_async.schema import POLICY, Schema, recurrent_state

MOST_ENVS = 8


class Episode(NamedTuple):
    """The seed of its environments, the number of the policy that played it, and how it went."""

    seed: int
    policy: int
    total: float
    length: int


def columns_for(num_episodes: int) -> tuple[int, int]:
    """How many environments play so many episodes, or a few more, and how many each of them."""
    per_column = -(-num_episodes // MOST_ENVS)
    return -(-num_episodes // per_column), per_column


def build_players(config: RunConfig, num_envs: int) -> tuple[EnvBatch, AnyPolicy]:
    """Environments of a run and a new policy, which plays with the torch threads of an actor."""
    envs = build_envs(config.actor.sampler, config.env, num_envs, config.policies, has_spares=False)
    return envs, policy_for(config, envs)


def policy_for(config: RunConfig, envs: EnvBatch) -> AnyPolicy:
    """A new policy of a run, for such environments."""
    torch.set_num_threads(config.actor.threads)
    policies, rows = config.policies, config.trajectory.rows
    check_defaults(config.env.id)
    state = recurrent_state(config.model.core, config.model.core_size)
    schema = Schema(envs.obs_spec, envs.action_spec, rows, state, policies.names)
    return build_policy(schema, config.model, policies, seed=config.seed)


def play(
    policy: AnyPolicy,
    envs: EnvBatch,
    per_column: int,
    num_agents: int = 1,
    *,
    seed: int = SEED,
    is_sampled: bool = False,
    max_steps: int = MAX_STEPS,
    advice: str = "give it a time limit",
    look: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Episode]:
    """Play the same number of episodes in each column, so that short ones are not favoured. An
    agent, where an environment has several, may take part in fewer of its episodes, or in none.

    Actions are the likeliest, or sampled as actors do. `look` is called after the reset and after
    each step. EnvError with the `advice`: so many steps for each episode of a column did not
    suffice.
    """
    generator = torch.Generator().manual_seed(seed) if is_sampled else None
    obs, state = envs.reset(seed), policy.first_state(envs.num_envs)
    check_numbers(envs, obs)
    look()
    tally = _Tally(envs.num_envs, per_column, num_agents, seed)
    wait = Wait(tell_stderr, clock=clock)
    most = max_steps * per_column
    # Some environments have a row between two episodes in which they are only reset; the one behind
    # the last tells who of several agents did not play.
    for _ in range(most + per_column - (num_agents == 1)):
        wait.look(tally.describe)
        actions, log_probs, state = policy.act(obs, state, generator)
        check_log_probs(log_probs)
        step = envs.step(actions)
        check_numbers(envs, step.obs, step.rewards)
        look()
        obs = step.obs
        if tally.take(step, obs[POLICY] if len(policy.members) > 1 else None):
            return tally.played
        if (fresh := step.fresh) is not None:
            for part in state.values():
                part[fresh] = 0.0
    raise EnvError(f"{envs.name}: {tally.so_far} episodes ended within {most} steps: {advice}")


class _Tally:
    """The episodes that have ended, and how far the others are."""

    def __init__(self, num_columns: int, per_column: int, num_agents: int, seed: int) -> None:
        self.played = list[Episode]()
        self._seed, self._num_wanted = seed, num_columns * per_column
        self._totals, self._lengths = np.zeros(num_columns), np.zeros(num_columns, np.int64)
        # Episodes of each environment and agent, and resets of each environment.
        self._num_left = np.full((num_columns // num_agents, num_agents), per_column)
        self._num_resets_left = np.full(num_columns // num_agents, per_column)

    @property
    def so_far(self) -> str:
        return f"{len(self.played)} of {self._num_wanted}"

    def take(self, step: Step, players: NDArray[np.uint8] | None) -> bool:
        """Count a step of all columns; whether each has played its episodes."""
        self._totals += step.rewards
        self._lengths += 1 if step.idle is None else ~step.idle
        num_left = self._num_left.reshape(-1)
        for column in np.flatnonzero(step.ended & (num_left > 0)).tolist():
            player = 0 if players is None else int(players[column])
            total, length = float(self._totals[column]), int(self._lengths[column])
            self.played.append(Episode(self._seed, player, total, length))
            num_left[column] -= 1
        self._totals[step.ended], self._lengths[step.ended] = 0.0, 0
        if step.idle is not None and self._num_left.shape[1] > 1:
            # In the row of a reset nobody plays. An agent that was not in all episodes plays fewer.
            self._num_resets_left -= step.idle.reshape(self._num_left.shape).all(1)
            self._num_left[self._num_resets_left <= 0] = 0
        return not self._num_left.any()

    def describe(self, seconds: float) -> str:
        totals = [each.total for each in self.played]
        mean = format_return(sum(totals) / len(totals) if totals else None)
        return f"playing: {self.so_far} episodes after {seconds:.0f} s, mean return {mean}"
