"""Each name is its loss, with the section's settings; a user's own is one by its name alone."""

import itertools
import math
from functools import partial

import pytest
import torch

from impala_async.algo import losses
from impala_async.algo.vtrace import ValidRows
from impala_async.config.algorithm import ALGORITHMS, AlgorithmSection
from impala_async.errors import ConfigError
from impala_async.metrics.report import merge
from impala_async.training.algorithms import (
    MAKERS,
    Algorithm,
    View,
    make_algorithm,
    returns_of,
)
from tests.training.conftest import ALIVE_B, is_same, remembered

SHARED = {"value_cost": 0.7, "reduction": "sum"}
BARS = {"rho_bar": 1.5, "c_bar": 0.7, "pg_rho_bar": 1.2, "lambda": 0.8}
NO_PG = {key: value for key, value in BARS.items() if key != "pg_rho_bar"}
CLIPS = {"clip": 0.05, "is_clip": 1.1, "kl_coeff": 0.4}
# The settings, and the loss that must get them.
CASES = {
    "impala": (BARS, losses.impala_loss),
    "appo": (BARS | CLIPS, losses.appo_loss),
    "ppo": ({"clip": 0.05, "lambda": 0.8, "returns": "gae"}, losses.ppo_loss),
    "ppo, vtrace": (NO_PG | {"clip": 0.05, "returns": "vtrace"}, losses.ppo_loss),
    "a2c": ({"lambda": 0.8}, partial(losses.ppo_loss, clip=None)),
}
EACH = pytest.mark.parametrize("case", CASES)


@pytest.fixture
def view(make_step, make_batch):
    """A view of a policy that has moved away from its target."""
    policy, batch = make_step().policy, make_batch()
    inputs = (batch.obs, batch.actions, batch.mask_BT, batch.state)
    with torch.no_grad():
        target = policy.evaluate(*inputs)
        for parameter in policy.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.manual_seed(0)))
    return View(
        policy.evaluate(*inputs),
        behaviour_log_probs_TB=batch.log_probs_BT.t(),
        rewards_TB=batch.rewards_BT.t(),
        discounts_TB=torch.where(batch.terminated_BT, 0.0, 0.9).t(),
        mask_TB=batch.mask_BT.t(),
        num_valid=batch.mask_BT.sum(),
        target=target,
        kl_coeff=0.4,
    )


def section_of(case, **settings):
    own = CASES[case][0] | SHARED | settings
    return AlgorithmSection.model_validate({"name": case.partition(",")[0]} | own)


@EACH
@pytest.mark.parametrize("is_normal", [True, False])
def test_a_name_is_its_loss_with_the_settings_of_its_section(case, view, is_normal):
    settings, function = CASES[case]
    inputs = view.inputs
    if case == "appo":
        inputs["target_log_probs_TB"] = view.target.log_probs_TB
        inputs["kl_TB"] = view.target.joint_BT.kl(view.evaluation.joint_BT).t()
    own = {("lambda_" if key == "lambda" else key): value for key, value in settings.items()}
    normal = {"normalize_advantages": is_normal}
    got = make_algorithm(section_of(case, **normal)).loss(view, 0.03)
    want = function(**inputs, **own, **SHARED, **normal, entropy_cost=0.03)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    # None of the settings is lost on the way: each default gives another loss.
    plain = function(**inputs, entropy_cost=0.03, reduction="sum")
    assert not torch.isclose(plain.total, want.total, rtol=1e-6)
    # Targets are those of the value loss.
    got = make_algorithm(section_of(case, reduction="mean")).loss(view, 0.0)
    errors_TB = (got.targets_TB - view.evaluation.values_SB[:-1])[view.mask_TB]
    torch.testing.assert_close(got.value, 0.5 * 0.7 * errors_TB.square().mean())
    assert not got.targets_TB.requires_grad


@EACH
def test_returns_that_are_known_before_are_those_of_the_loss(case, view):
    for settings in ({}, {"normalize_advantages": True}):
        section = section_of(case, **settings)
        loss = make_algorithm(section).loss
        known = returns_of(view._replace(kl_coeff=0.0), section)
        assert not known.targets_TB.requires_grad
        alone, told = loss(view, 0.03), loss(view._replace(known=known), 0.03)
        assert all(torch.equal(a, b) for a, b in zip(alone, told, strict=True))
        others = loss(view._replace(known=known._replace(targets_TB=known.targets_TB + 1)), 0.03)
        assert not torch.equal(others.value, told.value)


def test_stats_are_of_valid_rows_alone(view):
    """appo: the exact KL and the share beyond the clip. ppo: an estimate, to what acted."""
    mask_TB, log_mu_TB = view.mask_TB, view.behaviour_log_probs_TB
    dirty = view._replace(behaviour_log_probs_TB=torch.where(mask_TB, log_mu_TB, math.nan))
    found = {}
    for name in ("appo", "ppo"):
        algorithm = make_algorithm(section_of(name))
        found[name] = algorithm.stats(view)
        assert algorithm.stats(dirty) == found[name]
    to_mu_TB = (view.evaluation.log_probs_TB - log_mu_TB).exp()
    weights_TB = (log_mu_TB - view.target.log_probs_TB).exp().clamp(max=1.1)
    wanted = {
        "appo": (view.target.joint_BT.kl(view.evaluation.joint_BT).t(), weights_TB * to_mu_TB),
        "ppo": (to_mu_TB - 1 - to_mu_TB.log(), to_mu_TB),
    }
    for name, (kl_TB, ratios_TB) in wanted.items():
        torch.testing.assert_close(found[name]["policy/kl"], kl_TB[mask_TB].mean())
        share = ((ratios_TB - 1).abs() > 0.05)[mask_TB].float().mean()
        torch.testing.assert_close(found[name]["policy/clip_fraction"], share)
        assert 0 < share <= 1
        assert found[name]["policy/kl"] > 0


def test_the_settings_know_those_that_there_are():
    assert MAKERS.keys() == ALGORITHMS.keys()


def own_loss(view, entropy_cost):
    """It makes what was done likelier; no value."""
    seen = view.evaluation
    rows = ValidRows(seen.values_SB, view.mask_TB)
    targets_TB = seen.values_SB[:-1].detach()
    policy_TB = -rows.take(seen.log_probs_TB)
    return losses.loss_terms(rows, policy_TB, targets_TB, seen.entropies_TB, 0.5, 0.0)


def clamped_loss(view, entropy_cost):
    view.behaviour_log_probs_TB.clamp_(min=-1)
    return own_loss(view, entropy_cost)


def before_loss(view, entropy_cost):
    told.append((entropy_cost, view.before_log_probs_TB is not None))
    return own_loss(view, entropy_cost)


told = []


def wants_before(section):
    told.append(section.entropy_cost)
    return Algorithm(before_loss, wants_before_log_probs=True)


def own_stats(view):
    log_probs_TB = view.evaluation.log_probs_TB
    kl = view.mean(view.target.log_probs_TB - log_probs_TB)
    return {"policy/kl": kl, "user/surprise": view.mean(-log_probs_TB)}


def with_loss(*functions, **more):
    return lambda section: Algorithm(*functions, **more)


imitation = with_loss(own_loss, own_stats, has_target=True)
without_kl = with_loss(own_loss, has_target=True)
undeclared = with_loss(own_loss, lambda view: {"debug/My Norm": torch.tensor(1.0)})
wide = with_loss(own_loss, lambda view: {"user/x": view.rewards_TB})
no_dict = with_loss(own_loss, lambda view: None)
in_place_stats = with_loss(own_loss, lambda view: {"user/x": view.rewards_TB.mul_(2).sum()})
in_place = with_loss(clamped_loss)
fails = with_loss(lambda view, cost: view.returns_TB)
gives_a_tensor = with_loss(lambda view, cost: own_loss(view, cost).total)
constant = with_loss(lambda view, cost: own_loss(view, cost)._replace(total=torch.zeros(())))


by_row = with_loss(lambda view, cost: own_loss(view, cost)._replace(total=view.rewards_TB))
plain_number = with_loss(lambda view, cost: own_loss(view, cost)._replace(entropy=0.0))
all_values = with_loss(
    lambda view, cost: own_loss(view, cost)._replace(targets_TB=view.evaluation.values_SB.detach())
)


def nothing(section): ...


def without_key(section):
    return {}["no such key"]


def test_a_users_own_is_trained_with_and_resumed(make_step, make_batch):
    """Every key is allowed, and a metric of its own needs no declaration."""
    settings = {"name": f"{__name__}:imitation", "lr": 1e-2, "rho_bar": 3.0, "clip": 0.1}
    settings |= {"target_update_every_updates": 2, "tau": 0.5}
    step, resumed = make_step(**settings), make_step(seed=1, **settings)
    batch = make_batch()
    step.prepare(batch)
    losses = [step.run(batch, ALIVE_B, 0).stats["loss/policy"] for _ in range(9)]
    assert losses[-1] < losses[0] - 0.01
    resumed.restore(step.capture())
    stats = [each.run(batch, ALIVE_B, 0).stats for each in (step, resumed)]
    assert stats[0] == stats[1]
    assert stats[0]["policy/kl"] != 0
    assert merge(stats[0])["user/surprise"] == stats[0]["user/surprise"] > 0


def test_ones_own_is_told_the_usual_entropy_cost_and_of_before(make_step, make_batch):
    told.clear()
    step = make_step(name=f"{__name__}:wants_before")
    step.run(step.begin(make_batch()), ALIVE_B, 0)
    assert told == [0.01, (0.01, True)]


def test_one_that_cannot_be_made_is_told_why():
    for name, text in (
        ("without_key", r"failed when it was made: KeyError.*test_algorithms\.py:[0-9]+\)"),
        ("nothing", "must make .*Algorithm, not NoneType"),
        ("missing", "has no 'missing'"),
    ):
        section = AlgorithmSection(name=f"{__name__}:{name}")
        with pytest.raises(ConfigError, match=rf"^algorithm\.name: .*{name}.*{text}"):
            make_algorithm(section)


def test_what_is_wrong_with_ones_own_is_told_before_anything_is_trained(
    make_step, make_team_step, make_batch
):
    for name, text in (
        ("undeclared", r"report 'debug/My Norm' as a tensor .* or like user/name$"),
        ("wide", "must report 'user/x' as a tensor without dimensions"),
        ("no_dict", "must give stats as a dict, not NoneType"),
        ("fails", r"failed in its loss: AttributeError.*test_algorithms\.py:\d+\)"),
        ("gives_a_tensor", "must give LossTerms .*, not Tensor"),
        ("constant", "has no gradient"),
        ("by_row", r"must give total as a tensor of shape \[\], not \[\d+, \d+\]"),
        ("plain_number", r"must give entropy as a tensor of shape \[\], not float"),
        ("all_values", r"must give targets_TB as a tensor of shape \[6, \d\], not \[7, \d\]"),
        ("in_place", r"changes view\.behaviour_log_probs_TB in place"),
        ("in_place_stats", r"changes view\.rewards_TB in place"),
        ("without_kl", "must hold policy/kl"),
    ):
        for make in (make_step, make_team_step):
            step = make(name=f"{__name__}:{name}")
            with pytest.raises(ConfigError, match=f"^algorithm.name: .*{__name__}:{name} .*{text}"):
                step.prepare(make_batch())


def test_one_is_tried_without_a_trace(make_step, make_batch):
    """Even the random generator is as before, though a user's network may draw."""
    step, blank = make_step(name=f"{__name__}:imitation", normalize_obs=True), make_batch()
    blank.mask_BT.fill_(False)
    torso = step.policy.model.policy_torso
    torso.register_forward_hook(lambda module, inputs, output: output + torch.rand_like(output))
    drawn, before = torch.random.get_rng_state(), remembered(step)
    step.prepare(blank)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert is_same(before, remembered(step))


def now_and_then(section):
    """It reports a number in every other update."""
    turns = itertools.cycle([{}, {"user/number": torch.tensor(2.0)}])
    return make_algorithm(section_of("impala"))._replace(stats=lambda view: next(turns))


def test_a_number_need_not_be_told_of_each_update(make_step, make_batch):
    step = make_step(name=f"{__name__}:now_and_then", num_minibatches=2)
    assert step.run(make_batch(), ALIVE_B, 0).stats["user/number"] == 2.0
