"""Of several agents, evaluate counts as many episodes of each, and says how many."""

import numpy as np
import pytest

from impala_async.config.model import ModelSection
from impala_async.config.run import EnvSection, RunConfig
from impala_async.envs.agents import AgentEnvs
from impala_async.envs.make import build_envs
from impala_async.errors import EnvError
from impala_async.evaluate import _build_enough, _play_greedily, main
from impala_async.policy import Policy
from impala_async.runs.folder import RunFolder
from impala_async.schema import Schema
from impala_async.training.checkpoint import save_checkpoint
from impala_async.weights import Version
from tests.envs.test_agents import Lives
from tests.test_evaluate import AlwaysOne, counted

THREE = {"lengths": [1, 2, 4], "starts": [0, 0, 0]}


@pytest.mark.parametrize(
    ("num_episodes", "per_agent", "num_envs"),
    [(1, 1, 1), (3, 1, 1), (10, 4, 4), (12, 4, 4), (24, 8, 8), (25, 9, 8)],
)
def test_each_agent_counts_as_often(num_episodes, per_agent, num_envs):
    env = EnvSection(id="tests.envs.test_agents:Lives", kwargs=THREE)
    config = RunConfig(env=env, model=ModelSection(hidden_sizes=(4,)))
    envs, _, num_agents = _build_enough(config, num_episodes)
    assert (envs.num_envs, num_agents) == (3 * num_envs, 3)
    policy = AlwaysOne()
    played = _play_greedily(policy, envs, per_agent, seed=0, num_agents=num_agents)
    returns = sorted(total for _, total in played)
    assert returns == [counted(length) for length in (1, 2, 4) for _ in range(per_agent)]
    envs.close()


def test_a_single_agent_has_as_many_environments_as_before():
    env = EnvSection(id="bench.probes:Counting")
    for num_episodes, num_envs in ((1, 1), (5, 5), (10, 8)):
        envs, _, num_agents = _build_enough(RunConfig(env=env), num_episodes)
        assert (envs.num_envs, num_agents) == (num_envs, 1)
        envs.close()


def test_what_is_counted_was_played_together():
    """Of the second round only the first world counts: with all of its agents."""

    class Rounds(Lives):
        def __init__(self, world):
            super().__init__((1, 1, 1), (0, 0, 0))
            self.world = world

        def step(self, actions):
            obs, rewards, *rest = super().step(actions)
            paid = {a: 100.0 * self.world + self.episode + self._index(a) / 10 for a in rewards}
            return obs, paid, *rest

    envs = AgentEnvs([Rounds(world) for world in range(2)])
    policy = AlwaysOne()
    played = _play_greedily(policy, envs, 3, seed=0, num_agents=3)
    returns = np.array([total for _, total in played]).reshape(3, 3)
    rounds = np.array([0, 1, 100])
    np.testing.assert_allclose(returns, rounds + np.arange(3)[:, None] / 10, rtol=1e-6)


def test_what_was_not_played_is_told_in_the_same_numbers():
    envs, policy = AgentEnvs([Lives((1, 1)), Lives((9, 9))]), AlwaysOne()
    with pytest.raises(EnvError, match="4 of 6 episodes ended within 8 steps"):
        _play_greedily(policy, envs, 3, 0, 8, num_agents=2)


@pytest.mark.parametrize(
    ("num_agents", "says"),
    [
        (3, ["ckpt-1-1: 4 episodes of each of 3 agents\n", "mean return of 12 greedy episodes"]),
        (1, ["ckpt-1-1\n", "mean return of 10 greedy episodes"]),
    ],
)
def test_what_is_counted_is_said(tmp_path, capsys, num_agents, says):
    run = RunFolder(tmp_path / "run")
    kwargs = {name: values[:num_agents] for name, values in THREE.items()}
    env = EnvSection(id="tests.envs.test_agents:Lives", kwargs=kwargs)
    model = ModelSection(hidden_sizes=(4,))
    run.begin(RunConfig(env=env, model=model))
    envs = build_envs("serial", env, 1)
    schema = Schema(envs.obs_spec, envs.action_spec, run.load_config().trajectory.rows)
    tensors = Policy(schema, model, seed=0).named_tensors()
    save_checkpoint(run.checkpoints, Version(1, 1), {"model": tensors}, {})
    assert main([str(run.path)]) == 0
    said = capsys.readouterr().out
    assert all(text in said for text in says)
