"""Environments of `bench.digests`, for what no other one here shows: images, masks of several
actions, columns that reset within a step."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FrameStackObservation, TimeLimit
from numpy.typing import NDArray

Image = NDArray[np.uint8]
GRID = 11
POLE_STEPS = 50


class Catch(gym.Env[Image, np.int64]):
    """A dot falls; 1 if it lands on the paddle, which goes left, stays or goes right, else -1."""

    def __init__(self, scale: int = 1) -> None:
        self._scale = scale
        self.observation_space = Box(0, 255, (GRID * scale, GRID * scale), np.uint8)
        self.action_space = Discrete(3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Image, dict[str, Any]]:
        super().reset(seed=seed)
        self._row, self._paddle = 0, GRID // 2
        self._column = int(self.np_random.integers(GRID))
        return self._show(), {}

    def step(self, action: np.int64) -> tuple[Image, float, bool, bool, dict[str, Any]]:
        self._row += 1
        self._paddle = int(np.clip(self._paddle + action - 1, 0, GRID - 1))
        is_down = self._row == GRID - 1
        reward = (1.0 if self._column == self._paddle else -1.0) if is_down else 0.0
        return self._show(), reward, is_down, False, {}

    def _show(self) -> Image:
        grid = np.zeros((GRID, GRID), np.uint8)
        grid[-1, self._paddle] = 128
        grid[self._row, self._column] = 255
        return grid.repeat(self._scale, 0).repeat(self._scale, 1)


def stacked_catch(scale: int = 1) -> gym.Env[Any, Any]:
    """`Catch` that shows its last three images."""
    return FrameStackObservation(Catch(scale), 3)


class TwoDeals(gym.Env[dict[str, Any], NDArray[np.int64]]):
    """Two actions at once, of three and of four, some legal; 0.1 for each that is the lowest."""

    LENGTH = 10
    CHOICES = (3, 4)

    def __init__(self) -> None:
        num_choices = sum(self.CHOICES)
        self.action_space = MultiDiscrete(list(self.CHOICES))
        self.observation_space = Dict(
            {
                "light": Box(0.0, 1.0, (num_choices,), np.float32),
                "action_mask": Box(0, 1, (num_choices,), np.int8),
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self._num_steps = 0
        return self._deal(), {}

    def step(
        self, action: NDArray[np.int64]
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self._num_steps += 1
        for part, legal in zip(action, self._legal, strict=True):
            assert legal[part], f"action {part} is not legal, only {np.flatnonzero(legal)} are"
        are_lowest = [
            part == legal.argmax() for part, legal in zip(action, self._legal, strict=True)
        ]
        return self._deal(), 0.1 * sum(are_lowest), self._num_steps == self.LENGTH, False, {}

    def _deal(self) -> dict[str, Any]:
        self._legal = [self.np_random.random(choices) < 0.5 for choices in self.CHOICES]
        for legal in self._legal:
            legal[self.np_random.integers(len(legal))] = True
        mask = np.concatenate(self._legal)
        return {"light": mask.astype(np.float32), "action_mask": mask.astype(np.int8)}


def same_step_poles(num_envs: int) -> SyncVectorEnv:
    """CartPoles whose columns are reset by the step that ends them; short, so some are cut."""
    return SyncVectorEnv(
        [lambda: TimeLimit(CartPoleEnv(), POLE_STEPS) for _ in range(num_envs)],
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
