"""What an environment shows must be what its space promises, in steps as in resets."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from impala_async.envs.agents import AgentEnvs
from impala_async.envs.batch import EnvBatch
from impala_async.envs.describe import try_steps
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.errors import EnvError
from tests.envs.test_agents import Lives

BATCHES = ["serial", "agents", "next_step", "same_step"]


class Showing(gym.Env[Any, Any]):
    """Shows a sound observation, and from a step of each episode on another one."""

    action_space = Discrete(2)

    def __init__(
        self, space: Space[Any], sound: Any, then: Any, at: int = 1, length: int = 9
    ) -> None:
        self.observation_space = space
        self._sound, self._then, self._at, self._length = sound, then, at, length

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._age = 0
        return self._sound, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._age += 1
        shown = self._then if self._age >= self._at else self._sound
        return shown, 0.0, self._age == self._length, False, {}


class Together(Lives):
    """The same as two agents, of whom only the second one shows the other observation."""

    def __init__(
        self, space: Space[Any], sound: Any, then: Any, at: int = 1, length: int = 9
    ) -> None:
        super().__init__((length, length))
        self._obs_space, self._sound, self._then, self._at = space, sound, then, at

    def observation_space(self, agent: str) -> Space[Any]:
        return self._obs_space

    def _show(self, agent: str) -> Any:
        is_sound = agent == "agent_0" or self.num_steps < self._at
        return self._sound if is_sound else self._then


def batch(kind: str, *args: Any, **kwargs: Any) -> EnvBatch:
    if kind == "agents":
        return AgentEnvs([Together(*args, **kwargs)])
    if kind == "serial":
        return SerialEnvs([Showing(*args, **kwargs) for _ in range(2)])
    mode = AutoresetMode.NEXT_STEP if kind == "next_step" else AutoresetMode.SAME_STEP
    return VectorEnvs(SyncVectorEnv([lambda: Showing(*args, **kwargs)] * 2, autoreset_mode=mode))


def step(envs: EnvBatch, num_steps: int) -> None:
    for _ in range(num_steps):
        envs.step({"": np.zeros(envs.num_envs, np.int32)})


NUMBERS = Box(-1, 1, (4,), np.float32)
PIXELS = Box(0, 255, (4,), np.uint8)
ZEROS, BLACK = np.zeros(4, np.float32), np.zeros(4, np.uint8)
BROKEN = [
    (NUMBERS, ZEROS, np.ones(1, np.float32), r": observation in step: .* \(4,\), it has \(1,\)$"),
    (NUMBERS, ZEROS, np.float32(0.5), r"promises shape \(4,\), it has \(\)"),
    (PIXELS, BLACK, np.full(4, 0.9), r": observation in step: .* promises uint8, it is float64$"),
    (Discrete(5), 0, 1.5, r"promises int64, it is float64"),
    (Dict(a=NUMBERS), {"a": ZEROS}, {"b": ZEROS}, r": a in step: .* but it is not there$"),
    (Tuple((NUMBERS,)), (ZEROS,), (np.ones((4, 1)),), r": 0 in step: .*it has \(4, 1\)$"),
]


@pytest.mark.parametrize(("space", "sound", "then", "says"), BROKEN)
@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("kind", ["serial", "agents"])
def test_shapes_and_dtypes_are_looked_at_in_every_step(
    kind: str, at: int, space: Space[Any], sound: Any, then: Any, says: str
) -> None:
    envs = batch(kind, space, sound, then, at=at)
    envs.reset(0)
    step(envs, at - 1)
    with pytest.raises(EnvError, match=says):
        step(envs, 1)
    with pytest.raises(EnvError, match=says):
        try_steps(batch(kind, space, sound, then, at=at))


def test_the_first_step_of_an_agent_that_comes_late_is_looked_at_too() -> None:
    class Late(Together):
        def _show(self, agent: str) -> Any:
            return self._then if agent == "agent_1" and self.num_steps > 3 else self._sound

    env = Late(NUMBERS, ZEROS, np.ones(1, np.float32))
    env._starts = (0, 3)
    envs = AgentEnvs([env])
    envs.reset(0)
    step(envs, 3)
    with pytest.raises(EnvError, match=r"it has \(1,\)"):
        step(envs, 1)


@pytest.mark.parametrize("kind", ["serial", "agents"])
def test_what_a_batch_can_hold_without_a_loss_is_fine(kind: str) -> None:
    """A list, wider floats and narrower integers, as at a reset."""
    for space, sound, then in (
        (NUMBERS, ZEROS, [0.5, 0, 1, 0]),
        (NUMBERS, ZEROS, np.ones(4, np.float64)),
        (Box(-9, 9, (4,), np.int64), BLACK, np.ones(4, np.int8)),
        (Discrete(5), 0, np.int8(4)),
    ):
        try_steps(batch(kind, space, sound, then))


# -------------------- categories

CARDS = MultiDiscrete([[2, 3], [4, 5]], dtype=np.int16)
NO_CARDS = np.zeros((2, 2), np.int16)
BEYOND = [
    (Discrete(5), 0, 7, "observation: the space promises 0 to 4, it is 7"),
    (Discrete(5), 0, -1, "observation: the space promises 0 to 4, it is -1"),
    (Discrete(5, start=3), 3, 8, "observation: the space promises 3 to 7, it is 8"),
    (Discrete(5, start=3), 3, 2, "observation: the space promises 3 to 7, it is 2"),
    # An excess here would be the first choice of the next item.
    (
        CARDS,
        NO_CARDS,
        np.array([[1, 3], [0, 0]], np.int16),
        "observation at [0, 1]: the space promises 0 to 2, it is 3",
    ),
    (
        Dict(hand=MultiDiscrete([2, 3], start=[0, 1]), deck=NUMBERS),
        {"hand": np.array([0, 1]), "deck": ZEROS},
        {"hand": np.array([1, 4]), "deck": ZEROS},
        "hand at [1]: the space promises 1 to 3, it is 4",
    ),
]


@pytest.mark.parametrize(("space", "sound", "then", "says"), BEYOND)
@pytest.mark.parametrize("kind", BATCHES)
def test_a_category_that_is_none_is_named_whenever_it_comes(
    kind: str, space: Space[Any], sound: Any, then: Any, says: str
) -> None:
    envs = batch(kind, space, sound, then, at=40, length=99)
    envs.reset(0)
    step(envs, 39)
    with pytest.raises(EnvError) as caught:
        step(envs, 1)
    assert str(caught.value).endswith(f": {says}")
    with pytest.raises(EnvError) as caught:
        batch(kind, space, then, sound).reset(0)
    assert str(caught.value).endswith(f": {says}")
    with pytest.raises(EnvError) as caught:
        try_steps(batch(kind, space, sound, then, at=5))
    assert str(caught.value).endswith(f": {says}")


@pytest.mark.parametrize("kind", BATCHES)
def test_the_last_observation_of_an_episode_is_looked_at_too(kind: str) -> None:
    envs = batch(kind, Discrete(5), 0, 5, at=3, length=3)
    envs.reset(0)
    step(envs, 2)
    with pytest.raises(EnvError, match="promises 0 to 4, it is 5"):
        step(envs, 1)


def test_of_batched_final_observations_only_those_count_that_are_some() -> None:
    class Batched(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            *most, infos = super().step(actions)
            return *most, {"final_obs": np.array([4, 77])} if infos else {}

    def made(length: int) -> Showing:
        return Showing(Discrete(5), 0, 1, length=length)

    kinds = [lambda: made(2), lambda: made(9)]
    envs = VectorEnvs(Batched(kinds, autoreset_mode=AutoresetMode.SAME_STEP))
    envs.reset(0)
    step(envs, 1)
    ended = envs.step({"": np.zeros(2, np.int32)})
    assert ended.final_obs is not None
    assert ended.final_obs[""][0] == 4


@pytest.mark.parametrize("kind", BATCHES)
def test_the_first_and_the_last_choice_are_fine(kind: str) -> None:
    for space, sound, then in (
        (Discrete(5, start=-2), -2, 2),
        (CARDS, NO_CARDS, np.array([[1, 2], [3, 4]], np.int16)),
        (MultiDiscrete([255], dtype=np.uint8), np.zeros(1, np.uint8), np.full(1, 254, np.uint8)),
    ):
        try_steps(batch(kind, space, sound, then, length=4))
