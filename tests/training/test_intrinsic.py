"""A reward of the user's own reaches the advantages, and the module learns beside the policy."""

import dataclasses

import pytest
import torch
from torch import nn

from impala_async.config.algorithm import AlgorithmSection
from impala_async.errors import CheckpointError, ConfigError
from impala_async.metrics.names import REGISTRY
from impala_async.training.gradients import TorchGradients
from impala_async.training.graphs import Graphs
from tests.training.conftest import ALIVE_B, are_equal, is_same, remembered, weights_of

RND = {"intrinsic_reward": "examples.rnd:RND", "lr": 1e-2}


class Known(nn.Module):
    """Its reward follows from the observations, and its loss moves nothing but its own weight."""

    def __init__(self, obs, action):
        super().__init__()
        assert (len(obs.leaves), action.num_choices) == (1, 4)
        self.weight = nn.Parameter(torch.rand(()))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, obs, actions):
        rewards_BT = known(obs[""], actions[""])
        return rewards_BT + self.weight - self.weight.detach(), self.weight.expand_as(rewards_BT)


KNOWN = {"intrinsic_reward": f"{__name__}:Known"}


def known(obs_BSF, actions_BT):
    return obs_BSF[:, 1:].sum(-1) - obs_BSF[:, :-1].sum(-1) + actions_BT


class Counting(Known):
    def forward(self, obs, actions):
        self.count += 1
        return super().forward(obs, actions)


class NotFinite(Known):
    def forward(self, obs, actions):
        rewards_BT, losses_BT = super().forward(obs, actions)
        return rewards_BT, losses_BT * (obs[""][:, 1:] / obs[""][:, 1:]).sum(-1)


def faulty(forward):
    def make(obs, action):
        module = Known(obs, action)
        module.forward = forward
        return module

    return make


alone = faulty(lambda obs, actions: known(obs[""], actions[""]))
wide = faulty(lambda obs, actions: (obs[""][:, 1:], obs[""][:, 1:, 0]))
nothing = faulty(lambda obs, actions: None)
fails = faulty(lambda obs, actions: obs["no such key"])
in_place = faulty(lambda obs, actions: (obs[""].mul_(2)[:, 1:, 0],) * 2)


def no_module(obs, action):
    return len(obs.leaves)


@pytest.mark.parametrize("name", ["impala", "appo", "ppo", "a2c"])
def test_a_reward_is_as_if_the_environment_had_given_it(make_step, make_batch, name):
    """It is added behind the clip, before all scaling; the policy feels nothing of the loss."""
    settings = {"name": name, "grad_clip": None, "normalize_returns": True, "reward_scale": 0.5}
    step, plain = make_step(**settings, reward_clip=0.5, **KNOWN), make_step(**settings)
    before = step.intrinsic.module.weight.item()
    for seed in range(3):
        batch, told = make_batch(seed=seed), make_batch(seed=seed)
        own_BT = known(batch.obs[""], batch.actions[""])
        told.rewards_BT.copy_(batch.rewards_BT.clamp(-0.5, 0.5) + own_BT)
        stats, wanted = (s.run(b, ALIVE_B, 0).stats for s, b in ((step, batch), (plain, told)))
        for key in ("loss/policy", "loss/value", "algorithm/return_scale"):
            assert stats[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-6)
        assert stats["reward/intrinsic"] == pytest.approx(float(own_BT[batch.mask_BT].mean()))
        assert stats["loss/total"] == pytest.approx(
            wanted["loss/total"] + stats["loss/intrinsic"], rel=1e-4, abs=1e-6
        )
        assert set(stats) <= REGISTRY.keys()
    assert stats["loss/intrinsic"] < before
    assert not step.intrinsic(batch.rows_of_obs(), batch).rewards_BT.requires_grad
    assert not step.policy.named_tensors().keys() & step.intrinsic.module.state_dict().keys()
    torch.testing.assert_close(weights_of(step), weights_of(plain), rtol=1e-3, atol=1e-5)


def test_its_loss_is_reduced_as_that_of_the_policy_is(make_step, make_batch):
    batch = make_batch()
    num_valid = int(batch.mask_BT.sum())
    assert num_valid < batch.mask_BT.numel()
    for reduction, times in (("mean", 1), ("sum", num_valid)):
        step = make_step(**KNOWN, reduction=reduction)
        wanted = step.intrinsic.module.weight.item() * times
        stats = step.run(batch, ALIVE_B, 0).stats
        assert stats["loss/intrinsic"] == pytest.approx(wanted)


def test_the_module_learns_and_comes_back_with_a_checkpoint(make_step, make_batch):
    settings = RND | {"name": "ppo", "normalize_obs": True, "num_minibatches": 3}
    step, batch = make_step(**settings), make_batch()
    fixed = [tensor.clone() for tensor in step.intrinsic.module.target.parameters()]
    found = [step.run(batch, ALIVE_B, 0).stats for _ in range(20)]
    assert found[-1]["loss/intrinsic"] < found[0]["loss/intrinsic"] / 4
    # Its loss and reward are one number.
    assert found[-1]["reward/intrinsic"] == pytest.approx(found[-1]["loss/intrinsic"])
    assert are_equal(fixed, step.intrinsic.module.target.parameters())
    resumed = make_step(seed=1, **settings)
    resumed.restore(step.capture())
    for each in (step, resumed):
        each.run(make_batch(seed=3), ALIVE_B, 0)
    assert is_same(remembered(step), remembered(resumed))
    with pytest.raises(CheckpointError, match="has no 'intrinsic'"):
        step.restore(make_step(name="ppo", normalize_obs=True).capture())
    with pytest.raises(CheckpointError, match=r"it has no 'weight'"):
        make_step(**settings | KNOWN).restore(step.capture())


def test_it_begins_as_its_seed_says_and_is_tried_without_a_trace(make_step, make_batch):
    first, second = (make_step(**RND, normalize_returns=True) for _ in range(2))
    drawn = torch.random.get_rng_state()
    first.prepare(dataclasses.replace(make_batch(), mask_BT=torch.zeros(5, 6, dtype=torch.bool)))
    assert is_same(remembered(first), remembered(second))
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_a_column_for_which_it_is_not_finite_is_left_out(make_step, make_batch):
    step, without, batch = make_step(**RND), make_step(**RND), make_batch()
    batch.mask_BT[2] = True
    batch.obs[""][2, 1:] = 1e25
    result = step.run(batch, ALIVE_B, 0)
    assert result.is_failed_B.tolist() == [False, False, True, False, False]
    assert {"loss/intrinsic", "reward/intrinsic"} <= {*result.not_finite}
    without.run(batch.take(torch.tensor([0, 1, 3, 4])), ALIVE_B[:4], 0)
    assert is_same(remembered(step), remembered(without))


def test_no_graph_leaves_it_out(make_step):
    for is_graphed in (False, True):
        computed = make_step(**RND, is_graphed=is_graphed)._compute
        assert isinstance(computed, TorchGradients)
    assert isinstance(make_step(is_graphed=True)._compute, Graphs)


def test_what_is_wrong_with_it_is_told_before_anything_is_trained(
    make_step, make_team_step, make_batch
):
    batch = make_batch()
    zeros = dataclasses.replace(
        batch, obs={"": batch.obs[""] * 0}, mask_BT=torch.zeros_like(batch.mask_BT)
    )
    for name, text in (
        ("no_module", "must make a torch.nn.Module, not int"),
        ("missing", "has no 'missing'"),
        ("fails", r"failed to make rewards: KeyError.*test_intrinsic\.py:\d+\)"),
        ("nothing", "not NoneType$"),
        ("alone", r"must give .* each float32 of \[5, 6\], not float32 of \[5, 6\]$"),
        ("wide", r"not float32 of \[5, 6, 3\] and float32 of \[5, 6\]$"),
        ("in_place", r"changes obs_BS\[''\] in place"),
        ("Counting", "changes its buffer count in place"),
        ("NotFinite", "must give finite rewards_BT and losses_BT for observations"),
    ):
        for make in (make_step, make_team_step):
            with pytest.raises(ConfigError, match=rf"^algorithm\.intrinsic_reward: .*{text}"):
                make(intrinsic_reward=f"{__name__}:{name}").prepare(zeros)
    with pytest.raises(ValueError, match=r"intrinsic_reward must be package\.module:Name"):
        AlgorithmSection(intrinsic_reward="rnd")
