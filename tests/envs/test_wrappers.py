"""Atari as the papers preprocess it, and what shows the last action and reward."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple
from gymnasium.vector import SyncVectorEnv

from bench.probes import Counting, CountingVector
from impala_async.config.env import EnvSection
from impala_async.envs.agents import AgentEnvs
from impala_async.envs.describe import try_steps
from impala_async.envs.make import build_envs, is_atari, make_env
from impala_async.envs.vector import SerialEnvs, VectorEnvs, WithHistory
from impala_async.errors import EnvError
from impala_async.schema import ArraySpec
from tests.envs.test_agents import Lives

PONG = "ALE/Pong-v5"
STEADY = {"repeat_action_probability": 0.0}


def acts(*actions):
    return {"": np.array(actions, np.int32)}


def both_kinds(section, num_envs=1):
    serial = build_envs("serial", section, num_envs)
    vector = build_envs("auto", section, num_envs)
    assert isinstance(serial, SerialEnvs)
    assert isinstance(vector, VectorEnvs)
    assert serial.obs_spec == vector.obs_spec
    assert serial.action_spec == vector.action_spec
    return serial, vector


@pytest.fixture
def ale():
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")


def test_only_ales_own_entry_point_is_atari():
    assert not is_atari("CartPole-v1")
    assert not is_atari(Counting)


@pytest.mark.usefixtures("ale")
@pytest.mark.parametrize("env_id", [PONG, f"ale_py:{PONG}"])
def test_both_samplers_show_the_same_stacks_of_frames(env_id):
    for envs in both_kinds(EnvSection(id=env_id), 2):
        (leaf,) = envs.obs_spec.leaves
        assert (leaf.shape, leaf.dtype) == ((4, 84, 84), "uint8")
        first = envs.reset(0)[""]
        # The stack begins with nothing but the newest frame.
        assert not first[:, :3].any()
        assert first[:, 3].any()
        steps = [envs.step(acts(0, 0)) for _ in range(5)]
        assert steps[-1].obs[""][:, 0].any()
        envs.close()


@pytest.mark.usefixtures("ale")
def test_rewards_are_not_clipped():
    # Space Invaders pays up to 30 points.
    for envs in both_kinds(EnvSection(id="ALE/SpaceInvaders-v5", kwargs=STEADY), 2):
        envs.reset(0)
        rewards = np.stack([envs.step(acts(1, 1)).rewards.copy() for _ in range(250)])
        assert rewards.max() > 1
        assert rewards.max() == int(rewards.max())
        envs.close()


@pytest.mark.usefixtures("ale")
@pytest.mark.parametrize(("skip", "length"), [(4, 100), (8, 50)])
def test_an_episode_takes_as_many_frames_as_steps_times_the_skip(skip, length):
    kwargs = {"frameskip": skip, "max_num_frames_per_episode": 400, "noop_max": 0}
    for envs in both_kinds(EnvSection(id=PONG, kwargs=kwargs)):
        envs.reset(0)
        num_steps, step = 1, envs.step(acts(0))
        while not (step.truncated | step.terminated).any():
            num_steps, step = num_steps + 1, envs.step(acts(0))
        assert step.truncated.all(), "a limit is no end of a game"
        assert num_steps == pytest.approx(length, abs=2)
        envs.close()


@pytest.mark.usefixtures("ale")
@pytest.mark.parametrize(
    ("kwargs", "shape", "num_actions"),
    [
        (
            {"img_height": 40, "img_width": 50, "stack_num": 2, "full_action_space": True},
            (2, 40, 50),
            18,
        ),
        ({"grayscale": False, **STEADY}, (4, 84, 84, 3), 6),
    ],
)
def test_arguments_mean_the_same_to_both(kwargs, shape, num_actions):
    for envs in both_kinds(EnvSection(id=PONG, kwargs=kwargs)):
        (leaf,) = envs.obs_spec.leaves
        assert (leaf.shape, leaf.is_stack) == (shape, True)
        assert envs.action_spec.parts[0].choices == (num_actions,)
        assert envs.reset(0)[""].shape == (1, *shape)
        try_steps(envs)
        envs.close()


@pytest.mark.usefixtures("ale")
def test_without_preprocessing_or_in_wrappers_a_game_is_single():
    section = EnvSection(id=PONG, preprocess="off", kwargs={"obs_type": "ram"})
    envs = build_envs("auto", section, 1)
    assert isinstance(envs, SerialEnvs)
    assert envs.obs_spec.leaves[0].shape == (128,)
    envs.close()
    with pytest.raises(EnvError, match=r"vector code that preprocesses, and env\.preprocess is"):
        build_envs("vector", section, 1)
    envs = build_envs("auto", EnvSection(id=PONG, wrappers=("gymnasium.wrappers:Autoreset",)), 1)
    assert isinstance(envs, SerialEnvs)
    (leaf,) = envs.obs_spec.leaves
    assert (leaf.shape, leaf.is_stack) == ((4, 84, 84), False)
    envs.close()


@pytest.mark.usefixtures("ale")
def test_single_games_say_that_they_need_opencv(monkeypatch):
    monkeypatch.setattr("impala_async.envs.make.find_spec", lambda name: None)
    with pytest.raises(EnvError, match=r"impala-async\[atari\]', or set actor\.sampler to vector"):
        make_env(EnvSection(id=PONG))


# -------------------- the last action and reward


def with_both(envs):
    return WithHistory(envs, has_action=True, has_reward=True)


class Composite(gym.Env[Any, Any]):
    """A Dict observation, and an action of several parts; ends with its second step."""

    observation_space = Dict({"a": Box(0, 9, (1,)), "b": Discrete(3)})
    action_space = Tuple((Discrete(4, start=5), Box(-1, 1, (2,)), MultiDiscrete([2, 3])))

    def reset(self, *, seed=None, options=None):
        self.num_steps = 0
        return self._show(), {}

    def step(self, action):
        self.num_steps += 1
        return self._show(), -2.5, False, self.num_steps == 2, {}

    def _show(self):
        return {"a": np.full(1, self.num_steps, np.float32), "b": self.num_steps}


def test_they_are_leaves_like_any_other_of_the_unclipped_sample_and_the_index():
    envs = with_both(SerialEnvs([Composite()]))
    assert [leaf.name for leaf in envs.obs_spec.leaves][:2] == ["a", "b"]
    assert envs.obs_spec.leaves[2:] == (
        ArraySpec("last_action/0", (), "int32", (4,)),
        ArraySpec("last_action/1", (2,), "float32"),
        ArraySpec("last_action/2", (2,), "int32", (2, 3)),
        ArraySpec("last_reward", (), "float32"),
    )
    first = envs.reset(0)
    assert [first[name].tolist() for name in ("last_action/1", "last_reward")] == [[[0, 0]], [0]]
    given = {
        "0": np.array([3], np.int32),
        "1": np.array([[7.0, -0.5]], np.float32),
        "2": np.array([[1, 2]], np.int32),
    }
    obs = envs.step(given).obs
    assert {name: array.tolist() for name, array in obs.items()} == {
        "a": [[1.0]],
        "b": [1],
        "last_action/0": [3],
        "last_action/1": [[7.0, -0.5]],
        "last_action/2": [[1, 2]],
        "last_reward": [-2.5],
    }
    assert {name: array.dtype.name for name, array in obs.items()} == {
        leaf.name: leaf.dtype for leaf in envs.obs_spec.leaves
    }


@pytest.mark.parametrize("name", ["last_action", "last_reward"])
@pytest.mark.parametrize("env_id", ["bench.probes:Counting", "bench.probes:CountingVector"])
def test_the_settings_ask_for_them(env_id, name):
    envs = build_envs("auto", EnvSection(id=env_id, **{name: True}), 2)
    assert [leaf.name for leaf in envs.obs_spec.leaves] == ["", name]
    assert (envs.name, envs.num_envs) == (env_id, 2)
    envs.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda: SerialEnvs([Counting(2, column=0), Counting(3, column=1)]),
        lambda: VectorEnvs(CountingVector(2, (2, 3))),
        lambda: VectorEnvs(SyncVectorEnv([lambda: Counting(2), lambda: Counting(3, column=1)])),
    ],
    ids=["serial", "vector", "sync"],
)
def test_next_step_shows_them_in_the_final_row_and_not_in_the_first(make):
    envs = with_both(make())
    first = envs.reset(0)
    assert first["last_action"].tolist() == first["last_reward"].tolist() == [0, 0]
    rows = []
    for _ in range(5):
        obs = envs.step(acts(1, 1)).obs
        rows.append((*obs["last_action"].tolist(), *obs["last_reward"].tolist()))
    assert rows == [
        (1, 1, 11, 11),
        (1, 1, 12, 12),  # column 0 ended
        (0, 1, 0, 13),  # column 0 begins anew, column 1 ended
        (1, 0, 11, 0),
        (1, 1, 12, 11),
    ]


def test_same_step_shows_them_in_the_final_observation():
    envs = with_both(VectorEnvs(CountingVector(2, (2, 3), autoreset="SameStep")))
    envs.reset(0)
    assert envs.step(acts(1, 0)).final_obs is None
    step = envs.step(acts(1, 0))
    assert step.terminated.tolist() == [True, False]
    assert step.final_obs is not None
    assert step.final_obs[""][0].tolist() == [0, 0, 2]
    assert step.final_obs["last_action"][0] == 1
    assert step.final_obs["last_reward"][0] == 12
    assert step.obs[""].tolist() == [[0, 1, 0], [1, 0, 2]]
    assert step.obs["last_action"].tolist() == [0, 0]
    assert step.obs["last_reward"].tolist() == [0, 2]
    after = envs.step(acts(1, 1))
    assert after.obs["last_reward"].tolist() == [11, 0]
    assert after.final_obs is not None
    assert after.final_obs["last_reward"][1] == 13


def test_those_of_idle_agents_are_0():
    envs = with_both(AgentEnvs([Lives((1, 3))]))
    envs.reset(0)
    seen = []
    for _ in range(5):
        obs = envs.step(acts(1, 1)).obs
        seen.append((obs["last_action"].tolist(), obs["last_reward"].tolist()))
    assert seen == [
        ([1, 1], [11, 11]),  # what led to the final observation of the first
        ([0, 1], [0, 12]),
        ([0, 1], [0, 13]),
        ([0, 0], [0, 0]),
        ([1, 1], [11, 11]),
    ]


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_reset_in_the_midst_of_things_forgets_them(mode):
    envs = with_both(VectorEnvs(CountingVector(2, (1, 3), autoreset=mode)))
    envs.reset(0)
    assert envs.step(acts(1, 1)).terminated[0]
    first = envs.reset(0)
    assert first["last_action"].tolist() == first["last_reward"].tolist() == [0, 0]
    obs = envs.step(acts(0, 1)).obs
    assert obs["last_reward"][1] == 11
    assert obs["last_action"].tolist()[1] == 1
