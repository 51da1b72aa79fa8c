"""An update trains on what is valid, by the loss as published, or leaves everything as it is."""

import dataclasses
import math

import pytest
import torch

from impala_async.algo.losses import impala_loss
from impala_async.config.algorithm import AlgorithmSection
from impala_async.config.model import ModelSection
from impala_async.policy import Policy
from impala_async.schema import ActionPart, ActionSpec
from impala_async.training.step import UpdateStep
from tests.training.conftest import (
    ALIVE_B,
    are_equal,
    is_same,
    random_batch,
    remembered,
    weights_of,
)

changed = dataclasses.replace
CHOICE, NUMBER = ActionPart("", "discrete", (4,), ()), ActionPart("x", "continuous", (), (2,))


def loss_of(step, batch, alive_B, settings, reduction):
    """The loss as published, of these columns."""
    seen = step.policy.evaluate(batch.obs, batch.actions, batch.mask_BT, batch.state)
    keys = ("rho_bar", "c_bar", "pg_rho_bar", "value_cost", "entropy_cost")
    return impala_loss(
        log_probs_TB=seen.log_probs_TB,
        behaviour_log_probs_TB=batch.log_probs_BT.t(),
        entropies_TB=seen.entropies_TB,
        values_SB=seen.values_SB,
        rewards_TB=batch.rewards_BT.t() * settings["reward_scale"],
        discounts_TB=torch.where(batch.terminated_BT, 0.0, settings["gamma"]).t(),
        mask_TB=(batch.mask_BT & alive_B.unsqueeze(-1)).t(),
        lambda_=settings["lambda"],
        reduction=reduction,
        **{key: settings[key] for key in keys},
    )


SETTINGS = {
    "gamma": 0.9,
    "reward_scale": 0.7,
    "rho_bar": 1.2,
    "c_bar": 0.9,
    "pg_rho_bar": 1.5,
    "lambda": 0.8,
    "value_cost": 0.6,
    "entropy_cost": 0.05,
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_gradient_and_step_are_those_of_the_formulas(make_step, make_batch, reduction):
    batch, alive_B = make_batch(), torch.tensor([True, True, False, True, True])
    step = make_step(lr=0.01, grad_clip=0.5, reduction=reduction, **SETTINGS)
    by_hand = make_step()
    terms = loss_of(by_hand, batch, alive_B, SETTINGS, reduction)
    terms.total.backward()
    parameters = list(by_hand.policy.model.parameters())
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    torch.optim.Adam(parameters, lr=0.01, eps=1e-5).step()

    result = step.run(batch, alive_B, 0)
    stats = result.stats
    assert result.num_updates
    assert norm > 0.5
    for name in ("policy", "value", "entropy", "total"):
        assert stats[f"loss/{name}"] == pytest.approx(getattr(terms, name).item(), rel=1e-4)
    assert stats["grad/norm"] == pytest.approx(float(norm), rel=1e-4)
    # Reported entropy is the plain mean over valid rows, whatever the reduction.
    count = (batch.mask_BT & alive_B.unsqueeze(-1)).sum().item()
    entropy = terms.sum_entropy.item() / count
    assert stats["policy/entropy"] == pytest.approx(entropy, rel=1e-4)
    for mine, theirs in zip(step.policy.model.parameters(), parameters, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_dead_columns_have_no_influence(make_step, make_batch):
    batch, alive_B = make_batch(), torch.tensor([True, False, True, True, False])
    rewards_BT = torch.where(alive_B.unsqueeze(-1), batch.rewards_BT, math.nan)
    kept = batch.take(alive_B.nonzero().flatten())
    steps = [make_step() for _ in range(2)]
    results = [
        steps[0].run(changed(batch, rewards_BT=rewards_BT), alive_B, 0),
        steps[1].run(kept, torch.ones(3, dtype=torch.bool), 0),
    ]
    for mine, theirs in zip(*(step.parameters for step in steps), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-7)
    assert results[0].stats == pytest.approx(results[1].stats, rel=1e-4)


@pytest.mark.parametrize(
    ("parts", "settings", "cost"),
    [
        ([CHOICE], {}, 0.01),
        ([NUMBER], {}, 0.0),
        ([CHOICE, NUMBER], {}, 0.01),
        ([NUMBER], {"entropy_cost": 0.02}, 0.02),
        ([CHOICE], {"entropy_cost": 0.0}, 0.0),
        ([NUMBER], {"entropy_cost_end": 0.0, "schedule_env_steps": 100}, 0.01),
    ],
)
def test_an_entropy_bonus_is_usual_for_choices(schema, parts, settings, cost):
    spaces = dataclasses.replace(schema, action=ActionSpec(tuple(parts)))
    section = AlgorithmSection.model_validate(settings)
    step = UpdateStep(Policy(spaces, ModelSection(), seed=0), section)
    assert step.section.entropy_cost == cost
    if len(parts) == 1:
        batch = random_batch(spaces)
        assert step.run(batch, ALIVE_B, 0).stats["algorithm/entropy_cost"] == cost


def test_schedules_follow_the_env_steps_trained(make_step, make_batch):
    """Adam's first step is the rate times the gradient's sign, where epsilon is small."""
    settings = {"lr": 1e-2, "lr_end": 0.0, "entropy_cost": 0.1, "entropy_cost_end": 0.3}
    settings |= {"schedule_env_steps": 1000, "optimizer_options": {"eps": 1e-12}}
    for env_steps, lr, cost in ((0, 1e-2, 0.1), (500, 5e-3, 0.2), (1000, 0.0, 0.3), (2000, 0, 0.3)):
        step = make_step(**settings)
        before = step.policy.model.value_head.bias.item()
        stats = step.run(make_batch(), ALIVE_B, env_steps).stats
        assert stats["algorithm/lr"] == pytest.approx(lr)
        assert stats["algorithm/entropy_cost"] == pytest.approx(cost)
        assert stats["loss/entropy"] == pytest.approx(-cost * stats["policy/entropy"], rel=1e-5)
        moved = abs(step.policy.model.value_head.bias.item() - before)
        assert moved == pytest.approx(lr, rel=1e-3)


def test_a_loss_that_overflows_is_skipped_though_its_gradient_does_not(make_step, make_batch):
    step, batch = make_step(), make_batch()
    batch.rewards_BT[:, 0] = 3e19
    batch.mask_BT[:, 0] = True
    before = remembered(step)
    for number in (1, 2):
        result = step.run(batch, ALIVE_B, 0)
        assert not result.num_updates
        assert result.num_failed_in_a_row == number
        assert set(result.not_finite) == {"loss/value", "loss/total"}
        assert result.stats["loss/total"] == math.inf
        assert math.isfinite(result.stats["grad/norm"])
    assert is_same(before, remembered(step))
    assert step.run(make_batch(), ALIVE_B, 0).num_failed_in_a_row == 0


@pytest.mark.parametrize(
    ("gradient", "settings", "names"),
    # The square of the latter is too large for what an optimizer remembers.
    [
        (math.inf, {}, ("grad/norm",)),
        (3e18, {"grad_clip": None}, ("grad/norm (too large)",)),
    ],
)
def test_a_gradient_that_is_not_finite_or_too_large_is_skipped_though_the_loss_is(
    by_torch, make_step, make_batch, gradient, settings, names
):
    step = make_step(**settings)
    weight = step.policy.model.value_head.weight
    weight.register_hook(lambda found: torch.full_like(found, gradient))
    before = remembered(step)
    result = step.run(make_batch(), ALIVE_B, 0)
    assert not result.num_updates
    assert result.not_finite == names
    assert math.isfinite(result.stats["loss/total"])
    assert is_same(before, remembered(step))


@pytest.mark.parametrize(
    "settings",
    [{}, {"name": "appo"}, {"name": "ppo", "num_minibatches": 2}, {"normalize_returns": True}],
)
@pytest.mark.parametrize("core", [None, "lstm"])
def test_large_columns_neither_stop_nor_spoil_the_others(make_step, make_batch, settings):
    """With relu the loss of what is admitted overflows: 50 such updates would end the run."""
    step = make_step(activation="relu", **settings)
    for seed in range(8):
        batch = make_batch(8, seed)
        batch.obs[""][2:4] = 1e15
        batch.rewards_BT[2:4] = 1e15 * batch.mask_BT[2:4]
        before = weights_of(step)
        result = step.run(batch, torch.ones(8, dtype=torch.bool), 0)
        assert result.num_updates
        assert result.num_failed_in_a_row == 0
        assert set(result.is_failed_B.nonzero().flatten().tolist()) <= {2, 3}
        assert not are_equal(before, weights_of(step))
        assert all(tensor.isfinite().all() for tensor in weights_of(step))


def test_the_others_are_learned_from_as_if_the_bad_ones_were_dead(make_step, make_batch):
    batch = make_batch()
    batch.rewards_BT[1], batch.mask_BT[1] = math.nan, True
    alive_B = torch.tensor([True, False, True, True, True])
    spoilt, clean = make_step(), make_step()
    result = spoilt.run(batch, ALIVE_B, 0)
    assert torch.equal(result.is_failed_B, ~alive_B)
    assert result.not_finite
    clean.run(batch, alive_B, 0)
    for mine, theirs in zip(spoilt.parameters, clean.parameters, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    # Where none is good, only the living ones are named.
    batch.rewards_BT[:, 0], batch.mask_BT[:, 0] = math.nan, True
    result = spoilt.run(batch, alive_B, 0)
    assert not result.num_updates
    assert torch.equal(result.is_failed_B, alive_B)


class Halved(torch.nn.Module):
    """One part learns, one is frozen on purpose, and one by a slip."""

    num_out = 4

    def __init__(self, obs, section):
        super().__init__()
        self.learns, self.frozen, self.slips = (torch.nn.Linear(3, 4) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, obs):
        return self.learns(obs[""]) + self.frozen(obs[""]) + self.slips(obs[""]).detach()


def test_weights_that_want_a_gradient_and_get_none_are_named_once(schema, make_batch, caplog):
    policy = Policy(schema, ModelSection(name=f"{__name__}:Halved"), seed=0)
    step, none_valid = UpdateStep(policy, AlgorithmSection(name="impala")), make_batch()
    none_valid.mask_BT.fill_(False)
    for batch, num_told in ((none_valid, 0), (make_batch(), 1), (make_batch(), 1)):
        step.run(batch, ALIVE_B, 0)
        assert len(caplog.messages) == num_told
    named = "policy_torso.slips.weight, policy_torso.slips.bias"
    assert caplog.messages[0].startswith(f"no gradient came to {named}: drop no_grad or detach, ")


def test_of_ours_no_weight_is_without_a_gradient(make_step, make_batch, caplog):
    for settings in ({}, {"entropy_cost": 0.0, "value_cost": 0.0}):
        assert make_step(**settings).run(make_batch(), ALIVE_B, 0).num_updates
    assert caplog.messages == []
