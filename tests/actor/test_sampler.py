from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, MultiBinary, MultiDiscrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from bench.probes import CountingVector
from impala_async.actor.unroll import MessageBuffer, Unroll
from impala_async.config.model import ModelSection
from impala_async.envs.agents import AgentEnvs
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.policy import Policy
from impala_async.schema import Schema, recurrent_state
from impala_async.weights import Version
from tests.actor.fakes import FakePolicy, Row, rows_of, sampler_over, weights_of
from tests.columns import find_fault
from tests.envs.test_agents import Lives

MODES = ["NextStep", "SameStep"]


class Rig:
    """A sampler with all that surrounds it."""

    def __init__(self, envs, rows, *, seed=0, newest=None):
        self.envs = envs
        self.schema = Schema(envs.obs_spec, envs.action_spec, rows)
        self.policy = FakePolicy(envs.action_spec.parts[0].choices[0])
        self.sampler = sampler_over(envs, self.schema, self.policy, newest=newest, seed=seed)

    def run(self, num_steps):
        return [message for _ in range(num_steps) for message in self.sampler.step()]

    def run_streams(self, num_steps):
        """All rows of each column; the first number of an observation says which one it is."""
        streams = [[] for _ in range(self.envs.num_envs)]
        for message in self.run(num_steps):
            columns = message.buffer.columns
            assert find_fault(self.schema, columns) is None
            for place in range(message.buffer.num_columns):
                rows = rows_of(columns, place)
                streams[int(rows[0].obs[0])] += rows
        return streams


def counting(mode, lengths=(3, 5), ends="terminated"):
    return VectorEnvs(CountingVector(len(lengths), lengths, autoreset=mode, ends=ends))


def valid(rows):
    return [row for row in rows if row.mask]


def masked(column, episode, length):
    """The row with the final observation of an episode."""
    obs, next_obs = (column, episode, length), (column, episode + 1, 0)
    return Row(obs, 0, 0.0, 0.0, False, False, False, next_obs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("ends", ["terminated", "truncated", "both"])
def test_columns_that_end_at_different_steps(mode, rows, ends):
    lengths, flags = (1, 2, 3, 7), (ends != "truncated", ends != "terminated")
    streams = Rig(counting(mode, lengths, ends), rows).run_streams(120)
    for column, length in enumerate(lengths):
        expected = []
        for episode in range(120):
            for step in range(length):
                total = column + episode + step
                action = 7 * total % 2
                obs, next_obs = (column, episode, step), (column, episode, step + 1)
                log_prob = -1 / 8 - total / 1024
                reward = step + 1 + 10 * action
                ended = flags if step == length - 1 else (False, False)
                expected.append(Row(obs, action, log_prob, reward, *ended, True, next_obs))
            expected.append(masked(column, episode, length))
        num_rows = len(streams[column])
        assert num_rows > 60 - 8
        assert num_rows % rows == 0
        assert streams[column] == expected[:num_rows]


def test_it_counts_how_many_agents_act_at_once():
    # One acts once, the other three times; then both are reset: four acts in three env steps.
    envs = AgentEnvs([Lives((1, 3)), Lives((1, 3))])
    sampler = sampler_over(envs, Schema(envs.obs_spec, envs.action_spec, 5), num_agents=2)
    for _ in range(8):
        sampler.step()
    assert sampler.take_agents() == pytest.approx(4 / 3)
    sampler.step()
    assert sampler.take_agents() == 2
    assert sampler.take_agents() == 1


class Releases:
    """Gives the weights that a test has put there, once; counts how often it was asked."""

    def __init__(self):
        self.waiting = None
        self.num_asked = 0

    def __call__(self):
        self.num_asked += 1
        weights, self.waiting = self.waiting, None
        return weights


def test_newer_weights_are_taken_at_the_boundary_only():
    releases = Releases()
    rig = Rig(counting("NextStep", (50, 50)), rows=3, newest=releases)
    releases.waiting = weights_of(1)
    rig.run(2)
    releases.waiting = weights_of(2)
    (first,) = rig.run(1)
    assert releases.num_asked == 1
    assert first.version == Version(1, 1)
    (second,) = rig.run(3)
    assert releases.num_asked == 2
    assert second.version == Version(1, 2)
    assert rig.policy.loads == [Version(1, 1), Version(1, 2)]
    # The log-probability tells which weights acted.
    for message, update in ((first, 1), (second, 2)):
        acted = np.floor(-8 * message.buffer.columns.log_probs_CT) - 1
        assert set(acted.ravel().tolist()) == {update}


def test_in_same_step_a_version_is_never_younger_than_a_row_acted_with_it():
    releases = Releases()
    rig = Rig(counting("SameStep", (2, 3, 7)), rows=4, newest=releases)
    num_mixed = 0
    for update in range(1, 60):
        releases.waiting = weights_of(update)
        for message in rig.sampler.step():
            rows = valid(rows_of(message.buffer.columns, 0))
            acted = [int(-8 * (row.log_prob + sum(row.obs) / 1024) - 1 + 0.01) for row in rows]
            assert acted == sorted(acted)
            assert message.version.update == acted[0]
            num_mixed += acted[0] != acted[-1]
    assert num_mixed > 5, "columns in mid-trajectory go on with newer weights"


@pytest.mark.parametrize("rows", [1, 2])
def test_weights_are_never_waited_for_while_a_message_is_complete(rows):
    """In lockstep newer ones come of that very message."""
    is_held = []
    rig = Rig(counting("SameStep", (2,)), rows, newest=lambda: is_held.append(is_complete))
    is_complete = False
    append = Unroll.append

    def note(unroll, *args):
        nonlocal is_complete
        finished = append(unroll, *args)
        is_complete |= bool(finished)
        return finished

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unroll, "append", note)
        for _ in range(20):
            is_complete = False
            rig.sampler.step()
    assert len(is_held) >= 20 // rows
    assert not any(is_held)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_a_buffer_per_group_is_enough(mode, rows):
    """It is taken again once its message was returned: no message is held back meanwhile."""
    envs = counting(mode, (2, 3))
    num_groups = 2 if mode == "SameStep" else 1
    schema = Schema(envs.obs_spec, envs.action_spec, rows)
    idle = [MessageBuffer(schema, 2 // num_groups) for _ in range(num_groups)]
    sampler = sampler_over(envs, schema, take=idle.pop)
    num_messages = 0
    for _ in range(60):
        for message in sampler.step():
            idle.append(message.buffer)
            num_messages += 1
    assert num_messages >= 60 // rows


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
    sampler = sampler_over(envs, schema, policy, torch.Generator().manual_seed(0))
    num_masked = num_beyond = 0
    for message in [message for _ in range(16) for message in sampler.step()]:
        columns = message.buffer.columns
        assert find_fault(schema, columns) is None
        num_beyond += int((np.abs(columns.actions["push"]) > 0.5).sum())
        num_masked += sum(check(columns, place) for place in range(message.buffer.num_columns))
    assert num_masked >= 6
    assert num_beyond > 0, "what is stored is not clipped"
    envs.close()
