"""Each name is its loss, with the section's settings; a user's own is one by its name alone."""

import math
import sys

import pytest
import torch

from impala_async.algo import losses
from impala_async.algo.gae import gae
from impala_async.algo.terms import ValidRows
from impala_async.algo.vtrace import vtrace
from impala_async.config.algorithm import ALGORITHMS, AlgorithmSection
from impala_async.errors import ConfigError
from impala_async.metrics.report import merge
from impala_async.training.algorithms import MAKERS, Algorithm, View, make_algorithm
from impala_async.training.target import Target

SHARED = {"value_cost": 0.7, "reduction": "sum"}
BARS = {"rho_bar": 1.5, "c_bar": 0.7}
# The settings, and the loss that must get them.
CASES = {
    "impala": (BARS | {"pg_rho_bar": 1.2, "lambda": 0.8}, losses.impala_loss),
    "appo": (
        BARS | {"pg_rho_bar": 1.2, "lambda": 0.8, "clip": 0.05, "is_clip": 1.1, "kl_coeff": 0.4},
        losses.appo_loss,
    ),
    "ppo": ({"clip": 0.05, "lambda": 0.8}, losses.ppo_loss),
    "ppo, vtrace": (
        BARS | {"clip": 0.05, "lambda": 0.8, "returns": "vtrace"},
        losses.ppo_loss,
    ),
    "a2c": ({"lambda": 0.8}, losses.a2c_loss),
}
EACH = pytest.mark.parametrize("case", CASES)


@pytest.fixture
def view(make_step, make_batch):
    """A view of a policy that has moved away from its target."""
    policy, batch = make_step().policy, make_batch()
    inputs = (batch.obs, batch.actions, batch.mask_BT, batch.state)
    target = Target(policy, AlgorithmSection(name="appo", kl_coeff=0.4))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.manual_seed(0)))
    with torch.no_grad():
        seen = target.policy.evaluate(*inputs)
    return View(
        policy.evaluate(*inputs),
        behaviour_log_probs_TB=batch.log_probs_BT.t(),
        rewards_TB=batch.rewards_BT.t(),
        discounts_TB=torch.where(batch.terminated_BT, 0.0, 0.9).t(),
        mask_TB=batch.mask_BT.t(),
        num_valid=batch.mask_BT.sum(),
        target=seen,
        kl_coeff=0.4,
    )


def section_of(case, **settings):
    own = CASES[case][0] | SHARED | settings
    return AlgorithmSection.model_validate({"name": case.partition(",")[0]} | own)


def wanted_inputs(case, view):
    wanted = view.inputs
    if case != "a2c":
        wanted["behaviour_log_probs_TB"] = view.behaviour_log_probs_TB
    if case == "appo":
        joint_BT = view.target.joint_BT
        wanted["target_log_probs_TB"] = view.target.log_probs_TB
        wanted["kl_TB"] = joint_BT.kl(view.evaluation.joint_BT).t()
    return wanted


@EACH
@pytest.mark.parametrize("is_normal", [True, False])
def test_a_name_is_its_loss_with_the_settings_of_its_section(case, view, is_normal):
    settings, function = CASES[case]
    own = {("lambda_" if key == "lambda" else key): value for key, value in settings.items()}
    section = section_of(case, normalize_advantages=is_normal)
    got = make_algorithm(section).loss(view, 0.03)
    want = function(
        **wanted_inputs(case, view),
        **own,
        **SHARED,
        entropy_cost=0.03,
        normalize_advantages=is_normal,
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    # None of the settings is lost on the way: each default gives another loss.
    plain = function(**wanted_inputs(case, view), entropy_cost=0.03, reduction="sum")
    assert not torch.isclose(plain.total, want.total, rtol=1e-6)


@EACH
def test_targets_are_those_of_the_value_loss(case, view):
    section = section_of(case, reduction="mean")
    terms = make_algorithm(section).loss(view, 0.0)
    errors_TB = (terms.targets_TB - view.evaluation.values_SB[:-1])[view.mask_TB]
    torch.testing.assert_close(terms.value, 0.5 * 0.7 * errors_TB.square().mean())
    assert not terms.targets_TB.requires_grad


def test_stats_of_appo_are_the_exact_kl_and_the_share_beyond_the_clip(view):
    section = section_of("appo")
    stats = make_algorithm(section).stats(view)
    mask_TB = view.mask_TB
    kl_TB = view.target.joint_BT.kl(view.evaluation.joint_BT).t()
    torch.testing.assert_close(stats["policy/kl"], kl_TB[mask_TB].mean())
    log_mu_TB = view.behaviour_log_probs_TB
    weights_TB = (log_mu_TB - view.target.log_probs_TB).exp().clamp(max=1.1)
    ratios_TB = weights_TB * (view.evaluation.log_probs_TB - log_mu_TB).exp()
    share = ((ratios_TB - 1).abs() > 0.05)[mask_TB].float().mean()
    torch.testing.assert_close(stats["policy/clip_fraction"], share)
    assert 0 < share < 1


def test_stats_of_ppo_are_of_what_acted(view):
    stats = make_algorithm(section_of("ppo")).stats(view)
    log_ratios_TB = view.evaluation.log_probs_TB - view.behaviour_log_probs_TB
    ratios = log_ratios_TB[view.mask_TB].exp()
    torch.testing.assert_close(stats["policy/kl"], (ratios - 1 - ratios.log()).mean())
    share = ((ratios - 1).abs() > 0.05).float().mean()
    torch.testing.assert_close(stats["policy/clip_fraction"], share)
    assert stats["policy/kl"] > 0


def test_stats_know_nothing_of_masked_rows(view):
    mask_TB = view.mask_TB
    dirty = view._replace(
        behaviour_log_probs_TB=torch.where(mask_TB, view.behaviour_log_probs_TB, math.nan)
    )
    for name in ("appo", "ppo"):
        algorithm = make_algorithm(section_of(name))
        got, want = algorithm.stats(dirty), algorithm.stats(view)
        assert got == want
        assert all(stat.isfinite() for stat in got.values())


def test_without_kl_there_is_no_gradient_from_it(view):
    """And where it is infinite, the loss is finite."""
    algorithm = make_algorithm(section_of("appo"))
    free = view._replace(kl_coeff=0.0)
    assert algorithm.loss(free, 0.0).kl == 0
    assert algorithm.loss(view, 0.0).kl > 0


def test_returns_are_of_the_kind_that_is_named(view):
    def targets_of(name):
        section = AlgorithmSection(name=name)
        return valid(make_algorithm(section).loss(view, 0.0).targets_TB)

    def valid(targets_TB):
        return torch.where(view.mask_TB, targets_TB, 0.0)

    names = ("rewards_TB", "discounts_TB", "values_SB", "mask_TB")
    numbers = {name: view.inputs[name] for name in names}
    assert torch.equal(targets_of("a2c"), valid(gae(**numbers, lambda_=0.95).targets_TB))
    log_rhos_TB = view.evaluation.log_probs_TB - view.behaviour_log_probs_TB
    want = vtrace(log_rhos_TB=log_rhos_TB, **numbers).targets_TB
    assert torch.equal(targets_of("impala"), valid(want))


def test_the_settings_know_those_that_there_are():
    assert MAKERS.keys() == ALGORITHMS.keys()


# -------------------- a user's own


def imitation(section):
    """A whole algorithm: it makes what was done likelier, near a target network; no value."""

    def loss(view, entropy_cost):
        evaluation = view.evaluation
        rows = ValidRows(evaluation.values_SB, view.mask_TB, section.reduction, None)
        return rows.terms(
            -rows.take(evaluation.log_probs_TB),
            evaluation.values_SB[:-1].detach(),
            evaluation.values_SB,
            evaluation.entropies_TB,
            section.value_cost,
            entropy_cost,
        )

    def stats(view):
        target_TB = view.target.log_probs_TB
        return {"policy/kl": view.mean(target_TB - view.evaluation.log_probs_TB)}

    return Algorithm(loss, stats, has_target=True)


def fails(section):
    return {}["no such key"]


def makes_nothing(section):
    return None


def own(name, **settings):
    return {"name": f"{__name__}:{name}"} | settings


def test_a_users_own_is_trained_with_and_resumed(make_step, make_batch, all_alive):
    settings = own("imitation", target_update_every_updates=2, tau=0.5, rho_bar=3.0, clip=0.1)
    step, resumed = make_step(lr=1e-2, **settings), make_step(seed=1, lr=1e-2, **settings)
    batch = make_batch()
    losses = [step.run(batch, all_alive, 0).stats["loss/policy"] for _ in range(9)]
    assert losses[-1] < losses[0] - 0.01
    resumed.restore(step.capture())
    stats = [each.run(batch, all_alive, 0).stats for each in (step, resumed)]
    assert stats[0] == stats[1]
    assert stats[0]["policy/kl"] != 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fails", r"failed when it was made, at .*test_algorithms\.py:[0-9]+: KeyError"),
        ("makes_nothing", "must make an Algorithm of .*, not NoneType"),
        ("missing", "has no 'missing'"),
        ("SHARED", "is of type dict, and cannot be called"),
    ],
)
def test_one_that_cannot_be_made_is_told_why(name, text):
    section = AlgorithmSection.model_validate(own(name))
    with pytest.raises(ConfigError, match=rf"^algorithm\.name: .*{name}.*{text}"):
        make_algorithm(section)


OWN = """
import dataclasses

import torch

from impala_async.algo.terms import ValidRows
from impala_async.training.algorithms import Algorithm


def loss(view, entropy_cost):
    seen = view.evaluation
    rows = ValidRows(seen.values_SB, view.mask_TB, "mean", view.num_valid)
    targets_TB = seen.values_SB[:-1].detach()
    return rows.terms(
        -rows.take(seen.log_probs_TB), targets_TB, seen.values_SB, seen.entropies_TB, 0.5, 0.0
    )


def good(section):
    return Algorithm(loss, lambda view: {"user/surprise": view.mean(-view.evaluation.log_probs_TB)})


def undeclared(section):
    return Algorithm(loss, lambda view: {"debug/My Norm": torch.tensor(1.0)})


def of_others(section):
    return Algorithm(loss, lambda view: {"updates": torch.tensor(1.0)})


def number(section):
    return Algorithm(loss, lambda view: {"user/x": 1.0})


def wide(section):
    return Algorithm(loss, lambda view: {"user/x": view.rewards_TB})


def no_dict(section):
    return Algorithm(loss, lambda view: None)


def fails(section):
    return Algorithm(lambda view, entropy_cost: view.rewards)


def gives_a_tensor(section):
    return Algorithm(lambda view, entropy_cost: loss(view, entropy_cost).total)


def constant(section):
    def without_gradient(view, entropy_cost):
        return loss(view, entropy_cost)._replace(total=torch.zeros(()))

    return Algorithm(without_gradient)


def in_place(section):
    def clamped(view, entropy_cost):
        view.behaviour_log_probs_TB.clamp_(min=-1)
        return loss(view, entropy_cost)

    return Algorithm(clamped)


def in_place_stats(section):
    return Algorithm(loss, lambda view: {"user/x": view.rewards_TB.mul_(2).sum()})


def without_kl(section):
    return Algorithm(loss, has_target=True)
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_algorithms.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_algorithms"
    sys.modules.pop("own_algorithms", None)


def test_a_metric_of_ones_own_needs_no_declaration(own_module, make_step, make_batch, all_alive):
    step = make_step(name=f"{own_module}:good")
    step.prepare(make_batch())
    stats = step.run(make_batch(), all_alive, 0).stats
    assert stats["user/surprise"] > 0
    assert merge(stats)["user/surprise"] == stats["user/surprise"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("undeclared", r"reports 'debug/My Norm', .* but a name like user/my_norm$"),
        ("of_others", "reports 'updates', which is no metric of an update: .* user/updates$"),
        ("number", "reports user/x as a float, and must report a tensor without dimensions"),
        ("wide", r"reports user/x as a tensor of shape \[6, 5\]"),
        ("no_dict", "must be a dict from name to tensor, not a NoneType"),
        ("fails", r"failed in its loss, at .*own_algorithms\.py:\d+: AttributeError"),
        ("gives_a_tensor", "must give LossTerms of .*, not Tensor"),
        ("constant", "has no gradient"),
        ("in_place", r"changes view\.behaviour_log_probs_TB in place"),
        ("in_place_stats", r"changes view\.rewards_TB in place"),
        ("without_kl", "must hold policy/kl"),
    ],
)
def test_what_is_wrong_with_ones_own_is_told_before_anything_is_trained(
    own_module, make_step, make_team_step, make_batch, name, text
):
    for make in (make_step, make_team_step):
        step = make(name=f"{own_module}:{name}")
        with pytest.raises(ConfigError, match=f"^algorithm.name: .*{own_module}:{name} .*{text}"):
            step.prepare(make_batch())
