"""Gymnasium's environments as batches.

`SerialEnvs` steps single ones in turn; `VectorEnvs` speaks to any gymnasium VectorEnv. The arrays
that they return are the batch's, or the environment's own: good until the next `step` or `reset`,
and then overwritten.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from impala_async.envs.batch import (
    FLAGS,
    REWARDS,
    Actions,
    Obs,
    Step,
    as_flag,
    as_flags,
    as_reward,
    as_rewards,
    spread_seed,
)
from impala_async.envs.faults import RUNNING, Blame, close_all, env_name
from impala_async.envs.observations import ChoicesCheck, ObsRows, check_obs, flatten_obs
from impala_async.envs.spaces import USUAL, SpaceOptions, Spaces
from impala_async.errors import EnvError

SUPPORTED_MODES = (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)


class SerialEnvs:
    """Single environments, stepped one after the other; NEXT_STEP, done here."""

    autoreset = AutoresetMode.NEXT_STEP

    def __init__(
        self,
        envs: Sequence[gym.Env[Any, Any]],
        options: SpaceOptions = USUAL,
        name: str | None = None,
    ) -> None:
        first = envs[0]
        self.name = name or env_name(first)
        self._envs = list(envs)
        self.num_envs = num_envs = len(envs)
        self._stepping = Blame(self.name, "in step", num_envs)
        self._resetting = Blame(self.name, "in reset", num_envs)
        with Blame(self.name, "to say what its spaces are"):
            observed, acted = first.observation_space, first.action_space
        spaces = Spaces(observed, acted, options)
        self.obs_spec, self.action_spec = spaces.obs_spec, spaces.action_spec
        self._choices = ChoicesCheck(spaces.leaves)
        self._adapt = spaces.adapter().each
        self._rows = ObsRows(spaces.leaves, num_envs)
        self._obs = self._rows.arrays
        self._rewards = np.zeros(num_envs, np.float32)
        self._terminated = np.zeros(num_envs, np.bool_)
        self._truncated = np.zeros(num_envs, np.bool_)
        self._is_over = [False] * num_envs
        self._result = Step(self._obs, self._rewards, self._terminated, self._truncated)

    def reset(self, seed: int, first_env: int = 0) -> Obs:
        """Start all columns anew; column i gets the seed that SyncVectorEnv would give it."""
        first_seed = spread_seed(seed) + first_env
        self._stepping.first = self._resetting.first = first_env
        self._is_over = [False] * self.num_envs
        self._terminated.fill(False)
        self._truncated.fill(False)
        with self._resetting:
            for column in range(self.num_envs):
                RUNNING.place[0] = first_env + column + 1
                self._reset_column(column, first_seed + column)
            self._choices.check(self._obs)
        return self._obs

    def step(self, actions: Actions) -> Step:
        """Step every column, or reset it when its last step was the end of an episode."""
        rewards, is_over, write = self._rewards, self._is_over, self._rows.write
        place, first = RUNNING.place, self._stepping.first + 1
        with self._stepping:
            for column, action in enumerate(self._adapt(actions)):
                place[0] = first + column
                if is_over[column]:
                    self._reset_column(column, None)
                    rewards[column] = 0
                    is_over[column] = False
                    self._terminated[column] = self._truncated[column] = False
                    continue
                obs, reward, terminated, truncated, _ = self._envs[column].step(action)
                rewards[column] = reward if type(reward) in REWARDS else as_reward(reward)
                write(column, obs, " in step")
                if type(terminated) not in FLAGS:
                    terminated = as_flag(terminated, "terminated")
                if type(truncated) not in FLAGS:
                    truncated = as_flag(truncated, "truncated")
                if terminated or truncated:
                    is_over[column] = True
                    self._terminated[column] = terminated
                    self._truncated[column] = truncated
            self._choices.check(self._obs)
        return self._result

    def close(self) -> None:
        """Close every environment, also when one of them fails to."""
        close_all(self._envs, self.name)

    def _reset_column(self, column: int, seed: int | None) -> None:
        obs, _ = self._envs[column].reset(seed=seed)
        self._rows.write(column, obs)


class VectorEnvs:
    """A gymnasium VectorEnv that resets its own columns, NEXT_STEP or SAME_STEP."""

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        options: SpaceOptions = USUAL,
        name: str | None = None,
    ) -> None:
        self._env = env
        self.name = name or env_name(env)
        self.num_envs: int = env.num_envs
        self._stepping = Blame(self.name, "in step", self.num_envs)
        self._resetting = Blame(self.name, "in reset", self.num_envs)
        self.autoreset = _autoreset_mode(env)
        spaces = Spaces(env.single_observation_space, env.single_action_space, options)
        self.obs_spec, self.action_spec = spaces.obs_spec, spaces.action_spec
        self._leaves = spaces.leaves
        self._choices = ChoicesCheck(spaces.leaves)
        self._adapt = spaces.adapter().batch
        self._rewards = np.zeros(self.num_envs, np.float32)
        self._is_over = np.zeros(self.num_envs, np.bool_)
        self._num_over = 0
        self._final_obs = {
            leaf.spec.name: np.zeros((self.num_envs, *leaf.spec.shape), leaf.dtype)
            for leaf in self._leaves
        }

    def reset(self, seed: int, first_env: int = 0) -> Obs:
        """Start all columns anew, seeded as the environment itself deals seeds to columns."""
        self._stepping.first = self._resetting.first = first_env
        RUNNING.place[0] = 0
        with self._resetting:
            obs, _ = self._env.reset(seed=spread_seed(seed) + first_env)
            check_obs(self._leaves, obs, self.num_envs)
            flat_obs = flatten_obs(self._leaves, obs)
            self._choices.check(flat_obs)
        self._num_over = 0
        return flat_obs

    def step(self, actions: Actions) -> Step:
        """Step every column."""
        with self._stepping:
            obs, rewards, terminated, truncated, infos = self._env.step(self._adapt(actions))
            self._rewards[:] = as_rewards(rewards, self.num_envs)
            terminated = as_flags(terminated, "terminated", self.num_envs)
            truncated = as_flags(truncated, "truncated", self.num_envs)
            check_obs(self._leaves, obs, self.num_envs, " in step")
            flat_obs = flatten_obs(self._leaves, obs)
            self._choices.check(flat_obs)
            is_over = terminated | truncated
            num_over = int(np.count_nonzero(is_over))
        final_obs = None
        if self.autoreset is AutoresetMode.NEXT_STEP:
            if self._num_over and num_over:
                self._check_resets(is_over)
        elif num_over:
            final_obs = self._read_final_obs(infos, is_over)
        self._is_over, self._num_over = is_over, num_over
        return Step(flat_obs, self._rewards, terminated, truncated, final_obs)

    def close(self) -> None:
        """Close the environment."""
        close_all([self._env], self.name)

    def _check_resets(self, is_over: NDArray[np.bool_]) -> None:
        if (is_over & self._is_over).any():
            raise EnvError(
                f"{self.name} says {AutoresetMode.NEXT_STEP}, but ends an episode on the "
                "step after an end, which must only reset it"
            )

    def _read_final_obs(self, infos: dict[str, Any], is_over: NDArray[np.bool_]) -> Obs:
        """Final observations come as one per column (None elsewhere), or batched."""
        given: Any = infos.get("final_obs")
        is_per_column = isinstance(given, np.ndarray) and given.dtype == np.dtype(object)
        try:
            if is_per_column or isinstance(given, list | tuple):
                for column in np.flatnonzero(is_over):
                    check_obs(self._leaves, given[column])
                    for leaf in self._leaves:
                        self._final_obs[leaf.spec.name][column] = leaf.of(given[column])
                final_obs = self._final_obs
            else:
                check_obs(self._leaves, given, self.num_envs)
                final_obs = flatten_obs(self._leaves, given)
        except EnvError as error:
            raise EnvError(
                f"{self.name} says {AutoresetMode.SAME_STEP}, which needs "
                f"infos['final_obs'] of every column that ended: {error}"
            ) from error
        self._choices.check(final_obs, is_over)
        return final_obs


def _autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    given = env.metadata.get("autoreset_mode")
    try:
        mode = AutoresetMode(given)
    except ValueError:
        mode = None
    if mode in SUPPORTED_MODES:
        return mode
    found = "missing" if given is None else given
    raise EnvError(
        f"{env_name(env)}: metadata['autoreset_mode'] is {found}; set it to "
        f"{' or '.join(map(str, SUPPORTED_MODES))}, whichever the environment does"
    )
