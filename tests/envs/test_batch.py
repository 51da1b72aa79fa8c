"""An environment must return what its space and gymnasium promise, in every step."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from bench.probes import CountingVector
from impala_async.config.env import EnvSection
from impala_async.envs.agents import AgentEnvs
from impala_async.envs.batch import BOOL, FLOAT, ObsRows, as_numbers
from impala_async.envs.describe import try_steps
from impala_async.envs.spaces import obs_leaves
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.errors import EnvError
from tests.envs.test_spaces import ALL, BOX, PLAIN

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
    return value if at is None else (*result[:at], value, *result[at + 1 :])


class Odd(gym.Env[Any, Any]):
    """Shows a sound observation; from a step of each episode on one value is another one.

    `place`: of that value in what a step returns; None: it is the whole of that.
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


class OddAgents:
    """Two agents, of whom only the second one gives the other value."""

    possible_agents = ("sound", "odd")

    def __init__(self, space, sound, then, at=1, length=9, **more):
        odd = Odd(space, sound, then, at, length, **more)
        self._envs = {"sound": Odd(space, sound, sound, at, length), "odd": odd}

    def observation_space(self, agent):
        return self._envs[agent].observation_space

    def action_space(self, agent):
        return Odd.action_space

    def reset(self, seed=None, options=None):
        self.agents = list(self._envs)
        return {agent: env.reset()[0] for agent, env in self._envs.items()}, {}

    def step(self, actions):
        given = {agent: env.step(None) for agent, env in self._envs.items()}
        self.agents = [] if given["sound"][2] else self.agents
        return *({agent: result[i] for agent, result in given.items()} for i in range(4)), {}


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


def refuses(envs, num_sound, says):
    """The step after so many sound ones is refused."""
    envs.reset(0)
    step(envs, num_sound)
    with pytest.raises(EnvError, match=says):
        step(envs)


def test_rewards_and_flags_are_looked_at_in_every_step():
    section = EnvSection(id="my:Env")
    for place, name, values in (
        (1, "reward", ("1.5", None)),
        (2, "terminated", ("False", None, 3)),
        (3, "truncated", ("False", None, 3)),
    ):
        for value in values:
            given = NUMBERS, ZEROS, value, 3
            for envs in (
                SerialEnvs([Odd(*given, place=place)], section),
                AgentEnvs([OddAgents(*given, place=place)], section),
                VectorEnvs(OddVector(place, value), section),
            ):
                refuses(envs, 2, rf"^my:Env: {name}s? in step: wants .*, got [^\n]*$")


def test_a_vector_gives_no_number_for_all_columns():
    for value in (np.ones(1, np.float32), 1.0):
        for place in range(4):
            envs = VectorEnvs(OddVector(place, value, is_for_all=True))
            refuses(envs, 2, r"in step: .* (shape|for each of 2 columns)")


# -------------------- observations


def batch(kind, *args, **kwargs):
    if kind == "agents":
        return AgentEnvs([OddAgents(*args, **kwargs)])
    if kind == "serial":
        return SerialEnvs([Odd(*args, **kwargs) for _ in range(2)])
    mode = AutoresetMode.NEXT_STEP if kind == "next_step" else AutoresetMode.SAME_STEP
    return VectorEnvs(SyncVectorEnv([lambda: Odd(*args, **kwargs)] * 2, autoreset_mode=mode))


def test_shapes_and_dtypes_are_looked_at_in_every_step():
    for kind in ("serial", "agents"):
        for space, sound, then, says in (
            (NUMBERS, ZEROS, np.ones(1, np.float32), r"observation in step: .* it has \(1,\)$"),
            (PIXELS, BLACK, np.full(4, 0.9), "observation in step: .* uint8, it is float64$"),
            (Dict(a=NUMBERS), {"a": ZEROS}, {"b": ZEROS}, "a in step: .* but it is not there$"),
        ):
            refuses(batch(kind, space, sound, then, at=4), 3, f": {says}")


CARDS = MultiDiscrete([[2, 3], [4, 5]], dtype=np.int16)
NO_CARDS = np.zeros((2, 2), np.int16)


KINDS = pytest.mark.parametrize("kind", ["serial", "agents", "next_step", "same_step"])


@KINDS
def test_what_fits_is_fine(kind):
    """A list, wider floats and narrower integers; the first and the last choice."""
    for space, sound, then in (
        (NUMBERS, ZEROS, [0.5, 0, 1, 0]),
        (NUMBERS, ZEROS, np.ones(4, np.float64)),
        (Box(-9, 9, (4,), np.int64), BLACK, np.ones(4, np.int8)),
        (Discrete(5), 0, np.int8(4)),
        (MultiBinary(2), np.zeros(2, np.int8), np.ones(2, np.int8)),
        (Discrete(5, start=-2), -2, 2),
        (CARDS, NO_CARDS, np.array([[1, 2], [3, 4]], np.int16)),
        (MultiDiscrete([255], dtype=np.uint8), np.zeros(1, np.uint8), np.full(1, 254, np.uint8)),
    ):
        try_steps(batch(kind, space, sound, then, length=4))


@pytest.mark.parametrize("kind", ["serial", "agents"])
def test_a_number_of_python_is_a_category_of_any_dtype(kind):
    for space in (Discrete(5, dtype=np.uint8), Discrete(5, start=1, dtype=np.uint8)):
        try_steps(batch(kind, space, np.uint8(1), 4, length=4))
        refuses(batch(kind, space, np.uint8(1), -1, at=4), 3, r"promises uint8, it has -[12]$")


HAND = Dict(hand=MultiDiscrete([2, 3], start=[0, 1]), deck=NUMBERS)


@KINDS
def test_a_category_that_is_none_is_named_whenever_it_comes(kind):
    for space, sound, then, says in (
        (Discrete(5), 0, -1, "observation: the space promises 0 to 4, it is -1"),
        (Discrete(5, start=3), 3, 8, "observation: the space promises 3 to 7, it is 8"),
        (Discrete(5, start=3, dtype=np.uint8), np.uint8(3), np.uint8(0),
         "observation: the space promises 3 to 7, it is 0"),
        (MultiBinary(2), np.zeros(2, np.int8), np.array([1, 7], np.int8),
         r"observation at \[1\]: the space promises 0 to 1, it is 7"),
        # An excess here would be the first choice of the next item.
        (CARDS, NO_CARDS, np.array([[1, 3], [0, 0]], np.int16),
         r"observation at \[0, 1\]: the space promises 0 to 2, it is 3"),
        (HAND, {"hand": np.array([0, 1]), "deck": ZEROS}, {"hand": np.array([1, 4]), "deck": ZEROS},
         r"hand at \[1\]: the space promises 1 to 3, it is 4"),
    ):  # fmt: skip
        # Also in the last observation of an episode.
        for length in (40, 99):
            refuses(batch(kind, space, sound, then, at=40, length=length), 39, f": {says}$")
        with pytest.raises(EnvError, match=f": {says}$"):
            batch(kind, space, then, sound).reset(0)


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
    assert ended.final_obs[""][0] == 4


# -------------------- rows of observations


def rows_of(space, num_rows=1):
    return ObsRows(obs_leaves(space), num_rows)


@pytest.mark.parametrize("space", [*(space for space, _ in PLAIN), ALL], ids=str)
def test_samples_come_out_in_the_shapes_and_dtypes_of_the_spec(space):
    space.seed(3)
    samples = [space.sample() for _ in range(5)]
    rows = rows_of(space, 5)
    for row, sample in enumerate(samples):
        rows.write(row, sample)
    empty = create_empty_array(space, 5, fn=np.zeros)
    flat = rows_of(space, 5).read(concatenate(space, samples, empty))
    leaves = obs_leaves(space)
    assert list(flat) == [leaf.spec.name for leaf in leaves]
    for leaf in leaves:
        array = flat[leaf.spec.name]
        assert (array.shape, array.dtype) == ((5, *leaf.spec.shape), leaf.spec.dtype)
        assert array.flags.writeable
        np.testing.assert_array_equal(array, rows.arrays[leaf.spec.name])
        if leaf.spec.choices:
            assert (array >= 0).all()
            assert (array < np.reshape(leaf.spec.choices, leaf.spec.shape)).all()


def test_a_batched_observation_is_copied_only_for_its_dtype_and_to_be_written():
    batched = batch_space(ALL, 3).sample()
    flat = rows_of(ALL, 3).read(batched)
    assert flat["box"] is batched["box"]
    assert flat["both/1/many"] is batched["both"][1]["many"]
    rows = rows_of(BOX, 2)
    values = np.arange(8.0).reshape(2, 4)
    assert rows.read(values)[""].dtype == np.float32
    frozen = values.astype(np.float32)
    frozen.flags.writeable = False
    assert rows.read(frozen)[""].flags.writeable
    np.testing.assert_array_equal(rows.read(frozen)[""], frozen)
    # Torch takes no negative stride, and words of frames none along their last axis.
    for odd in (values[:, ::-1], np.asfortranarray(values)):
        read = rows.read(odd.astype(np.float32, order="K"))[""]
        assert read.flags.c_contiguous
        np.testing.assert_array_equal(read, odd)
    with pytest.raises(EnvError, match=r"shape \(2, 4\)"):
        rows.read(np.zeros((3, 4), np.float32))
    rows.write(1, [0, 0.5, 1, 0])
    assert rows.arrays[""].tolist() == [[0, 0, 0, 0], [0, 0.5, 1, 0]]


def test_what_a_space_does_not_describe_is_refused():
    for space, obs, text in (
        (BOX, np.zeros(3, np.float32), r"shape \(4,\), it has \(3,\)"),
        (BOX, 0.5, r"it has \(\)"),
        (BOX, np.zeros((1, 4), np.float32), r"it has \(1, 4\)"),
        (BOX, [[0], [1, 2]], "it is ragged"),
        (BOX, torch.zeros(4, device="meta"), "it is no array: TypeError: can't convert meta dev"),
        (Box(0, 255, (4,), np.uint8), np.zeros(4, np.float32), "uint8, it is float32"),
        (ALL, {"box": np.zeros(4)}, "bits: .* not there"),
        (ALL, np.zeros(4), "not there"),
        (Discrete(3), 0.5, "int64, it is float64"),
        (Discrete(3, dtype=np.int8), 257, "promises int8, it has 257"),
        (Discrete(3, start=1), None, "not there"),
        (Discrete(3, start=1), "ab", "promises int64, it is <U2"),
        (Discrete(3, start=1), [[0], [1, 2]], "it is ragged"),
        (Box(-9, 9, (2,), np.int8), np.array([3, -300]), "promises int8, it has -300"),
        (Box(-9, 9, (2,), np.int8), [300, 3], "promises int8, it has 300"),
        (MultiDiscrete([2, 3], np.int8), np.array([257, 256]), "promises int8, it has 257"),
        (MultiDiscrete([2, 3]), [0], r"shape \(2,\), it has \(1,\)"),
        (Tuple((Discrete(2), BOX)), (1,), "1: .* not there"),
        (Tuple((Discrete(2), BOX)), 1, "0: .* not there"),
    ):
        with pytest.raises(EnvError, match=text):
            rows_of(space).write(0, obs)
    # Numbers of a larger dtype that fit are kept, and categories count from 0.
    for space, obs, kept in (
        (Box(-9, 9, (2,), np.int8), np.array([3, -4]), [3, -4]),
        (Box(-9, 9, (2,), np.int8), np.array([127, -128], np.int16), [127, -128]),
        (Discrete(3, start=-7), -6, 1),
        (Discrete(3, start=-7), np.int64(-5), 2),
        (MultiDiscrete([2, 3], start=[-1, 9]), np.array([0, 11]), [1, 2]),
    ):
        rows = rows_of(space)
        rows.write(0, obs)
        assert rows.arrays[""].tolist() == [kept]
