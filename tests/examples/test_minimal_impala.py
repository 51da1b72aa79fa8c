"""The one-file IMPALA does the mathematics of the package, and learns."""

import ast
import contextlib
import io
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from examples.minimal_impala import Actor, ActorCritic, Learner, Settings, make_model, train
from impala_async.config.load import load_config
from impala_async.config.model import ModelSection
from impala_async.config.run import AlgorithmSection
from impala_async.policy import Policy
from impala_async.training.batch import Batch
from impala_async.training.step import UpdateStep
from tests.training.conftest import PLAIN, flat_schema

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS, NUM_COLUMNS, NUM_FEATURES, NUM_ACTIONS = 9, 6, 4, 2
# Settings that have one name in both.
SAME = ("gamma", "lr", "value_cost", "grad_clip", "reward_scale")
SHAPE = {"env_id": "Short-v0", "num_envs": NUM_COLUMNS, "rows": NUM_ROWS}
SETTINGS = Settings(**SHAPE, lr=1e-2, lr_env_steps=1000, reward_scale=0.7, grad_clip=0.05)


def register(monkeypatch, env_id, entry_point, **more):
    given = {"disable_env_checker": True, **more}
    spec = gym.envs.registration.EnvSpec(env_id, entry_point=entry_point, **given)
    monkeypatch.setitem(gym.registry, env_id, spec)


def model_of(seed):
    torch.manual_seed(seed)
    model = ActorCritic(NUM_FEATURES, NUM_ACTIONS)
    # Heads that are as small as at the start would hide what the losses make of them.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


@pytest.mark.parametrize("seed", range(3))
def test_updates_are_the_package_s(monkeypatch, seed):
    """The same batches through both: returns, losses, clipping, Adam and the schedule."""
    cartpole = "gymnasium.envs.classic_control:CartPoleEnv"
    register(monkeypatch, "Short-v0", cartpole, max_episode_steps=10)
    actor, model = Actor(SETTINGS, seed), model_of(seed)
    actor.model.load_state_dict(model_of(seed + 1).state_dict())
    step, learner, num_cuts = package_step(model), Learner(SETTINGS, model), np.zeros(2, int)
    for _ in range(5):
        rows = actor.unroll(0).rows
        rows = rows._replace(rewards_TB=torch.randn(rows.mask_TB.shape) * rows.mask_TB)
        truncated_TB = torch.zeros_like(rows.mask_TB)
        truncated_TB[:-1] = ~rows.mask_TB[1:] & ~rows.terminated_TB[:-1]
        num_cuts += int(rows.terminated_TB.sum()), int(truncated_TB.sum())
        learner.learn(rows)
        is_live_B = torch.ones(NUM_COLUMNS) > 0
        result = step.run(batch_of(rows, truncated_TB), is_live_B, learner.env_steps)
        assert result.num_updates
        assert result.stats["grad/norm"] > SETTINGS.grad_clip
    assert num_cuts.all(), "there are both kinds"
    theirs = step.policy.model.state_dict()
    for name, mine in package_names(model).items():
        torch.testing.assert_close(mine, theirs[name], rtol=1e-4, atol=1e-5)


def package_names(model):
    """The weights under the names that the package's model has for them."""
    names = {}
    for part, sequence in (("policy", model.policy), ("value", model.value)):
        for kind in ("weight", "bias"):
            for number in (0, 1):
                names[f"{part}_torso.layers.{number}.{kind}"] = getattr(sequence[2 * number], kind)
            names[f"{part}_head.{kind}"] = getattr(sequence[4], kind)
    return {name: tensor.detach() for name, tensor in names.items()}


def package_step(model):
    settings = PLAIN | {name: getattr(SETTINGS, name) for name in SAME} | {"lr_end": 0.0}
    algorithm = AlgorithmSection(schedule_env_steps=SETTINGS.lr_env_steps, **settings)
    schema = flat_schema(NUM_FEATURES, NUM_ACTIONS, NUM_ROWS)
    policy = Policy(schema, ModelSection(normalize_obs=False), seed=0)
    policy.model.load_state_dict(package_names(model))
    return UpdateStep(policy, algorithm)


def batch_of(rows, truncated_TB):
    return Batch(
        obs={"": rows.obs_SB.transpose(0, 1).contiguous()},
        actions={"": rows.actions_TB.t().int()},
        state={},
        rewards_BT=rows.rewards_TB.t(),
        log_probs_BT=rows.log_probs_TB.t(),
        terminated_BT=rows.terminated_TB.t(),
        truncated_BT=truncated_TB.t(),
        mask_BT=rows.mask_TB.t(),
    )


def test_an_actor_masks_the_rows_after_an_end():
    settings = Settings(num_envs=3, rows=200)
    actor = Actor(settings, 0)
    actor.model.load_state_dict(make_model(settings).state_dict())
    first, second = actor.unroll(0), actor.unroll(0)
    rows = first.rows
    is_over_TB = rows.terminated_TB
    assert is_over_TB.any(), "a new policy does not hold the pole for 200 steps"
    torch.testing.assert_close(rows.mask_TB[1:], ~is_over_TB[:-1])
    for leaf in (rows.actions_TB, rows.log_probs_TB, rows.rewards_TB):
        assert (leaf[~rows.mask_TB] == 0).all()
    assert not (rows.terminated_TB & ~rows.mask_TB).any()
    torch.testing.assert_close(second.rows.obs_SB[0], rows.obs_SB[-1])
    # CartPole gives 1 for each step.
    assert len(first.returns) == int(is_over_TB.sum())
    assert sum(first.returns) <= rows.rewards_TB.sum()


def test_it_learns_in_a_short_run():
    with contextlib.redirect_stdout(io.StringIO()):
        returns = train(Settings(max_env_steps=60_000))
    first, last = np.mean(returns[:100]), np.mean(returns[-100:])
    assert first < 60
    assert last > 2 * first


def test_the_death_of_an_actor_ends_the_run(monkeypatch):
    register(monkeypatch, "Failing-v0", "bench.probes:Failing")
    with pytest.raises(RuntimeError, match="fails as it was told to"):
        train(Settings(env_id="Failing-v0"))


def test_its_settings_are_those_of_the_cartpole_config():
    config, ours = load_config(ROOT / "configs/cartpole.toml"), Settings()
    algorithm, stop = config.algorithm, config.stop
    for mine, theirs in (
        (ours.env_id, config.env.id),
        (ours.num_actors * ours.num_envs, config.train.num_actors * config.actor.num_envs),
        (ours.rows, config.trajectory.rows),
        (ours.messages_per_batch * ours.num_envs, config.learner.batch_columns),
        ((ours.lr_env_steps, 0), (algorithm.schedule_env_steps, algorithm.lr_end)),
        (ours.entropy_cost, algorithm.entropy_cost_of(num_choices=2)),
        ((ours.goal_return, ours.max_env_steps), (stop.mean_return, stop.env_steps)),
    ):
        assert mine == theirs
    for name in SAME:
        assert getattr(ours, name) == getattr(algorithm, name), name


def test_it_stays_one_short_file_without_the_package():
    text = (ROOT / "examples/minimal_impala.py").read_text()
    assert len(text.splitlines()) < 300
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    libraries = {name.split(".")[0] for name in names} - sys.stdlib_module_names
    assert libraries == {"torch", "numpy", "gymnasium"}
