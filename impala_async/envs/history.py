"""A batch of environments whose observations also hold the last action and the last reward.

They are leaves like any other, so acting and learning see the same numbers. On an episode's
first row they are 0.
"""

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from impala_async.envs.actions import Actions
from impala_async.envs.vector import EnvBatch, Obs, Step
from impala_async.errors import EnvError
from impala_async.spec import ArraySpec, ObsSpec

LAST_ACTION = "last_action"
LAST_REWARD = "last_reward"


class WithHistory:
    """Wraps a batch; everything else is the batch's."""

    def __init__(self, envs: EnvBatch, *, has_action: bool, has_reward: bool) -> None:
        self._envs = envs
        self.name = envs.name
        self.num_envs = envs.num_envs
        self.action_spec = envs.action_spec
        self.autoreset = envs.autoreset
        leaves = [_action_leaf(part.array, part.choices) for part in envs.action_spec.parts]
        self._action_leaves = leaves if has_action else []
        reward = [ArraySpec(LAST_REWARD, (), "float32")] if has_reward else []
        added = (*self._action_leaves, *reward)
        taken = {leaf.name for leaf in envs.obs_spec.leaves} & {leaf.name for leaf in added}
        if taken:
            key = min(taken).partition("/")[0]
            raise EnvError(f"env.{key}: the observation has a key of that name already")
        self.obs_spec = ObsSpec((*envs.obs_spec.leaves, *added))
        self._added = {
            leaf.name: np.zeros((envs.num_envs, *leaf.shape), leaf.dtype) for leaf in added
        }
        self._was_over = np.zeros(envs.num_envs, np.bool_)

    def reset(self, seed: int, first_env: int = 0) -> Obs:
        obs = self._envs.reset(seed, first_env)
        self._was_over = np.zeros(self.num_envs, np.bool_)
        return {**obs, **{name: np.zeros_like(array) for name, array in self._added.items()}}

    def step(self, actions: Actions) -> Step:
        step = self._envs.step(actions)
        added = self._history(actions, step.rewards)
        is_over = step.terminated | step.truncated
        final_obs = None
        if self.autoreset is AutoresetMode.NEXT_STEP:
            is_first, self._was_over = self._was_over, is_over
            if step.idle is not None:
                is_first = is_first | step.idle
        else:
            is_first = is_over
            if step.final_obs is not None:
                final_obs = {**step.final_obs, **{k: v.copy() for k, v in added.items()}}
        for array in added.values():
            array[is_first] = 0
        return step._replace(obs={**step.obs, **added}, final_obs=final_obs)

    def close(self) -> None:
        self._envs.close()

    def _history(self, actions: Actions, rewards: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        added = self._added
        for leaf, part in zip(self._action_leaves, self.action_spec.parts, strict=False):
            added[leaf.name][...] = actions[part.name]
        if LAST_REWARD in added:
            added[LAST_REWARD][...] = rewards
        return added


def _action_leaf(part: ArraySpec, choices: tuple[int, ...]) -> ArraySpec:
    name = f"{LAST_ACTION}/{part.name}" if part.name else LAST_ACTION
    return ArraySpec(name, part.shape, part.dtype, choices)
