import warnings
from typing import Any

import numpy as np
import pytest

from impala_async.config.env import EnvSection
from impala_async.envs.make import build_envs
from impala_async.envs.pool import PoolVector
from impala_async.envs.vector import VectorEnvs
from impala_async.errors import EnvError

pytest.importorskip("envpool")


def build(task: str, num_envs: int = 3, **kwargs: Any) -> VectorEnvs:
    envs = build_envs("auto", EnvSection(id=f"envpool:{task}", kwargs=kwargs), num_envs)
    assert isinstance(envs, VectorEnvs)
    return envs


def test_a_pool_resets_on_the_step_after_an_end() -> None:
    envs = build("CartPole-v1")
    envs.reset(1)
    zeros = {"": np.zeros(3, np.int32)}
    was_over = np.zeros(3, np.bool_)
    num_ends = 0
    for _ in range(60):
        step = envs.step(zeros)
        assert step.rewards.tolist() == (~was_over).tolist()
        # A cart that was just reset stands near the middle, and never ends.
        assert np.abs(step.obs[""][was_over]).max(initial=0) <= 0.05
        is_over = step.terminated | step.truncated
        assert not (is_over & was_over).any()
        was_over = is_over
        num_ends += int(is_over.sum())
    assert num_ends > 5
    envs.close()


def test_equal_seeds_give_equal_pools_and_columns_differ() -> None:
    envs = build("CartPole-v1")
    first, again, other = (envs.reset(seed)[""].copy() for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert len(np.unique(np.concatenate([first, other]), axis=0)) == 6
    envs.close()


def test_a_limit_is_a_truncation() -> None:
    envs = build("CartPole-v1", max_episode_steps=2)
    envs.reset(0)
    steps = [envs.step({"": np.zeros(3, np.int32)}) for _ in range(2)]
    assert steps[1].truncated.all()
    assert not steps[1].terminated.any()
    envs.close()


@pytest.mark.parametrize("task", ["Pong-v5", "Pendulum-v1", "Taxi-v3", "FrozenLake-v1"])
def test_tasks_of_all_kinds_are_stepped(task: str) -> None:
    envs = build(task, 2)
    obs = envs.reset(0)
    for leaf in envs.obs_spec.leaves:
        assert obs[leaf.name].shape == (2, *leaf.shape)
    rng = np.random.default_rng(0)
    for _ in range(5):
        actions = {
            part.name: np.zeros((2, *part.shape), np.int32)
            if part.choices
            else rng.standard_normal((2, *part.shape)).astype(np.float32)
            for part in envs.action_spec.parts
        }
        step = envs.step(actions)
        assert np.isfinite(step.rewards).all()
        assert step.obs.keys() == obs.keys()
    envs.close()


def test_atari_of_a_pool_looks_like_that_of_ale() -> None:
    envs = build("Pong-v5", 1)
    assert (envs.obs_spec.leaves[0].shape, envs.obs_spec.leaves[0].dtype) == ((4, 84, 84), "uint8")
    envs.close()


@pytest.mark.parametrize(("task", "kwargs"), [("CartPoe-v1", {}), ("CartPole-v1", {"max_stps": 3})])
def test_a_wrong_name_or_argument_is_an_env_error(task: str, kwargs: dict[str, Any]) -> None:
    with pytest.raises(EnvError, match=f"envpool:{task} failed to be made") as caught:
        build(task, **kwargs)
    assert "\n" not in str(caught.value)


def test_pools_are_not_stepped_serially() -> None:
    with pytest.raises(EnvError, match="cannot be stepped serially"):
        build_envs("serial", EnvSection(id="envpool:CartPole-v1"), 2)


def test_spaces_are_known_before_any_pool_is_made() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = PoolVector("CartPole-v1", 2)
    assert env.observation_space.shape == (2, 4)
    assert env.action_space.shape == (2,)
    env.close()
