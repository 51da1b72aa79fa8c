"""Environments of other packages, each stepped with every sampler that fits it.

A package that is not installed skips its tests; pyproject.toml has an extra for each.
"""

import warnings

import numpy as np
import pytest

from impala_async.config.env import EnvSection
from impala_async.envs.describe import random_actions, try_steps
from impala_async.envs.make import build_envs, make_env
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.errors import EnvError

GRID = "minigrid:MiniGrid-Empty-5x5-v0"
SPREAD = "mpe2.simple_spread_v3:parallel_env"
WITHOUT_WORDS = {
    "name": "gymnasium.wrappers:FilterObservation",
    "kwargs": {"filter_keys": ["image", "direction"]},
}
# The package to be installed, the settings, names and shapes of the observation's leaves.
CASES = [
    ("mujoco", {"id": "HalfCheetah-v5"}, {"": (17,)}),
    ("mujoco", {"id": "Hopper-v5", "squash_actions": True}, {"": (11,)}),
    ("Box2D", {"id": "LunarLander-v3"}, {"": (8,)}),
    ("Box2D", {"id": "LunarLander-v3", "kwargs": {"continuous": True}}, {"": (8,)}),
    ("Box2D", {"id": "BipedalWalker-v3"}, {"": (24,)}),
    ("minatar", {"id": "MinAtar/Breakout-v1"}, {"": (10, 10, 4)}),
    ("minatar", {"id": "minatar:MinAtar/SpaceInvaders-v1"}, {"": (10, 10, 6)}),
    ("minigrid", {"id": GRID, "wrappers": ["minigrid.wrappers:ImgObsWrapper"]}, {"": (7, 7, 3)}),
    ("minigrid", {"id": GRID, "wrappers": [WITHOUT_WORDS]}, {"direction": (), "image": (7, 7, 3)}),
    ("popgym", {"id": "popgym:popgym-CountRecallEasy-v0"}, {"": (2,)}),
    ("mpe2", {"id": SPREAD}, {"": (18,)}),
    (
        "mpe2",
        {"id": SPREAD, "kwargs": {"N": 2, "continuous_actions": True}, "last_action": True},
        {"": (12,), "last_action": (5,)},
    ),
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """MuJoCo writes its log into the current folder."""
    monkeypatch.chdir(tmp_path)


def need(*packages):
    for package in packages:
        with warnings.catch_warnings():
            # Box2D's module crashes the process where one of its import's warnings is an error.
            warnings.simplefilter("ignore")
            pytest.importorskip(package)


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
        num_ends += int(step.ended.sum())
    # A cheetah and a walker may go on for longer, and a grid for a hundred steps.
    assert num_ends > 0 or package in ("mujoco", "Box2D")
    envs.close()


@pytest.mark.parametrize(
    ("package", "env_id", "sampler", "says"),
    [
        ("minatar", "MinAtar/Breakout-v1", "vector", "no vector code of its own"),
        ("minigrid", GRID, "vector", "no vector code of its own"),
        # Its words.
        ("minigrid", GRID, "auto", r"at 'mission': .*leave it out"),
        # Agents in turns, and of two kinds.
        ("mpe2", "mpe2.simple_spread_v3:env", "auto", "no parallel environment of PettingZoo"),
        ("mpe2", "mpe2.simple_adversary_v3:parallel_env", "auto", "space of adversary_0 is Box"),
    ],
)
def test_what_does_not_fit_is_refused(package, env_id, sampler, says):
    need(package)
    with pytest.raises(EnvError, match=says):
        build_envs(sampler, EnvSection(id=env_id), 2)


def test_three_agents_spread_in_each_of_two_environments():
    need("mpe2")
    envs = build_envs("auto", EnvSection(id=SPREAD, kwargs={"max_cycles": 5}), 2)
    assert envs.num_envs == 6
    first = envs.reset(4)[""].copy()
    assert len(np.unique(first, axis=0)) == 6
    rng = np.random.default_rng(0)
    ends = []
    for _ in range(12):
        step = envs.step(random_actions(envs.action_spec, {}, envs.num_envs, rng))
        ends.append((int(step.truncated.sum()), int(step.idle.sum())))
    assert ends == [*[(0, 0)] * 4, (6, 0), (0, 6)] * 2
    np.testing.assert_array_equal(envs.reset(4)[""], first)
    envs.close()


PONG = "ALE/Pong-v5"
STEADY = {"repeat_action_probability": 0.0}
NOOP = {"": np.zeros(1, np.int32)}


def both_kinds(**settings):
    """They play one game, in turn and as a vector."""
    need("ale_py", "cv2")
    section = EnvSection(**settings)
    serial, vector = build_envs("serial", section, 1), build_envs("auto", section, 1)
    assert isinstance(serial, SerialEnvs)
    assert isinstance(vector, VectorEnvs)
    assert serial.obs_spec == vector.obs_spec
    assert serial.action_spec == vector.action_spec
    return serial, vector


@pytest.mark.parametrize("env_id", [PONG, f"ale_py:{PONG}"])
def test_both_samplers_show_the_same_stacks_of_frames(env_id):
    for envs in both_kinds(id=env_id):
        (leaf,) = envs.obs_spec.leaves
        assert (leaf.shape, leaf.dtype) == ((4, 84, 84), "uint8")
        first = envs.reset(0)[""]
        # The stack begins with nothing but the newest frame.
        assert not first[:, :3].any()
        assert first[:, 3].any()
        steps = [envs.step(NOOP) for _ in range(5)]
        assert steps[-1].obs[""][:, 0].any()
        envs.close()


def test_rewards_are_not_clipped():
    # Space Invaders pays up to 30 points.
    for envs in both_kinds(id="ALE/SpaceInvaders-v5", kwargs=STEADY):
        envs.reset(0)
        fire = {"": np.ones(1, np.int32)}
        rewards = np.stack([envs.step(fire).rewards.copy() for _ in range(400)])
        assert rewards.max() > 1
        assert rewards.max() == int(rewards.max())
        envs.close()


@pytest.mark.parametrize(("skip", "length"), [(4, 100), (8, 50)])
def test_an_episode_takes_as_many_frames_as_steps_times_the_skip(skip, length):
    kwargs = {"frameskip": skip, "max_num_frames_per_episode": 400, "noop_max": 0}
    for envs in both_kinds(id=PONG, kwargs=kwargs):
        envs.reset(0)
        num_steps, step = 1, envs.step(NOOP)
        while not step.ended.any():
            num_steps, step = num_steps + 1, envs.step(NOOP)
        assert step.truncated.all(), "a limit is no end of a game"
        assert num_steps == pytest.approx(length, abs=2)
        envs.close()


def test_an_episode_takes_as_many_steps_as_it_may_and_frames_do_not_count():
    need("ale_py", "cv2")
    kwargs = {"max_episode_steps": 20, "frameskip": 4, "noop_max": 30}
    section = EnvSection(id=PONG, kwargs=kwargs)
    with pytest.raises(EnvError, match=r"counts frames alone, and env\.kwargs has max_episode_st"):
        build_envs("vector", section, 1)
    envs = build_envs("auto", section, 1)
    envs.reset(0)
    truncated = [bool(envs.step(NOOP).truncated[0]) for _ in range(20)]
    assert truncated == 19 * [False] + [True]
    envs.close()


@pytest.mark.parametrize(
    ("kwargs", "shape", "num_actions"),
    [
        ({"img_height": 40, "img_width": 50, "stack_num": 2}, (2, 40, 50), 6),
        ({"grayscale": False, "full_action_space": True, **STEADY}, (4, 84, 84, 3), 18),
    ],
)
def test_arguments_mean_the_same_to_both(kwargs, shape, num_actions):
    for envs in both_kinds(id=PONG, kwargs=kwargs):
        (leaf,) = envs.obs_spec.leaves
        assert (leaf.shape, leaf.is_stack) == (shape, True)
        assert envs.action_spec.parts[0].choices == (num_actions,)
        try_steps(envs)
        envs.close()


def test_without_preprocessing_or_in_wrappers_a_game_is_single():
    need("ale_py", "cv2")
    raw = EnvSection(id=PONG, preprocess="off", kwargs={"obs_type": "ram"})
    wrapped = EnvSection(id=PONG, wrappers=("gymnasium.wrappers:Autoreset",))
    for section, shape in ((raw, (128,)), (wrapped, (4, 84, 84))):
        envs = build_envs("auto", section, 1)
        assert isinstance(envs, SerialEnvs)
        (leaf,) = envs.obs_spec.leaves
        assert (leaf.shape, leaf.is_stack) == (shape, False)
        envs.close()
    with pytest.raises(EnvError, match=r"vector code that preprocesses, and env\.preprocess is"):
        build_envs("vector", raw, 1)


def test_single_games_say_that_they_need_opencv(monkeypatch):
    need("ale_py")
    monkeypatch.setattr("impala_async.envs.make.find_spec", lambda name: None)
    with pytest.raises(EnvError, match=r"impala-async\[atari\]', or set actor\.sampler to vector"):
        make_env(EnvSection(id=PONG))
