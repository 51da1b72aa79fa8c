"""Losses against hand-computed tables and plain loops, and the gradients that must not flow."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.algo.gae import gae
from impala_async.algo.losses import appo_loss, impala_loss, ppo_loss
from impala_async.algo.vtrace import vtrace
from tests.algo.batches import column, nan, poisoned_values

LEARNED = ("log_probs_TB", "entropies_TB", "values_SB", "kl_TB")
LOSSES = {
    "impala": (impala_loss, {}),
    "appo": (appo_loss, {"kl_coeff": 0.7}),
    "ppo": (ppo_loss, {}),
    "ppo on vtrace": (ppo_loss, {"returns": "vtrace"}),
    "ppo on vtrace, from before": (ppo_loss, {"returns": "vtrace"}),
    "a2c": (ppo_loss, {"clip": None}),
}
EACH = pytest.mark.parametrize("name", LOSSES)


def inputs_of(name):
    parameters = set(inspect.signature(LOSSES[name][0]).parameters)
    if "before" not in name:
        parameters -= {"before_log_probs_TB"}
    return {parameter for parameter in parameters if parameter.endswith(("_TB", "_SB"))}


def run(name, tensors, **settings_):
    """The loss of this name on those of the tensors that it takes."""
    function, usual = LOSSES[name]
    ours = {key: tensors[key] for key in tensors.keys() & inputs_of(name)}
    return function(**ours, **usual | settings_)


def random_tensors(seed, masked_rate=0.3):
    """A batch for every loss; masks anywhere, and terminations behind some of the rows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(num_rows=6):
        return torch.randn(num_rows, 4, dtype=torch.float64, generator=generator)

    return {
        "log_probs_TB": -normal().abs(),
        "behaviour_log_probs_TB": -normal().abs(),
        "target_log_probs_TB": -normal().abs(),
        "before_log_probs_TB": -normal().abs(),
        "entropies_TB": normal().abs(),
        "kl_TB": normal().abs(),
        "rewards_TB": normal(),
        "discounts_TB": 0.9 * (torch.rand(6, 4, generator=generator) > 0.2).double(),
        "values_SB": normal(7),
        "mask_TB": torch.rand(6, 4, generator=generator) >= masked_rate,
    }


def gradients(name, tensors, **settings_):
    learned = {k: v.clone().requires_grad_() for k, v in tensors.items() if k in LEARNED}
    total = run(name, tensors | learned, **settings_).total
    got = torch.autograd.grad(total, list(learned.values()), materialize_grads=True)
    return {k: v for k, v in zip(learned, got, strict=True) if k in inputs_of(name)}


def close(got, want):
    return bool(got.item() == pytest.approx(want, rel=1e-12))


# -------------------- by hand

# Ratios 2, 1/2, 1; by V-trace targets 2.625, 3.25, 5, advantages 1.625, 1.25, 2,
# so squared errors 1.625^2, 1.25^2, 2^2 sum to 8.203125.
ROWS = {
    "log_probs_TB": column(-1, -2, -3),
    "behaviour_log_probs_TB": column(-1 - math.log(2), -2 + math.log(2), -3),
    "entropies_TB": column(0.5, 0.25, 0.75),
    "rewards_TB": column(1, 2, 3),
    "discounts_TB": column(0.5, 0.5, 0.5),
    "values_SB": column(1, 2, 3, 4),
}


def test_impala_by_hand():
    got = impala_loss(**ROWS, reduction="sum", value_cost=0.5, entropy_cost=0.01)
    policy, value, entropy = 1.625 + 2 * 1.25 + 3 * 2, 0.25 * 8.203125, -0.01 * 1.5
    for term, want in zip(got, (policy, value, entropy, 0, policy + value + entropy), strict=False):
        assert close(term, want)
    assert close(impala_loss(**ROWS).total, (policy + value + entropy) / 3)
    # Row 1 masked: targets 2, -, 5, advantages 1, -, 2, and two rows to divide by.
    mask_TB = column(1, 0, 1, dtype=torch.bool)
    masked = impala_loss(**ROWS, mask_TB=mask_TB, value_cost=2.0, entropy_cost=0.1)
    wanted = ((1 * 1 + 3 * 2) / 2, (1 + 4) / 2, -0.1 * (0.5 + 0.75) / 2)
    for term, want in zip(masked, wanted, strict=False):
        assert close(term, want)


def transition(pi, mu, target, reward):
    """One row that ends its episode, value 0: the advantage is min(1, target / mu) * reward."""
    return {
        "log_probs_TB": column(math.log(pi)).requires_grad_(),
        "behaviour_log_probs_TB": column(math.log(mu)),
        "target_log_probs_TB": column(math.log(target)),
        "entropies_TB": column(0.5),
        "values_SB": column(0, 0),
        "rewards_TB": column(reward),
        "discounts_TB": column(0),
    }


# pi, mu, target, reward; then by clip(mu / target, 0, 2) * pi / mu = ratio: surrogate, and its
# gradient, which is the unclipped surrogate or, beyond the clip, 0.
APPO_TABLE = [
    (0.50, 0.50, 0.50, 2.0, -2.0, -2.0),  # ratio 1, advantage 2
    (0.55, 0.50, 0.50, 2.0, -2.2, -2.2),  # ratio 1.1 within the clip
    (0.80, 0.50, 0.50, 2.0, -2.4, 0),  # ratio 1.6, clipped to 1.2
    (0.80, 0.50, 0.50, -2.0, 3.2, 3.2),  # ratio 1.6, negative advantage: not clipped
    (0.20, 0.50, 0.50, -2.0, 1.6, 0),  # ratio 0.4, clipped to 0.8
    (0.20, 0.50, 0.50, 2.0, -0.8, -0.8),  # ratio 0.4, positive advantage: not clipped
    (0.40, 0.40, 0.50, 2.0, -1.6, -1.6),  # weight 0.8, advantage min(1, 1.25) * 2
    (0.60, 0.80, 0.20, 2.0, -0.6, 0),  # weight 4 clipped to 2, ratio 1.5 to 1.2, advantage 0.5
    (0.60, 0.80, 0.20, -2.0, 0.75, 0.75),  # the same, not clipped: 1.5 * -0.5
    # mu / target = e^-30 and pi / mu = e^30.1, each beyond its own clamp: the ratio is e^0.1.
    (math.exp(-0.1), math.exp(-30.2), math.exp(-0.2), 1.0, -math.exp(0.1), -math.exp(0.1)),
]


def test_surrogate_of_appo_by_hand():
    for pi, mu, target, reward, surrogate, gradient in APPO_TABLE:
        rows = transition(pi, mu, target, reward)
        got = appo_loss(**rows)
        advantage = min(1, target / mu) * reward
        wanted = (surrogate, 0.25 * advantage**2, -0.005)
        for term, want in zip(got, wanted, strict=False):
            assert close(term, want), (pi, mu, target, reward)
        got.total.backward()
        assert close(rows["log_probs_TB"].grad, gradient), (pi, mu, target, reward)


def test_appo_takes_returns_of_the_target_network_and_adds_kl():
    """pi_target / mu = 2, 1/2, 1 on the rows above, and pi = 1.1 pi_target."""
    rows = ROWS | {
        "log_probs_TB": ROWS["log_probs_TB"] + math.log(1.1),
        "target_log_probs_TB": ROWS["log_probs_TB"],
    }
    got = appo_loss(**rows, kl_TB=column(0.1, 0.2, 0.6), kl_coeff=2.0)
    # mu / pi_target = 1/2, 2, 1, all within is_clip: every ratio is pi / pi_target = 1.1.
    assert close(got.policy, -1.1 * (1.625 + 1.25 + 2) / 3)
    assert close(got.value, 0.25 * 8.203125 / 3)
    assert close(got.kl, 0.3)
    assert close(got.total, (got.policy + got.value + got.entropy).item() + 0.6)
    assert appo_loss(**rows).kl.item() == 0
    narrow = appo_loss(**rows, clip=0.05, is_clip=1.5)
    # The second weight 2 becomes 1.5: ratios 1.1, 0.825, 1.1, and 1.1 is clipped to 1.05.
    assert close(narrow.policy, -(1.05 * 1.625 + 0.825 * 1.25 + 1.05 * 2) / 3)


def test_an_infinite_kl_that_weighs_nothing_leaves_the_loss_finite():
    tensors = random_tensors(0) | {"kl_TB": torch.full((6, 4), math.inf)}
    assert run("appo", tensors, kl_coeff=0.0).kl == math.inf
    assert run("appo", tensors, kl_coeff=0.0).total.isfinite()
    assert run("appo", tensors, kl_coeff=1e-9).total == math.inf
    with pytest.raises(ValueError, match="kl_TB"):
        run("appo", tensors | {"kl_TB": None}, kl_coeff=1.0)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("is_normal", [True, False])
@pytest.mark.parametrize("name", ["ppo", "ppo on vtrace", "ppo on vtrace, from before", "a2c"])
def test_ppo_and_a2c_are_sums_over_valid_rows(name, is_normal, seed):
    tensors, bars = random_tensors(seed), {"rho_bar": 1.3, "c_bar": 0.8}
    mask_TB = tensors["mask_TB"]
    batch = {key: tensors[key] for key in ("rewards_TB", "discounts_TB", "values_SB", "mask_TB")}
    if "vtrace" in name:
        towards_TB = tensors["before_log_probs_TB" if "before" in name else "log_probs_TB"]
        log_rhos_TB = towards_TB - tensors["behaviour_log_probs_TB"]
        batch |= {"log_rhos_TB": log_rhos_TB, "has_pg_ratio": False, **bars}
    targets_TB, advantages_TB = (vtrace if "vtrace" in name else gae)(**batch, lambda_=0.8)
    num_rows = int(mask_TB.sum())
    mean, deviation = advantages_TB[mask_TB].mean().item(), advantages_TB[mask_TB].std(correction=0)
    policy = value = entropy = 0.0
    for t, b in mask_TB.nonzero().tolist():
        target, advantage = targets_TB[t, b].item(), advantages_TB[t, b].item()
        if is_normal:
            advantage = (advantage - mean) / deviation.item()
        log_prob = tensors["log_probs_TB"][t, b].item()
        ratio = math.exp(log_prob - tensors["behaviour_log_probs_TB"][t, b].item())
        clipped = min(max(ratio, 0.7), 1.3)
        surrogate = min(ratio * advantage, clipped * advantage)
        policy -= log_prob * advantage if name == "a2c" else surrogate
        value += 0.5 * 0.6 * (target - tensors["values_SB"][t, b].item()) ** 2
        entropy -= 0.05 * tensors["entropies_TB"][t, b].item()
    chosen = {"value_cost": 0.6, "entropy_cost": 0.05, "lambda_": 0.8}
    if name != "a2c":
        chosen |= {"clip": 0.3, **bars}
    got = run(name, tensors, normalize_advantages=is_normal, **chosen)
    wanted = [term / num_rows for term in (policy, value, entropy)]
    for term, want in zip(got, [*wanted, 0, sum(wanted)], strict=False):
        assert term.item() == pytest.approx(want, rel=1e-6)


# -------------------- gradients


@EACH
def test_masked_and_bootstrap_rows_have_no_gradient(name):
    tensors = random_tensors(1)
    mask_TB = tensors["mask_TB"]
    got = gradients(name, tensors)
    assert not got["values_SB"][-1].any()
    got["values_SB"] = got["values_SB"][:-1]
    for key, gradient in got.items():
        assert not gradient[~mask_TB].any(), key
        assert gradient[mask_TB].any(), key


# -------------------- every loss


@EACH
@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), masked_rate=st.sampled_from([0.0, 0.3, 0.8, 1.0]))
def test_nan_in_masked_rows_changes_neither_loss_nor_gradient(name, seed, masked_rate):
    clean = random_tensors(seed, masked_rate)
    mask_TB = clean["mask_TB"]
    dirty = {key: torch.where(mask_TB, v, nan) for key, v in clean.items() if len(v) == 6}
    dirty["values_SB"] = poisoned_values(clean["values_SB"], clean["discounts_TB"], mask_TB)
    dirty["mask_TB"] = mask_TB
    got, want = run(name, dirty), run(name, clean)
    assert all(torch.equal(*pair) for pair in zip(got[:-1], want[:-1], strict=True))
    assert torch.equal(got.targets_TB[mask_TB], want.targets_TB[mask_TB])
    wanted = gradients(name, clean)
    for key, gradient in gradients(name, dirty).items():
        assert torch.equal(gradient, wanted[key]), key


@EACH
def test_a_batch_without_valid_rows_weighs_nothing(name):
    tensors = random_tensors(2, masked_rate=1.0)
    assert [term.item() for term in run(name, tensors)[:-1]] == [0] * 6
    assert not any(gradient.any() for gradient in gradients(name, tensors).values())
    assert run(name, tensors, num_valid=torch.tensor(0)).total.item() == 0


@EACH
def test_the_loss_of_a_batch_is_that_of_its_rows_however_they_come(name):
    tensors = random_tensors(8)
    plain = {"normalize_advantages": False}  # with it, parts have means of their own
    whole = run(name, tensors, **plain)
    # Shards that divide by the count of all sum to the whole.
    shards = [{k: v[:, part] for k, v in tensors.items()} for part in (slice(1), slice(1, 4))]
    num_valid = tensors["mask_TB"].sum()
    parts = [run(name, shard, num_valid=num_valid, **plain)[:-1] for shard in shards]
    for first, second, one in zip(*parts, whole[:-1], strict=True):
        torch.testing.assert_close(first + second, one)
    # The sum is the mean times the count.
    sums = run(name, tensors, reduction="sum", num_valid=torch.tensor(1000), **plain)
    assert sums.sum_entropy == whole.sum_entropy
    for total, mean in zip(sums[:5], whole[:5], strict=True):
        torch.testing.assert_close(total, mean * num_valid)
    # Rows of padding lie behind the bootstrap row, whose observation the first of them holds.
    padded = {k: torch.cat([t, torch.full_like(t[:2], nan)]) for k, t in tensors.items()}
    padded["mask_TB"] = torch.cat([tensors["mask_TB"], torch.zeros(2, 4, dtype=torch.bool)])
    for got, want in zip(run(name, padded, **plain)[:-1], whole[:-1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    # No mask means all rows.
    full = random_tensors(11, masked_rate=0.0)
    without = {key: tensor for key, tensor in full.items() if key != "mask_TB"}
    for got, want in zip(run(name, without), run(name, full), strict=True):
        assert torch.equal(got, want)


@EACH
def test_low_precision_is_upcast_and_autocast_lowers_nothing(name):
    exact = random_tensors(13)
    low = {k: v if k == "mask_TB" else v.bfloat16() for k, v in exact.items()}
    upcast = {k: v if k == "mask_TB" else v.float() for k, v in low.items()}
    want = run(name, upcast)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, under_autocast = run(name, low), run(name, upcast)
    for terms in (cast, under_autocast):
        assert all(term.dtype == torch.float32 for term in terms)
        assert all(torch.equal(*pair) for pair in zip(terms, want, strict=True))
    assert all(term.dtype == torch.float64 for term in run(name, exact))


# -------------------- what is refused, and what others call


@EACH
def test_what_does_not_fit_is_refused(name):
    tensors = random_tensors(14)
    refused = [
        ("reduction", {"reduction": "median"}),
        ("lambda_", {"lambda_": -1.0}),
    ]
    if name not in ("impala", "a2c"):
        refused += [("clip", {"clip": wrong}) for wrong in (-0.1, nan)]
    for culprit, wrong in refused:
        with pytest.raises(ValueError, match=culprit):
            run(name, tensors, **wrong)
    for key in inputs_of(name) - {"values_SB"}:
        with pytest.raises(ValueError, match=r"must be \[T, B\] = \[6, 4\]"):
            run(name, tensors | {key: tensors[key][:, :1]})


SHARED = {"mask_TB": None, "value_cost": 0.5, "entropy_cost": 0.01, "reduction": "mean"}
SHARED |= {"num_valid": None, "known": None}
BARS = {"rho_bar": 1.0, "c_bar": 1.0, "pg_rho_bar": 1.0, "lambda_": 1.0}
BARS |= {"normalize_advantages": False}
ON_POLICY = {"lambda_": 0.95, "normalize_advantages": True}


def test_signatures_are_stable():
    for function, own in (
        (impala_loss, BARS),
        (appo_loss, BARS | {"clip": 0.2, "is_clip": 2.0, "kl_TB": None, "kl_coeff": 0.0}),
        (
            ppo_loss,
            ON_POLICY
            | {"clip": 0.2, "returns": "gae", "rho_bar": 1.0, "c_bar": 1.0}
            | {"before_log_probs_TB": None},
        ),
    ):
        parameters = inspect.signature(function).parameters.values()
        assert all(p.kind is p.KEYWORD_ONLY for p in parameters), function
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        assert defaults == SHARED | own, function
