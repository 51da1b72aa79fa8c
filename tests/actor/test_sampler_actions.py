"""Actions of any kind and shape, from a real policy to an environment and into rows."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, MultiBinary, MultiDiscrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from impala_async.config.model import ModelSection
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.policy import Policy
from impala_async.schema import Schema, recurrent_state
from tests.actor.fakes import sampler_over
from tests.columns import find_fault


class Echo(gym.Env[Any, Any]):
    """Shows the action that it got; every third step ends an episode."""

    action_space = Dict(
        {
            "move": MultiDiscrete(np.array([[2, 3], [4, 5]])),
            "push": Box(-0.5, 0.5, (3,), np.float64),
            "switch": MultiBinary(2),
        }
    )
    observation_space = Dict(
        {
            "move": Box(0, 9, (2, 2), np.int64),
            "push": Box(-9, 9, (3,), np.float64),
            "switch": Box(0, 1, (2,), np.int8),
        }
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._num_steps = 0
        return {k: np.zeros(s.shape, s.dtype) for k, s in self.observation_space.items()}, {}

    def step(self, action):
        self._num_steps += 1
        assert self.action_space.contains(action)
        return action, 1.0, self._num_steps == 3, False, {}


def check(columns, place):
    """Rows hold what the environment got, but unclipped; the number of masked ones."""
    for t, is_valid in enumerate(columns.mask_CT[place].tolist()):
        for name, actions in columns.actions.items():
            chosen, shown = actions[place, t], columns.obs[name][place, t + 1]
            if is_valid:
                np.testing.assert_allclose(
                    np.clip(chosen, -0.5, 0.5 if name == "push" else 9), shown
                )
            else:
                assert not chosen.any()
                assert not shown.any(), "after a masked row comes a reset observation"
    return int((~columns.mask_CT[place]).sum())


@pytest.mark.parametrize("core", [None, "lstm"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("mode", ["serial", "NextStep", "SameStep"])
def test_rows_hold_what_was_done(mode, rows, core):
    envs = SerialEnvs([Echo(), Echo()])
    if mode != "serial":
        envs = VectorEnvs(SyncVectorEnv([Echo] * 2, autoreset_mode=AutoresetMode(mode)))
    schema = Schema(envs.obs_spec, envs.action_spec, rows, recurrent_state(core, 256))
    policy = Policy(schema, ModelSection(core=core), seed=0)
    sampler, _ = sampler_over(envs, schema, policy, torch.Generator().manual_seed(0))
    num_masked = num_beyond = 0
    for message in [message for _ in range(16) for message in sampler.step()]:
        columns = message.buffer.columns
        assert find_fault(schema, columns) is None
        num_beyond += int((np.abs(columns.actions["push"]) > 0.5).sum())
        num_masked += sum(check(columns, place) for place in range(message.buffer.num_columns))
    assert num_masked >= 6
    assert num_beyond > 0, "what is stored is not clipped"
    envs.close()
