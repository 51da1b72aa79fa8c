"""Small environments that need one ability each: memory, masks, several actions, several inputs."""

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from gymnasium.wrappers import TimeLimit, TransformObservation
from numpy.typing import NDArray

Obs = NDArray[np.float32]
POLE_STEPS = 500
MILLION = 1_000_000
# CartPole's numbers mostly lie within these.
REACH = np.array([2.4, 3.0, 0.21, 3.0], np.float32)


def no_velocities() -> gym.Env[Any, Any]:
    """CartPole that shows positions only: without memory nobody balances it."""
    return TimeLimit(_Shown(CartPoleEnv(), [0, 2]), POLE_STEPS)


def slow_pole(step_s: float) -> gym.Env[Any, Any]:
    """CartPole whose steps wait, as those of a simulator do."""
    return TimeLimit(_Slow(CartPoleEnv(), step_s), POLE_STEPS)


def split_pole(withhold: bool = False) -> gym.Env[Any, Any]:
    """CartPole with the cart under one key and the pole under another, which may be withheld."""
    return TimeLimit(_Split(CartPoleEnv(), withhold), POLE_STEPS)


def pole_in_bytes() -> gym.Env[Any, Any]:
    """CartPole with each of its numbers as a byte, as decision 44 measures it."""
    space = Box(0, 255, (4,), np.uint8)
    return TransformObservation(gym.make("CartPole-v1"), _as_bytes, space)


def pole_in_int64() -> gym.Env[Any, Any]:
    """The same bytes, with a million more: their differences are all that they tell."""
    space = Box(0, 2 * MILLION, (4,), np.int64)
    return TransformObservation(
        gym.make("CartPole-v1"), lambda obs: _as_bytes(obs).astype(np.int64) + MILLION, space
    )


def as_flags(env_id: str) -> gym.Env[Any, Any]:
    """An environment of numbered states, each of which is a flag of its own."""
    env = gym.make(env_id)
    assert isinstance(env.observation_space, Discrete)
    flags = np.eye(int(env.observation_space.n), dtype=np.int8)
    space = MultiBinary(len(flags))
    return TransformObservation(env, lambda state: flags[int(state)].copy(), space)


def _as_bytes(obs: Obs) -> NDArray[np.uint8]:
    numbers: NDArray[Any] = np.clip((obs / REACH + 1) * 127.5, 0, 255)
    return numbers.astype(np.uint8)


class _Slow(gym.Wrapper[Obs, Any, Obs, Any]):
    def __init__(self, env: gym.Env[Obs, Any], step_s: float) -> None:
        super().__init__(env)
        self._step_s = step_s

    def step(self, action: Any) -> tuple[Obs, Any, bool, bool, dict[str, Any]]:
        time.sleep(self._step_s)
        return self.env.step(action)


class _Shown(gym.ObservationWrapper[Obs, Any, Obs]):
    def __init__(self, env: gym.Env[Obs, Any], indices: list[int]) -> None:
        super().__init__(env)
        self._indices = indices
        self.observation_space = Box(-np.inf, np.inf, (len(indices),), np.float32)

    def observation(self, observation: Obs) -> Obs:
        return observation[self._indices]


class _Split(gym.ObservationWrapper[dict[str, Obs], Any, Obs]):
    def __init__(self, env: gym.Env[Obs, Any], withhold: bool) -> None:
        super().__init__(env)
        self._withhold = withhold
        half = Box(-np.inf, np.inf, (2,), np.float32)
        shown: gym.Space[Any] = Dict({"cart": half, "pole": half})
        self.observation_space = shown

    def observation(self, observation: Obs) -> dict[str, Obs]:
        pole = np.zeros(2, np.float32) if self._withhold else observation[2:]
        return {"cart": observation[:2], "pole": pole}


class RepeatPrevious(gym.Env[Obs, np.int64]):
    """Shows one of four symbols; reward for naming the one shown `delay` steps ago.

    The return is the share of right answers.
    """

    def __init__(self, delay: int = 4, length: int = 40) -> None:
        self.observation_space = Box(0.0, 1.0, (4,), np.float32)
        self.action_space = Discrete(4)
        self._delay = delay
        self._length = length
        self._symbols: list[int] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        super().reset(seed=seed)
        self._symbols = []
        return self._show(), {}

    def step(self, action: np.int64) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        num_shown = len(self._symbols)
        is_right = num_shown > self._delay and action == self._symbols[-1 - self._delay]
        reward = 1.0 / (self._length - self._delay) if is_right else 0.0
        return self._show(), reward, num_shown >= self._length, False, {}

    def _show(self) -> Obs:
        self._symbols.append(int(self.np_random.integers(4)))
        shown = np.zeros(4, np.float32)
        shown[self._symbols[-1]] = 1.0
        return shown


class FewLegal(gym.Env[dict[str, Any], np.int64]):
    """Eight actions of which two are legal, another two at each step; one of those is right.

    The right one is the lower if the light is off, the higher if it is on. An illegal action ends
    the episode. The return is the share of right answers of ten.
    """

    LENGTH = 10

    def __init__(self, is_masked: bool = True) -> None:
        self.action_space = Discrete(8)
        # Under another name nobody takes it for a mask: the network does not get it either.
        self._key = "action_mask" if is_masked else None
        spaces: dict[str, gym.Space[Any]] = {"light": Box(0.0, 1.0, (1,), np.float32)}
        if self._key:
            spaces[self._key] = Box(0, 1, (8,), np.int8)
        self.observation_space = Dict(spaces)
        self.num_illegal = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self._num_steps = 0
        return self._deal(), {}

    def step(self, action: np.int64) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self._num_steps += 1
        if action not in self._legal:
            # A masked policy never gets here: the actor dies of it, and the run with it.
            if self._key:
                raise AssertionError(f"action {action} is not legal, only {self._legal} are")
            return self._deal(), 0.0, True, False, {}
        is_right = action == self._legal[self._is_on]
        is_over = self._num_steps == self.LENGTH
        return self._deal(), 0.1 * is_right, is_over, False, {}

    def _deal(self) -> dict[str, Any]:
        self._legal = sorted(self.np_random.choice(8, 2, replace=False).tolist())
        self._is_on = int(self.np_random.integers(2))
        obs: dict[str, Any] = {"light": np.array([self._is_on], np.float32)}
        if self._key:
            obs[self._key] = np.isin(np.arange(8), self._legal).astype(np.int8)
        return obs


class TwoPoles(gym.Env[Obs, NDArray[np.int64]]):
    """Two CartPoles at once, an action for each; over when either falls, a point per step."""

    def __init__(self) -> None:
        self._poles = (CartPoleEnv(), CartPoleEnv())
        self.observation_space = Box(-np.inf, np.inf, (8,), np.float32)
        self.action_space = MultiDiscrete([2, 2])
        self._num_steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        super().reset(seed=seed)
        self._num_steps = 0
        seeds = self.np_random.integers(2**31, size=2).tolist()
        both = [pole.reset(seed=s)[0] for pole, s in zip(self._poles, seeds, strict=True)]
        return np.concatenate(both), {}

    def step(self, action: NDArray[np.int64]) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        self._num_steps += 1
        poles: list[gym.Env[Any, Any]] = list(self._poles)
        steps = [pole.step(int(a)) for pole, a in zip(poles, action, strict=True)]
        has_fallen = any(step[2] for step in steps)
        obs = np.concatenate([step[0] for step in steps]).astype(np.float32)
        return obs, 1.0, has_fallen, self._num_steps >= POLE_STEPS, {}
