"""A loaded policy acts as the checkpoint does, on observations as an environment gives them."""

import json
import subprocess
import sys
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from impala_async import load_policy
from impala_async.config.load import load_config
from impala_async.envs.describe import look_of
from impala_async.envs.make import make_env
from impala_async.errors import CheckpointError, ConfigError, EnvError
from impala_async.evaluation.play import build_players
from impala_async.runs.folder import SPACES, RunFolder
from impala_async.training.checkpoint import save_checkpoint
from impala_async.weights import Version

POLE = ("env.id=CartPole-v1", "model.hidden_sizes=[16]")
HIDDEN = ("env.id=bench.learning.envs:no_velocities", "model.core_size=16")
CASES = {
    "mlp": POLE,
    "normalised": (*POLE, "model.normalize_obs=true"),
    "cnn": ("env.id=bench.digest_envs:stacked_catch", "model.name=small_cnn"),
    "lstm": (*HIDDEN, "model.core=lstm", "env.last_action=true", "env.last_reward=true"),
    "gru": (*HIDDEN, "model.core=gru"),
    "masks": ("env.id=bench.digest_envs:TwoDeals",),
    "box": ("env.id=Pendulum-v1", "model.initial_std=2.0"),
    "squashed box": ("env.id=Pendulum-v1", "env.squash_actions=true"),
    "dict": ("env.id=bench.learning.envs:split_pole",),
}


def begin(path, *settings):
    """A run folder with a checkpoint of random weights, and the policy that it is of."""
    config = load_config(None, settings)
    envs, policy = build_players(config, 1)
    with torch.no_grad():
        for tensor in policy.tensors:
            tensor.add_(torch.randn_like(tensor).abs_() * 0.3)
    folder = RunFolder(path)
    folder.gym_spaces = json.loads(json.dumps(look_of(envs)["gym"]))
    envs.close()
    folder.begin(config)
    folder.confirm(config)
    tensors = {"model": policy.named_tensors()}
    save_checkpoint(folder.checkpoints, Version(1, 7), tensors, {"env_steps_trained": 99})
    folder.let_go()
    return folder, config, policy


@pytest.mark.parametrize("case", CASES)
def test_it_acts_as_the_policy_of_the_checkpoint_over_resets(tmp_path, case):
    folder, config, policy = begin(tmp_path / "run", *CASES[case])
    loaded = load_policy(folder.path)
    assert (loaded.path.name, loaded.env_steps) == ("ckpt-1-7", 99)
    with closing(make_env(config.env)) as env:
        assert loaded.observation_space == env.observation_space
        assert loaded.action_space == env.action_space
    envs, _ = build_players(config, 1)
    obs, state, own_state, reward, num_resets = envs.reset(3), policy.first_state(1), None, None, 0
    for _ in range(1000):
        chosen = policy.act(obs, state)
        acted = loaded.act(as_given(loaded.observation_space, obs), own_state, reward=reward)
        (expected,) = loaded._spaces.each(chosen.actions)
        np.testing.assert_array_equal(acted.action, expected)
        assert acted.log_prob == pytest.approx(float(chosen.log_probs[0]), abs=1e-5)
        assert loaded.action_space.contains(acted.action)
        step = envs.step(chosen.actions)
        obs, state, own_state = step.obs, chosen.state, acted.state
        reward = float(step.rewards[0])
        if step.fresh is not None and step.fresh[0]:
            num_resets += 1
            for part in state.values():
                part.fill(0)
            own_state, reward = None, None
    envs.close()
    assert num_resets > 3


def as_given(space, leaves):
    """An observation as the environment gave it, of its leaves in a batch of one."""
    if not isinstance(space, gym.spaces.Dict):
        return leaves[""][0]
    return {key: leaves[key][0] for key in space.spaces}


@pytest.mark.parametrize("case", ["lstm", "masks", "dict", "squashed box"])
def test_a_batch_is_acted_for_as_each_of_it_is(tmp_path, case):
    loaded = load_policy(begin(tmp_path / "run", *CASES[case])[0].path)
    space = loaded.observation_space
    space.seed(1)
    many = [space.sample() for _ in range(5)]
    if case == "masks":
        for obs in many:
            obs["action_mask"][:] = 1
    states, rewards = [None] * 5, None
    state = None
    for turn in range(3):
        stacked = create_empty_array(space, 5)
        concatenate(space, many, stacked)
        whole = loaded.act(stacked, state, reward=rewards)
        rows = iterate(batch_space(loaded.action_space, 5), whole.action)
        for n, (obs, action) in enumerate(zip(many, rows, strict=True)):
            alone = loaded.act(obs, states[n], reward=None if rewards is None else rewards[n])
            np.testing.assert_allclose(alone.action, action, atol=1e-5)
            assert alone.log_prob == pytest.approx(float(whole.log_prob[n]), abs=1e-5)
            states[n] = alone.state
        state, rewards = whole.state, np.full(5, float(turn))


def test_draws_depend_on_the_seed_alone(tmp_path):
    loaded = load_policy(begin(tmp_path / "run", *POLE)[0].path)
    obs = np.zeros((64, 4), np.float32)
    draws = []
    for seed in (1, 1, 2):
        loaded.seed(seed)
        draws.append(loaded.act(obs, greedy=False).action.tolist())
    assert draws[0] == draws[1] != draws[2]
    assert set(draws[0]) == {0, 1}


def test_one_of_a_team_is_named(tmp_path):
    team = ("env.id=examples.tictactoe:TicTacToe", 'policies.names=["main", "past"]')
    folder, *_ = begin(tmp_path / "run", *team)
    for name in (None, "other"):
        with pytest.raises(ConfigError, match=f"^policy: wants one of main, past, got {name}"):
            load_policy(folder.path, policy=name)
    main, past = (load_policy(folder.path, policy=name) for name in ("main", "past"))
    obs = main.observation_space.sample()
    if "action_mask" in obs:
        obs["action_mask"][:] = 1
    assert main.act(obs).log_prob != past.act(obs).log_prob


def test_faults_are_one_line_each(tmp_path):
    folder, *_ = begin(tmp_path / "run", *CASES["lstm"])
    path = folder.path
    loaded = load_policy(path / "checkpoints" / "ckpt-1-7")
    obs = np.zeros(2, np.float32)
    state = loaded.act(obs).state
    for call, error, says in (
        (lambda: loaded.act(obs, state), ConfigError, "reward: this policy sees the last one"),
        (lambda: loaded.act(obs, {}, reward=1), ConfigError, "state: wants the one that the last"),
        (lambda: loaded.act(np.zeros(3)), EnvError, r"promises shape \(2,\), it has \(3,\)"),
        (lambda: loaded.act(None), EnvError, "it is not there"),
        (lambda: load_policy(tmp_path / "none"), CheckpointError, "there is no such folder"),
        (lambda: load_policy(tmp_path), CheckpointError, "wants the folder of a run"),
        (lambda: load_policy(path, policy="main"), ConfigError, "none: this run has one policy"),
    ):
        with pytest.raises(error, match=says) as caught:
            call()
        assert "\n" not in str(caught.value)
    spaces = gym.spaces.Box(-1, 1, (5,)), loaded.action_space
    with pytest.raises(CheckpointError, match="does not fit the model and spaces"):
        load_policy(path, spaces=spaces)
    (path / SPACES).write_text('{"observation": {"kind": "Box"}, "action": {}}')
    with pytest.raises(CheckpointError, match=r"spaces\.json is damaged: KeyError"):
        load_policy(path)
    (path / SPACES).unlink()
    with pytest.raises(CheckpointError, match=r"pass spaces=\(env\.observation_space, env\.act"):
        load_policy(path)
    spaces = loaded.observation_space, loaded.action_space
    assert load_policy(path, spaces=spaces).act(obs).log_prob == loaded.act(obs).log_prob
    (path / "checkpoints" / "ckpt-1-7" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="holds no whole checkpoint yet"):
        load_policy(path)


def test_it_loads_without_torchs_compiler(tmp_path):
    folder, *_ = begin(tmp_path / "run", *POLE)
    code = (
        "import sys, impala_async\n"
        "assert 'torch' not in sys.modules\n"
        f"print(impala_async.load_policy({str(folder.path)!r}).act([0.0] * 4).action)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "assert not hasattr(impala_async, 'load_policies')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip() in ("0", "1")) == (0, True), done.stderr
