from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple
from gymnasium.vector import SyncVectorEnv

from bench.probes import Counting, CountingVector
from impala_async.config.env import EnvSection
from impala_async.envs.history import WithHistory
from impala_async.envs.make import build_envs
from impala_async.envs.vector import EnvBatch, SerialEnvs, VectorEnvs
from impala_async.errors import EnvError
from impala_async.spec import ArraySpec

PROBES = "bench.probes"


def both(envs: EnvBatch) -> WithHistory:
    return WithHistory(envs, has_action=True, has_reward=True)


def acts(*actions: int) -> dict[str, Any]:
    return {"": np.array(actions, np.int32)}


class Composite(gym.Env[Any, Any]):
    """A Dict observation, and an action of several parts; ends with its second step."""

    observation_space = Dict({"a": Box(0, 9, (1,)), "b": Discrete(3)})
    action_space = Tuple((Discrete(4, start=5), Box(-1, 1, (2,)), MultiDiscrete([2, 3])))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.num_steps = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.num_steps += 1
        return self._show(), -2.5, False, self.num_steps == 2, {}

    def _show(self) -> dict[str, Any]:
        return {"a": np.full(1, self.num_steps, np.float32), "b": self.num_steps}


def test_they_are_leaves_like_any_other() -> None:
    envs = both(SerialEnvs([Composite()]))
    assert [leaf.name for leaf in envs.obs_spec.leaves][:2] == ["a", "b"]
    assert envs.obs_spec.leaves[2:] == (
        ArraySpec("last_action/0", (), "int32", (4,)),
        ArraySpec("last_action/1", (2,), "float32"),
        ArraySpec("last_action/2", (2,), "int32", (2, 3)),
        ArraySpec("last_reward", (), "float32"),
    )
    plain = SerialEnvs([Counting()])
    action = WithHistory(plain, has_action=True, has_reward=False)
    assert [leaf.name for leaf in action.obs_spec.leaves] == ["", "last_action"]
    reward = WithHistory(plain, has_action=False, has_reward=True)
    assert [leaf.name for leaf in reward.obs_spec.leaves] == ["", "last_reward"]
    assert reward.action_spec == plain.action_spec
    assert (reward.name, reward.num_envs) == (plain.name, 1)


def test_the_unclipped_sample_and_the_index_are_shown() -> None:
    envs = both(SerialEnvs([Composite()]))
    first = envs.reset(0)
    assert [first[name].tolist() for name in ("last_action/1", "last_reward")] == [[[0, 0]], [0]]
    given = {
        "0": np.array([3], np.int32),
        "1": np.array([[7.0, -0.5]], np.float32),
        "2": np.array([[1, 2]], np.int32),
    }
    obs = envs.step(given).obs
    assert obs["last_action/0"].tolist() == [3]
    assert obs["last_action/1"].tolist() == [[7.0, -0.5]]
    assert obs["last_action/2"].tolist() == [[1, 2]]
    assert obs["last_reward"].tolist() == [-2.5]
    assert obs["a"].tolist() == [[1.0]]
    assert {name: array.dtype.name for name, array in obs.items()} == {
        leaf.name: leaf.dtype for leaf in envs.obs_spec.leaves
    }


@pytest.mark.parametrize(
    "make",
    [
        lambda: SerialEnvs([Counting(2, column=0), Counting(3, column=1)]),
        lambda: VectorEnvs(CountingVector(2, (2, 3))),
        lambda: VectorEnvs(SyncVectorEnv([lambda: Counting(2), lambda: Counting(3, column=1)])),
    ],
    ids=["serial", "vector", "sync"],
)
def test_next_step_shows_them_in_the_final_row_and_not_in_the_first(make: Any) -> None:
    envs = both(make())
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


def test_same_step_shows_them_in_the_final_observation() -> None:
    envs = both(VectorEnvs(CountingVector(2, (2, 3), autoreset="SameStep")))
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


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_reset_in_the_midst_of_things_forgets_them(mode: str) -> None:
    envs = both(VectorEnvs(CountingVector(2, (1, 3), autoreset=mode)))
    envs.reset(0)
    assert envs.step(acts(1, 1)).terminated[0]
    first = envs.reset(0)
    assert first["last_action"].tolist() == first["last_reward"].tolist() == [0, 0]
    obs = envs.step(acts(0, 1)).obs
    assert obs["last_reward"][1] == 11
    assert obs["last_action"].tolist()[1] == 1


@pytest.mark.parametrize("name", ["last_action", "last_reward"])
def test_a_key_of_that_name_is_refused(name: str) -> None:
    class Taken(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = Dict({name: Box(0, 9, (3,)), "x": Discrete(2)})

    with pytest.raises(EnvError, match=rf"env\.{name}: the observation has a key of that name"):
        both(SerialEnvs([Taken()]))


def test_the_settings_ask_for_them() -> None:
    section = EnvSection(id=f"{PROBES}:Counting", last_action=True)
    assert [leaf.name for leaf in build_envs("auto", section, 2).obs_spec.leaves][1:] == [
        "last_action"
    ]
    section = EnvSection(id=f"{PROBES}:CountingVector", last_reward=True)
    envs = build_envs("auto", section, 2)
    assert [leaf.name for leaf in envs.obs_spec.leaves][1:] == ["last_reward"]
    envs.close()
