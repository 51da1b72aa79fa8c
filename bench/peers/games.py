"""The two games as every peer plays them, preprocessed as ours are.

Imported in the peers' virtual environments, with gymnasium 0.29 as with 1.x.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

NUM_STACKED = 4
Frames = NDArray[np.uint8]


def make(game: str, *, is_stacked: bool = True) -> gym.Env[Any, Any]:
    """CartPole-v1, or Pong in frames of 84 x 84 with sticky actions, four of them as one image."""
    if game == "cartpole":
        return gym.make("CartPole-v1")
    from ale_py.env import AtariEnv

    raw = AtariEnv(
        game="pong",
        frameskip=1,
        repeat_action_probability=0.25,
        max_num_frames_per_episode=108_000,
    )
    frames = gym.wrappers.AtariPreprocessing(raw, noop_max=30, frame_skip=4, screen_size=84)
    return Stack(frames) if is_stacked else frames


class Stack(gym.Wrapper[Frames, int, Frames, int]):
    """The last four frames, channels first, zeros before the first."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = Box(0, 255, (NUM_STACKED, 84, 84), np.uint8)
        self._stack = np.zeros((NUM_STACKED, 84, 84), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Frames, dict[str, Any]]:
        frame, info = self.env.reset(seed=seed, options=options)
        self._stack = np.zeros_like(self._stack)
        return self._push(frame), info

    def step(self, action: int) -> tuple[Frames, Any, bool, bool, dict[str, Any]]:
        frame, reward, terminated, truncated, info = self.env.step(action)
        return self._push(frame), reward, terminated, truncated, info

    def _push(self, frame: Frames) -> Frames:
        # Always a new array: peers keep what they are given.
        self._stack = np.concatenate([self._stack[1:], frame[None]])
        return self._stack
