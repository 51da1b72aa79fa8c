"""Environments of other packages, each stepped with every sampler that fits it.

A package that is not installed skips its tests; pyproject.toml has an extra for each.
"""

import importlib
import warnings

import numpy as np
import pytest

from impala_async.config.env import EnvSection
from impala_async.envs.agents import AgentEnvs
from impala_async.envs.describe import random_actions
from impala_async.envs.make import build_envs
from impala_async.envs.vector import SerialEnvs
from impala_async.errors import EnvError

IMAGE_ALONE = ["minigrid.wrappers:ImgObsWrapper"]
WITHOUT_WORDS = [
    {
        "name": "gymnasium.wrappers:FilterObservation",
        "kwargs": {"filter_keys": ["image", "direction"]},
    }
]
# What must be installed, the settings, names and shapes of the observation's leaves.
CASES = [
    ("mujoco", {"id": "HalfCheetah-v5"}, {"": (17,)}),
    ("mujoco", {"id": "Hopper-v5", "squash_actions": True}, {"": (11,)}),
    ("Box2D", {"id": "LunarLander-v3"}, {"": (8,)}),
    ("Box2D", {"id": "LunarLander-v3", "kwargs": {"continuous": True}}, {"": (8,)}),
    ("Box2D", {"id": "BipedalWalker-v3"}, {"": (24,)}),
    ("minatar", {"id": "MinAtar/Breakout-v1"}, {"": (10, 10, 4)}),
    ("minatar", {"id": "minatar:MinAtar/SpaceInvaders-v1"}, {"": (10, 10, 6)}),
    (
        "minigrid",
        {"id": "minigrid:MiniGrid-Empty-5x5-v0", "wrappers": IMAGE_ALONE},
        {"": (7, 7, 3)},
    ),
    (
        "minigrid",
        {"id": "minigrid:MiniGrid-Empty-5x5-v0", "wrappers": WITHOUT_WORDS},
        {"direction": (), "image": (7, 7, 3)},
    ),
    ("mpe2", {"id": "mpe2.simple_spread_v3:parallel_env"}, {"": (18,)}),
    (
        "mpe2",
        {
            "id": "mpe2.simple_spread_v3:parallel_env",
            "kwargs": {"N": 2, "continuous_actions": True},
            "last_action": True,
        },
        {"": (12,), "last_action": (5,)},
    ),
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """MuJoCo writes its log into the current folder."""
    monkeypatch.chdir(tmp_path)


def need(package):
    with warnings.catch_warnings():
        # Box2D's module crashes the process where one of its import's warnings is an error.
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(package)
        except ImportError:
            pytest.skip(f"{package} is not installed")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("sampler", ["serial", "auto"])
@pytest.mark.parametrize(
    ("package", "settings", "leaves"), CASES, ids=[str(case[1]) for case in CASES]
)
def test_environments_of_other_packages(package, settings, leaves, sampler):
    need(package)
    envs = build_envs(sampler, EnvSection(**settings), 2)
    assert {leaf.name: leaf.shape for leaf in envs.obs_spec.leaves} == leaves
    obs = envs.reset(0)
    rng = np.random.default_rng(0)
    num_ends = 0
    for _ in range(150):
        step = envs.step(random_actions(envs.action_spec, {}, envs.num_envs, rng))
        for leaf in envs.obs_spec.leaves:
            assert step.obs[leaf.name].shape == (envs.num_envs, *leaf.shape)
            assert step.obs[leaf.name].dtype == obs[leaf.name].dtype == leaf.dtype
        assert np.isfinite(step.rewards).all()
        num_ends += int((step.terminated | step.truncated).sum())
    # A cheetah and a walker may go on for longer, and a grid for a hundred steps.
    assert num_ends > 0 or package in ("mujoco", "Box2D")
    envs.close()


@pytest.mark.parametrize(
    ("package", "env_id", "sampler", "says"),
    [
        ("minatar", "MinAtar/Breakout-v1", "vector", "no vector code of its own"),
        ("minigrid", "minigrid:MiniGrid-Empty-5x5-v0", "vector", "no vector code of its own"),
        # Its words.
        (
            "minigrid",
            "minigrid:MiniGrid-Empty-5x5-v0",
            "auto",
            r"at 'mission': .*leave it out",
        ),
        # Agents in turns, and of two kinds.
        ("mpe2", "mpe2.simple_spread_v3:env", "auto", "no parallel environment of PettingZoo"),
        (
            "mpe2",
            "mpe2.simple_adversary_v3:parallel_env",
            "auto",
            r"observation space of adversary_0 is Box\(-inf",
        ),
    ],
)
def test_what_does_not_fit_is_refused(package, env_id, sampler, says):
    need(package)
    with pytest.raises(EnvError, match=says):
        build_envs(sampler, EnvSection(id=env_id), 2)


def test_three_agents_spread_in_each_of_two_environments():
    need("mpe2")
    section = EnvSection(id="mpe2.simple_spread_v3:parallel_env", kwargs={"max_cycles": 5})
    envs = build_envs("auto", section, 2)
    assert isinstance(envs, AgentEnvs)
    assert envs.num_envs == 6
    first = envs.reset(4)[""].copy()
    assert len(np.unique(first, axis=0)) == 6
    rng = np.random.default_rng(0)
    ends = []
    for _ in range(12):
        step = envs.step(random_actions(envs.action_spec, {}, envs.num_envs, rng))
        assert step.idle is not None
        ends.append((int(step.truncated.sum()), int(step.idle.sum())))
    assert ends == [*[(0, 0)] * 4, (6, 0), (0, 6)] * 2
    np.testing.assert_array_equal(envs.reset(4)[""], first)
    envs.close()


def test_a_minatar_game_shows_bits():
    need("minatar")
    envs = build_envs("auto", EnvSection(id="MinAtar/Breakout-v1"), 2)
    assert isinstance(envs, SerialEnvs)
    assert envs.obs_spec.leaves[0].dtype == "bool"
    assert envs.reset(0)[""].any()
    envs.close()
