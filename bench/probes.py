"""Tiny environments whose optimum is known, each of which finds out one mistake.

Tests and benchmarks use them by name: `bench.probes:MatchObservation`. Observations are float32
vectors, actions are Discrete(2) unless said otherwise.
"""

import os
import time
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

Obs = NDArray[np.float32]
Transition = tuple[Obs, float, bool, bool, dict[str, Any]]
Ends = Literal["terminated", "truncated", "both"]


def _vector(*values: float) -> Obs:
    return np.array(values, np.float32)


class Probe(gym.Env[Obs, np.int64]):
    """Probes share spaces, and a reset that shows one number."""

    def __init__(self, num_obs: int = 1, num_actions: int = 2, start: int = 0) -> None:
        self.observation_space = Box(-np.inf, np.inf, (num_obs,), np.float32)
        self.action_space = Discrete(num_actions, start=start)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        super().reset(seed=seed)
        return self._first(), {}

    def _first(self) -> Obs:
        return _vector(0)


class ActionReward(Probe):
    """One step, the reward is the action's index: the return goes to `num_actions - 1`.

    Finds a policy gradient with a wrong sign. `start` moves the actions, as Discrete has it, and
    an action outside them is an error.
    """

    def __init__(self, num_actions: int = 2, start: int = 0) -> None:
        super().__init__(num_actions=num_actions, start=start)
        self._start = start

    def step(self, action: np.int64) -> Transition:
        if not self.action_space.contains(action):
            raise ValueError(f"action {action!r} is not in {self.action_space}")
        return _vector(0), float(action - self._start), True, False, {}


class MatchObservation(Probe):
    """One step, reward 1 for action 1 at observation 1 and for action 0 at -1: return 1.

    Finds actions that do not belong to their observations.
    """

    def _first(self) -> Obs:
        self._sign = 1.0 if self.np_random.random() < 0.5 else -1.0
        return _vector(self._sign)

    def step(self, action: np.int64) -> Transition:
        reward = float((action == 1) == (self._sign > 0))
        return _vector(0), reward, True, False, {}


class Endless(Probe):
    """Reward `1 - gamma` per step, cut after `length` steps; the observation never changes.

    When the cut is a truncation the value is 1; one that treats it as an end finds less. As a
    termination it is an end, and the mean value is below 1.
    """

    def __init__(self, gamma: float = 0.99, length: int = 7, ends: Ends = "truncated") -> None:
        super().__init__()
        self._reward = 1 - gamma
        self._length = length
        self._ends = ends

    def _first(self) -> Obs:
        self._step = 0
        return _vector(1)

    def step(self, action: np.int64) -> Transition:
        self._step += 1
        terminated, truncated = _flags(self._ends, self._step >= self._length)
        return _vector(1), self._reward, terminated, truncated, {}


class Counting(Probe):
    """Shows (column, episode, step), all from 0; the reward is the step's number from 1, plus 10
    for action 1.

    A seed begins the episodes anew. Every row can be told from every other, so it finds rows that
    were lost, doubled or swapped.
    """

    def __init__(self, length: int = 3, ends: Ends = "terminated", column: int = 0) -> None:
        super().__init__(num_obs=3)
        self._column = column
        self._length = length
        self._ends = ends
        self._episode = -1
        self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        if seed is not None:
            self._episode = -1
        return super().reset(seed=seed, options=options)

    def _first(self) -> Obs:
        self._episode += 1
        self._step = 0
        return _vector(self._column, self._episode, 0)

    def step(self, action: np.int64) -> Transition:
        self._step += 1
        terminated, truncated = _flags(self._ends, self._step >= self._length)
        reward = float(self._step + 10 * action)
        obs = _vector(self._column, self._episode, self._step)
        return obs, reward, terminated, truncated, {}


class Slow(Counting):
    """Takes `step_s` seconds per step."""

    def __init__(self, step_s: float = 0.01, length: int = 10) -> None:
        super().__init__(length)
        self._step_s = step_s

    def step(self, action: np.int64) -> Transition:
        time.sleep(self._step_s)
        return super().step(action)


class SlowReset(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole, each step of which takes `step_s` seconds more, and each reset `reset_s`."""

    def __init__(self, step_s: float = 0.001, reset_s: float = 0.02) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._step_s, self._reset_s = step_s, reset_s

    def reset(self, **how: Any) -> Any:
        time.sleep(self._reset_s)
        return super().reset(**how)

    def step(self, action: Any) -> Any:
        time.sleep(self._step_s)
        return super().step(action)


class Straggler(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole, each step of which takes `step_s` seconds more, and ten times as many in rank 1."""

    def __init__(self, step_s: float = 0.0004) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._step_s = step_s * (10 if os.environ.get("RANK") == "1" else 1)

    def step(self, action: Any) -> Any:
        time.sleep(self._step_s)
        return super().step(action)


class Burning(Counting):
    """Takes `step_s` seconds of a core per step, however many others want it."""

    def __init__(self, step_s: float = 0.001, length: int = 100) -> None:
        super().__init__(length)
        self._step_s = step_s

    def step(self, action: np.int64) -> Transition:
        ends_at = time.thread_time() + self._step_s
        while time.thread_time() < ends_at:
            pass
        return super().step(action)


class Failing(Counting):
    """Raises on the step after `after` steps of its life."""

    def __init__(self, after: int = 10, length: int = 3) -> None:
        super().__init__(length)
        self._num_left = after

    def step(self, action: np.int64) -> Transition:
        if self._num_left == 0:
            raise RuntimeError("this probe fails as it was told to")
        self._num_left -= 1
        return super().step(action)


class NotFinite(Counting):
    """Shows NaN from the step after `after` steps of its life on."""

    def __init__(self, after: int = 10, length: int = 3) -> None:
        super().__init__(length)
        self._num_left = after

    def step(self, action: np.int64) -> Transition:
        obs, reward, terminated, truncated, info = super().step(action)
        if self._num_left == 0:
            obs[:] = np.nan
        self._num_left = max(0, self._num_left - 1)
        return obs, reward, terminated, truncated, info


class CountingVector(VectorEnv[Obs, NDArray[np.int64], NDArray[Any]]):
    """`Counting` for several columns, with its own length each, in either autoreset mode.

    It returns the same arrays every time, as an environment may, so it also finds a reader that
    keeps them for too long.
    """

    def __init__(
        self,
        num_envs: int = 2,
        lengths: tuple[int, ...] = (3, 5),
        autoreset: str = "NextStep",
        ends: Ends = "terminated",
    ) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode(autoreset)}
        envs = [Counting(lengths[i % len(lengths)], ends, column=i) for i in range(num_envs)]
        self._envs = envs
        self.single_observation_space = envs[0].observation_space
        self.single_action_space = envs[0].action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._obs = np.zeros((num_envs, 3), np.float32)
        self._final_obs = np.zeros((num_envs, 3), np.float32)
        self._rewards = np.zeros(num_envs, np.float64)
        self._terminated = np.zeros(num_envs, np.bool_)
        self._truncated = np.zeros(num_envs, np.bool_)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        self._terminated[:] = self._truncated[:] = False
        for column, env in enumerate(self._envs):
            self._obs[column], _ = env.reset(seed=seed)
        return self._obs, {}

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Obs, NDArray[Any], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        is_same_step = self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        was_over = self._terminated | self._truncated
        for column, env in enumerate(self._envs):
            if was_over[column] and not is_same_step:
                self._obs[column], _ = env.reset()
                self._rewards[column] = 0
                self._terminated[column] = self._truncated[column] = False
            else:
                obs, reward, terminated, truncated, _ = env.step(actions[column])
                self._obs[column] = obs
                self._rewards[column] = reward
                self._terminated[column] = terminated
                self._truncated[column] = truncated
                if (terminated or truncated) and is_same_step:
                    self._final_obs[column] = obs
                    self._obs[column], _ = env.reset()
        infos = {"final_obs": self._final_obs} if is_same_step else {}
        return self._obs, self._rewards, self._terminated, self._truncated, infos


def _flags(ends: Ends, is_over: bool) -> tuple[bool, bool]:
    return is_over and ends != "truncated", is_over and ends != "terminated"
