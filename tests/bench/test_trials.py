"""Trials play what a run has saved, and say how well."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from bench.learning import trials
from bench.learning.trials import saved_of_random, unbeaten_by_random
from bench.one_run import CONFIGS
from impala_async.config.env import EnvSection
from impala_async.config.load import load_config
from impala_async.config.model import ModelSection
from impala_async.config.run import RunConfig
from impala_async.envs.make import build_envs
from impala_async.policy import Policy, build_policy
from impala_async.runs.folder import RunFolder
from impala_async.schema import Schema
from impala_async.training.checkpoint import save_checkpoint
from impala_async.weights import Version


@pytest.fixture(autouse=True)
def few_games(monkeypatch):
    monkeypatch.setattr(trials, "GAMES_PER_COLUMN", 3)


def save(folder, config, bias=None):
    """A run whose first policy is as it began, or prefers one action whatever it sees."""
    run = RunFolder(folder / "run")
    run.begin(config)
    envs = build_envs("serial", config.env, 1, config.policies)
    names = config.policies.names
    schema = Schema(envs.obs_spec, envs.action_spec, config.trajectory.rows, (), names)
    policy = build_policy(schema, config.model, config.policies, seed=0)
    first = policy if isinstance(policy, Policy) else policy.members[names[0]]
    if bias is not None:
        with torch.no_grad():
            first.model.policy_head.weight.zero_()
            first.model.policy_head.bias.copy_(torch.tensor(bias))
    save_checkpoint(run.checkpoints, Version(1, 1), {"model": policy.named_tensors()}, {})
    return run.path


def test_who_knows_nothing_is_beaten_as_often_as_random_play(tmp_path):
    config = load_config(CONFIGS / "self_play.toml")
    share = unbeaten_by_random(save(tmp_path, config))
    # Random play loses 29 games of 100 when it begins and 58 when it answers.
    assert 0.4 < share < 0.7


def test_the_share_saved_is_measured_against_random_actions(tmp_path):
    """A step costs 1 with action 0 and nothing with action 1; random actions pay half of it."""
    env = EnvSection(id="tests.bench.test_trials:Costly")
    for bias, share in (([0.0, 9.0], 1.0), ([9.0, 0.0], -1.0)):
        config = RunConfig(env=env, model=ModelSection(hidden_sizes=(4,)))
        found = saved_of_random(save(tmp_path / str(share), config, bias))
        assert found == pytest.approx(share, abs=0.1)


class Costly(gym.Env[NDArray[np.float32], np.int64]):
    observation_space = Box(0, 1, (1,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.num_steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.num_steps += 1
        return np.zeros(1, np.float32), float(action) - 1, self.num_steps == 10, False, {}
