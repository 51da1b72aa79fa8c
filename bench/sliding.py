"""An environment of images that slide by one frame per step, where there is no Atari."""

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

Obs = NDArray[np.uint8]
NUM_FRAMES, STACK = 64, 4


class Sliding(gym.Env[Obs, np.int64]):
    """Shows four of 64 frames of noise; they mean nothing, and every 100th step ends an episode.

    A step sleeps for `step_s` seconds, as one does that waits for a simulator elsewhere.
    """

    def __init__(self, step_s: float = 0.0) -> None:
        self._step_s = step_s
        self.observation_space = Box(0, 255, (STACK, 84, 84), np.uint8)
        self.action_space = Discrete(6)
        self._frames = np.random.default_rng(0).integers(0, 256, (NUM_FRAMES, 84, 84), np.uint8)
        self._num_steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        super().reset(seed=seed)
        self._num_steps = 0
        return self._seen(), {}

    def step(self, action: np.int64) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        self._num_steps += 1
        if self._step_s:
            time.sleep(self._step_s)
        return self._seen(), float(action), self._num_steps == 100, False, {}

    def _seen(self) -> Obs:
        return self._frames[np.arange(self._num_steps, self._num_steps + STACK) % NUM_FRAMES]
