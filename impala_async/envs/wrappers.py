"""Wrappers of our own: Atari's, and `WithHistory` around a whole batch, which shows the last action
and the last reward too.

Atari is preprocessed as the papers do it (DQN, with the sticky actions of Machado et al., 2018):
84 x 84 grey, the last four frames stacked, each action for four frames of which the last two are
merged, up to 30 no-ops at the start, whole games, rewards as they are. The vector code of ale_py
does the same by itself.
"""

from importlib.util import find_spec
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from impala_async.envs.batch import Actions, EnvBatch, Obs, Step
from impala_async.errors import EnvError
from impala_async.schema import ArraySpec, ObsSpec

# ale_py's vector code would do these by default, and they would falsify reported returns.
ATARI_VECTOR = {"reward_clipping": False, "use_fire_reset": False}
ATARI = {
    "frameskip": 4,
    "noop_max": 30,
    "img_height": 84,
    "img_width": 84,
    "grayscale": True,
    "stack_num": 4,
}
LAST_ACTION = "last_action"
LAST_REWARD = "last_reward"


def is_atari(spec: EnvSpec | None) -> bool:
    return spec is not None and spec.entry_point == "ale_py.env:AtariEnv"


def make_atari(gym_id: str, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    """A single Atari game, preprocessed; kwargs as those of ale_py's vector code."""
    if find_spec("cv2") is None:
        raise EnvError(
            f"{gym_id}: single Atari environments need OpenCV: pip install 'impala-async[atari]', "
            "or set actor.sampler to vector"
        )
    look = {key: kwargs.get(key, value) for key, value in ATARI.items()}
    rest = {key: value for key, value in kwargs.items() if key not in ATARI}
    game = gym.make(gym_id, **{"disable_env_checker": True, **rest, "frameskip": 1})
    screen = AtariPreprocessing(
        game,
        noop_max=look["noop_max"],
        frame_skip=look["frameskip"],
        screen_size=(look["img_width"], look["img_height"]),
        grayscale_obs=look["grayscale"],
    )
    return FrameStackObservation(screen, look["stack_num"], padding_type="zero")


class WithHistory:
    """A batch whose observations also hold the last action and the last reward.

    They are leaves like any other, so acting and learning see the same numbers. On an episode's
    first row they are 0.
    """

    def __init__(self, envs: EnvBatch, *, has_action: bool, has_reward: bool) -> None:
        self._envs = envs
        self.name = envs.name
        self.num_envs = envs.num_envs
        self.action_spec = envs.action_spec
        self.autoreset = envs.autoreset
        parts = envs.action_spec.parts if has_action else ()
        self._action_leaves = [_action_leaf(part.array, part.choices) for part in parts]
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
        added = self._added
        for leaf, part in zip(self._action_leaves, self.action_spec.parts, strict=False):
            added[leaf.name][...] = actions[part.name]
        if LAST_REWARD in added:
            added[LAST_REWARD][...] = step.rewards
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


def _action_leaf(part: ArraySpec, choices: tuple[int, ...]) -> ArraySpec:
    name = f"{LAST_ACTION}/{part.name}" if part.name else LAST_ACTION
    return ArraySpec(name, part.shape, part.dtype, choices)
