"""What an environment returns must be what its space and gymnasium promise, in every step."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from bench.probes import CountingVector
from impala_async.config.env import EnvSection
from impala_async.envs.agents import AgentEnvs
from impala_async.envs.batch import BOOL, FLOAT, as_numbers, spread_seed
from impala_async.envs.describe import try_steps
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.errors import EnvError
from tests.envs.test_agents import Lives

MANY = np.array([True, False])


def step(envs, num_steps=1):
    for _ in range(num_steps):
        envs.step({"": np.zeros(envs.num_envs, np.int32)})


# -------------------- rewards and flags


def test_a_reward_is_any_number_and_a_flag_any_truth():
    for value in (1.5, 3, True, np.float16(1.5), np.int8(3), np.array([2.5])):
        assert as_numbers(value, "reward", FLOAT) == value
    for value in (True, np.True_, 1, 1.0, np.array([True]), np.ones((), int)):
        assert as_numbers(value, "terminated", BOOL)
        assert not as_numbers(value * 0, "terminated", BOOL)
    assert as_numbers([1, 2.5], "rewards", FLOAT, 2).tolist() == [1, 2.5]
    assert as_numbers(MANY, "terminated", BOOL, 2) is MANY
    assert as_numbers([1, 0], "terminated", BOOL, 2).tolist() == [True, False]


def test_another_reward_or_flag_is_refused():
    number, truth, got = "wants a number", "wants True or False", r"got .+ \(\w+\)$"
    each = "for each of 2 columns"
    for dtype, num_columns, says, values in (
        (FLOAT, None, number, ("1.5", None, MANY, [1.0, 2.0], [[1], [2, 3]], 1j, {}, Box(0, 1))),
        (BOOL, None, truth, ("False", None, MANY, 2, np.nan, [], {})),
        (FLOAT, 2, f"{number} {each}", (np.float32(1), [1.0], ["1", "2"], [None, 1.0])),
        (BOOL, 2, f"{truth} {each}", (True, [True], ["True", "False"], [None, True], [2, 0])),
    ):
        for value in values:
            with pytest.raises(EnvError, match=rf"^x in step: {says}, {got}"):
                as_numbers(value, "x", dtype, num_columns)


def changed(result, at, value):
    return (*result[:at], value, *result[at + 1 :])


class Odd(gym.Env[Any, Any]):
    """Shows a sound observation; from a step of each episode on one value is another one.

    `place`: of that value in what a step returns.
    """

    action_space = Discrete(2)

    def __init__(self, space, sound, then, at=1, length=9, place=0):
        self.observation_space = space
        self._sound, self._then, self._at, self._length = sound, then, at, length
        self._place = place

    def reset(self, *, seed=None, options=None):
        self._age = 0
        return self._sound, {}

    def step(self, action):
        self._age += 1
        result = self._sound, 0.0, self._age == self._length, False, {}
        return result if self._age < self._at else changed(result, self._place, self._then)


class OddAgents(Lives):
    """The same as two agents, of whom only the second one gives the other value."""

    def __init__(self, space, *given, length=9, **more):
        super().__init__((length, length))
        self._obs_space, self._given = space, given
        self._odd = Odd(space, *given, length=length, **more)

    def observation_space(self, agent):
        return self._obs_space

    def reset(self, *args, **kwargs):
        self._odd.reset()
        return super().reset(*args, **kwargs)

    def step(self, actions):
        result, odd = super().step(actions), self._odd.step(None)
        if self._odd._age >= self._odd._at:
            place = self._odd._place
            if "agent_1" in result[place]:
                result[place]["agent_1"] = odd[place]
        return result

    def _show(self, agent):
        return self._given[0]


class OddVector(CountingVector):
    """The same for the second of two columns, or with one value for all of them."""

    def __init__(self, place, then, is_for_all=False):
        super().__init__(2, (99, 99))
        self._place, self._then, self._is_for_all, self._age = place, then, is_for_all, 0

    def step(self, actions):
        result = super().step(actions)
        self._age += 1
        if self._age < 3:
            return result
        both = self._then if self._is_for_all else [result[self._place][0], self._then]
        return changed(result, self._place, both)


NUMBERS = Box(-1, 1, (4,), np.float32)
PIXELS = Box(0, 255, (4,), np.uint8)
ZEROS, BLACK = np.zeros(4, np.float32), np.zeros(4, np.uint8)


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        *[(1, "reward", value) for value in ("1.5", None)],
        *[(place, "t", value) for place in (2, 3) for value in ("False", None, 3)],
    ],
)
def test_rewards_and_flags_are_looked_at_in_every_step(place, name, value):
    given = NUMBERS, ZEROS, value, 3
    for envs in (
        SerialEnvs([Odd(*given, place=place)], EnvSection(id="my:Env")),
        AgentEnvs([OddAgents(*given, place=place)], EnvSection(id="my:Env")),
        VectorEnvs(OddVector(place, value), EnvSection(id="my:Env")),
    ):
        envs.reset(0)
        step(envs, 2)
        with pytest.raises(EnvError, match=f"^my:Env: {name}.* in step: wants .*, got [^\n]*$"):
            step(envs)


@pytest.mark.parametrize("value", [np.ones(1, np.float32), 1.0])
def test_a_vector_gives_no_number_for_all_columns(value):
    for at in range(4):
        envs = VectorEnvs(OddVector(at, value, is_for_all=True))
        envs.reset(0)
        step(envs, 2)
        with pytest.raises(EnvError, match=r"in step: .* (shape|for each of 2 columns)"):
            step(envs)


def test_spread_seeds_leave_room_for_columns():
    seeds = [spread_seed(seed) for seed in range(500)]
    assert np.diff(np.sort(seeds)).min() > 4
    assert min(seeds) >= 0
    assert max(seeds) + 4096 < 2**31
    assert isinstance(seeds[0], int)


# -------------------- observations


def batch(kind, *args, **kwargs):
    if kind == "agents":
        return AgentEnvs([OddAgents(*args, **kwargs)])
    if kind == "serial":
        return SerialEnvs([Odd(*args, **kwargs) for _ in range(2)])
    mode = AutoresetMode.NEXT_STEP if kind == "next_step" else AutoresetMode.SAME_STEP
    return VectorEnvs(SyncVectorEnv([lambda: Odd(*args, **kwargs)] * 2, autoreset_mode=mode))


BROKEN = [
    (NUMBERS, ZEROS, np.ones(1, np.float32), r": observation in step: .* \(4,\), it has \(1,\)$"),
    (PIXELS, BLACK, np.full(4, 0.9), r": observation in step: .* promises uint8, it is float64$"),
    (Dict(a=NUMBERS), {"a": ZEROS}, {"b": ZEROS}, r": a in step: .* but it is not there$"),
]


@pytest.mark.parametrize(("space", "sound", "then", "says"), BROKEN)
@pytest.mark.parametrize("kind", ["serial", "agents"])
def test_shapes_and_dtypes_are_looked_at_in_every_step(kind, space, sound, then, says):
    envs = batch(kind, space, sound, then, at=4)
    envs.reset(0)
    step(envs, 3)
    with pytest.raises(EnvError, match=says):
        step(envs)
    with pytest.raises(EnvError, match=says):
        try_steps(batch(kind, space, sound, then))


def test_the_first_step_of_an_agent_that_comes_late_is_looked_at_too():
    env = OddAgents(NUMBERS, ZEROS, np.ones(1, np.float32), at=4)
    env._starts = (0, 3)
    envs = AgentEnvs([env])
    envs.reset(0)
    step(envs, 3)
    with pytest.raises(EnvError, match=r"it has \(1,\)"):
        step(envs)


CARDS = MultiDiscrete([[2, 3], [4, 5]], dtype=np.int16)
NO_CARDS = np.zeros((2, 2), np.int16)


@pytest.mark.parametrize("kind", ["serial", "agents", "next_step", "same_step"])
def test_what_fits_is_fine(kind):
    """A list, wider floats and narrower integers; the first and the last choice."""
    for space, sound, then in (
        (NUMBERS, ZEROS, [0.5, 0, 1, 0]),
        (NUMBERS, ZEROS, np.ones(4, np.float64)),
        (Box(-9, 9, (4,), np.int64), BLACK, np.ones(4, np.int8)),
        (Discrete(5), 0, np.int8(4)),
        (Discrete(5, start=-2), -2, 2),
        (CARDS, NO_CARDS, np.array([[1, 2], [3, 4]], np.int16)),
        (MultiDiscrete([255], dtype=np.uint8), np.zeros(1, np.uint8), np.full(1, 254, np.uint8)),
    ):
        try_steps(batch(kind, space, sound, then, length=4))


BEYOND = [
    (Discrete(5), 0, -1, "observation: the space promises 0 to 4, it is -1"),
    (Discrete(5, start=3), 3, 8, "observation: the space promises 3 to 7, it is 8"),
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
@pytest.mark.parametrize("kind", ["serial", "agents", "next_step", "same_step"])
def test_a_category_that_is_none_is_named_whenever_it_comes(kind, space, sound, then, says):
    # Also in the last observation of an episode.
    for length in (40, 99):
        envs = batch(kind, space, sound, then, at=40, length=length)
        envs.reset(0)
        step(envs, 39)
        with pytest.raises(EnvError) as caught:
            step(envs)
        assert str(caught.value).endswith(f": {says}")
    with pytest.raises(EnvError) as caught:
        batch(kind, space, then, sound).reset(0)
    assert str(caught.value).endswith(f": {says}")


def test_only_the_batched_final_observations_of_ended_columns_count():
    class Batched(SyncVectorEnv):
        def step(self, actions):
            *most, infos = super().step(actions)
            return *most, {"final_obs": np.array([4, 77])} if infos else {}

    kinds = [lambda: Odd(Discrete(5), 0, 1, length=2), lambda: Odd(Discrete(5), 0, 1)]
    envs = VectorEnvs(Batched(kinds, autoreset_mode=AutoresetMode.SAME_STEP))
    envs.reset(0)
    step(envs)
    ended = envs.step({"": np.zeros(2, np.int32)})
    assert ended.final_obs is not None
    assert ended.final_obs[""][0] == 4
