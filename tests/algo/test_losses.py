"""Losses against hand-computed tables, and the gradients that must not flow."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from impala_async.algo.losses import LossTerms, appo_loss, impala_loss
from impala_async.algo.vtrace import vtrace

nan = math.nan
LEARNED = ("log_probs_TB", "entropies_TB", "values_SB", "kl_TB")


def column(*numbers: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype).unsqueeze(1)


def random_tensors(
    seed: int, shape: tuple[int, int] = (6, 4), masked_rate: float = 0.3
) -> dict[str, Tensor]:
    """A batch for `appo_loss`; masks anywhere, and terminations behind some of the rows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(num_rows: int = shape[0]) -> Tensor:
        return torch.randn(num_rows, shape[1], dtype=torch.float64, generator=generator)

    return {
        "log_probs_TB": -normal().abs(),
        "behaviour_log_probs_TB": -normal().abs(),
        "target_log_probs_TB": -normal().abs(),
        "entropies_TB": normal().abs(),
        "kl_TB": normal().abs(),
        "rewards_TB": normal(),
        "discounts_TB": 0.9 * (torch.rand(shape, generator=generator) > 0.2).double(),
        "values_SB": normal(shape[0] + 1),
        "mask_TB": torch.rand(shape, generator=generator) >= masked_rate,
    }


def impala(tensors: dict[str, Tensor], **settings_: Any) -> LossTerms:
    ours = {k: v for k, v in tensors.items() if k not in ("target_log_probs_TB", "kl_TB")}
    return impala_loss(**ours, **settings_)


def appo(tensors: dict[str, Tensor], **settings_: Any) -> LossTerms:
    return appo_loss(**tensors, **{"kl_coeff": 0.7} | settings_)


def numbers(terms: LossTerms) -> tuple[Tensor, ...]:
    """All of it but the targets."""
    return terms[:-1]


BOTH = pytest.mark.parametrize("loss", [impala, appo])
Loss = Callable[..., LossTerms]


def gradients(loss: Loss, tensors: dict[str, Tensor], **settings_: Any) -> dict[str, Tensor]:
    learned = {k: v.clone().requires_grad_() for k, v in tensors.items() if k in LEARNED}
    total = loss(tensors | learned, **settings_).total
    got = torch.autograd.grad(total, list(learned.values()), materialize_grads=True)
    return dict(zip(learned, got, strict=True))


# Ratios 2, 1/2, 1; the rows of test_vtrace: targets 2.625, 3.25, 5, advantages 1.625, 1.25, 2,
# so squared errors 1.625^2, 1.25^2, 2^2 sum to 8.203125.
IMPALA_ROWS = {
    "log_probs_TB": column(-1, -2, -3),
    "behaviour_log_probs_TB": column(-1 - math.log(2), -2 + math.log(2), -3),
    "entropies_TB": column(0.5, 0.25, 0.75),
    "rewards_TB": column(1, 2, 3),
    "discounts_TB": column(0.5, 0.5, 0.5),
    "values_SB": column(1, 2, 3, 4),
}


def test_impala_by_hand() -> None:
    got = impala_loss(**IMPALA_ROWS, reduction="sum", value_cost=0.5, entropy_cost=0.01)
    policy, value, entropy = 1.625 + 2 * 1.25 + 3 * 2, 0.25 * 8.203125, -0.01 * 1.5
    assert got.policy.item() == pytest.approx(policy, rel=1e-12)
    assert got.value.item() == pytest.approx(value, rel=1e-12)
    assert got.entropy.item() == pytest.approx(entropy, rel=1e-12)
    assert got.kl.item() == 0
    assert got.total.item() == pytest.approx(policy + value + entropy, rel=1e-12)
    mean = impala_loss(**IMPALA_ROWS)
    assert mean.total.item() == pytest.approx((policy + value + entropy) / 3, rel=1e-12)


def test_impala_by_hand_with_a_masked_row() -> None:
    """Row 1 masked: targets 2, -, 5, advantages 1, -, 2, and two rows to divide by."""
    got = impala_loss(
        **IMPALA_ROWS,
        mask_TB=column(1, 0, 1, dtype=torch.bool),
        value_cost=2.0,
        entropy_cost=0.1,
    )
    assert got.policy.item() == pytest.approx((1 * 1 + 3 * 2) / 2, rel=1e-12)
    assert got.value.item() == pytest.approx((1 + 4) / 2, rel=1e-12)
    assert got.entropy.item() == pytest.approx(-0.1 * (0.5 + 0.75) / 2, rel=1e-12)


def test_impala_takes_its_bars_from_the_caller() -> None:
    def policy(**bars: float | None) -> float:
        return impala_loss(**IMPALA_ROWS, reduction="sum", **bars).policy.item()

    assert policy(pg_rho_bar=None) == pytest.approx(3.25 + 2 * 1.25 + 3 * 2, rel=1e-12)
    assert policy(c_bar=0.25, pg_rho_bar=0.5) == pytest.approx(0.75 + 2 * 1.25 + 3, rel=1e-12)
    assert policy(lambda_=0.5) == pytest.approx(1.5 + 2 * 1.25 + 3 * 2, rel=1e-12)
    value = impala_loss(**IMPALA_ROWS, reduction="sum", rho_bar=None).value.item()
    assert value == pytest.approx(0.25 * (2.625**2 + 1.25**2 + 2**2), rel=1e-12)


def poisoned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    mask_TB = tensors["mask_TB"]
    dirty = {
        name: torch.where(mask_TB, tensor, nan) if name.endswith("_TB") else tensor.clone()
        for name, tensor in tensors.items()
        if name != "mask_TB"
    }
    is_seen_SB = torch.zeros_like(tensors["values_SB"], dtype=torch.bool)
    is_seen_SB[:-1] |= mask_TB
    is_seen_SB[1:] |= mask_TB & (tensors["discounts_TB"] > 0)
    dirty["values_SB"][~is_seen_SB] = nan
    return dirty | {"mask_TB": mask_TB}


@BOTH
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), masked_rate=st.sampled_from([0.0, 0.3, 0.8, 1.0]))
def test_nan_in_masked_rows_changes_neither_loss_nor_gradient(
    loss: Loss, seed: int, masked_rate: float
) -> None:
    clean = random_tensors(seed, masked_rate=masked_rate)
    dirty = poisoned(clean)
    mask_TB, got_terms, want_terms = clean["mask_TB"], loss(dirty), loss(clean)
    for got, want in zip(numbers(got_terms), numbers(want_terms), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(got_terms.targets_TB[mask_TB], want_terms.targets_TB[mask_TB])
    wanted = gradients(loss, clean)
    for name, got in gradients(loss, dirty).items():
        assert torch.equal(got, wanted[name]), name


@BOTH
def test_masked_and_bootstrap_rows_have_no_gradient(loss: Loss) -> None:
    tensors = random_tensors(1)
    mask_TB = tensors["mask_TB"]
    got = gradients(loss, tensors)
    assert not got["values_SB"][-1].any()
    got["values_SB"] = got["values_SB"][:-1]
    if loss is impala:
        del got["kl_TB"]
    for name, gradient in got.items():
        assert not gradient[~mask_TB].any(), name
        assert gradient[mask_TB].any(), name


@BOTH
def test_a_batch_without_valid_rows_weighs_nothing(loss: Loss) -> None:
    tensors = random_tensors(2, masked_rate=1.0)
    assert [term.item() for term in numbers(loss(tensors))] == [0] * 6
    assert not any(gradient.any() for gradient in gradients(loss, tensors).values())


def test_impala_gradients_are_the_papers() -> None:
    """-A on log pi, value_cost (V - target) on V, -entropy_cost on H, each over the count."""
    tensors = random_tensors(3)
    mask_TB = tensors["mask_TB"]
    got = gradients(impala, tensors, value_cost=0.3, entropy_cost=0.2)
    returns = vtrace(
        log_rhos_TB=tensors["log_probs_TB"] - tensors["behaviour_log_probs_TB"],
        **{k: tensors[k] for k in ("rewards_TB", "discounts_TB", "values_SB", "mask_TB")},
    )
    errors_TB = tensors["values_SB"][:-1] - returns.targets_TB
    n = mask_TB.sum()
    torch.testing.assert_close(got["log_probs_TB"], -returns.advantages_TB / n)
    torch.testing.assert_close(got["values_SB"][:-1], 0.3 * errors_TB / n)
    torch.testing.assert_close(got["entropies_TB"], -0.2 * mask_TB.double() / n)


def test_appo_gradients_are_those_of_the_function() -> None:
    """Numerically, for what enters no return; at ratios away from the kinks of the clip."""
    tensors = random_tensors(4)

    def total(log_probs_TB: Tensor, entropies_TB: Tensor, kl_TB: Tensor) -> Tensor:
        learned = {"log_probs_TB": log_probs_TB, "entropies_TB": entropies_TB, "kl_TB": kl_TB}
        return appo(tensors | learned).total

    learned = [tensors[name].requires_grad_() for name in ("log_probs_TB", "entropies_TB", "kl_TB")]
    assert torch.autograd.gradcheck(total, learned)


def test_appo_at_the_target_is_the_plain_policy_gradient() -> None:
    tensors = random_tensors(5)
    tensors["target_log_probs_TB"] = tensors["behaviour_log_probs_TB"] = tensors["log_probs_TB"]
    both = [gradients(loss, tensors)["log_probs_TB"] for loss in (appo, impala)]
    torch.testing.assert_close(*both)


@BOTH
def test_extreme_log_ratios_give_finite_losses_and_gradients(loss: Loss) -> None:
    for low, high in ((-500.0, 0.0), (0.0, -500.0)):
        tensors = {k: v.float() for k, v in random_tensors(6, masked_rate=0.0).items()}
        tensors["log_probs_TB"] = torch.full((6, 4), low)
        tensors["behaviour_log_probs_TB"] = torch.full((6, 4), high)
        assert all(term.isfinite() for term in numbers(loss(tensors)))
        assert all(grad.isfinite().all() for grad in gradients(loss, tensors).values())


@BOTH
def test_shards_divided_by_the_global_count_sum_to_the_whole(loss: Loss) -> None:
    tensors = random_tensors(8)
    shards = [{k: v[:, part] for k, v in tensors.items()} for part in (slice(1), slice(1, 4))]
    num_valid = tensors["mask_TB"].sum()
    counts = [shard["mask_TB"].sum() for shard in shards]
    assert counts[0] != counts[1]
    for count in (num_valid, float(num_valid)):
        parts = [numbers(loss(shard, num_valid=count)) for shard in shards]
        for first, second, whole in zip(*parts, numbers(loss(tensors)), strict=True):
            torch.testing.assert_close(first + second, whole)


@BOTH
def test_a_global_count_of_zero_divides_by_one(loss: Loss) -> None:
    tensors = random_tensors(9, masked_rate=1.0)
    for count in (0, 0.0, torch.tensor(0)):
        assert loss(tensors, num_valid=count).total.item() == 0


@BOTH
def test_the_sum_is_the_mean_times_the_count(loss: Loss) -> None:
    tensors = random_tensors(10)
    sums, means = loss(tensors, reduction="sum", num_valid=1000), loss(tensors)
    assert sums.sum_entropy == means.sum_entropy
    for one, mean in zip(sums[:5], means[:5], strict=True):
        torch.testing.assert_close(one, mean * tensors["mask_TB"].sum())


@BOTH
def test_no_mask_means_all_rows(loss: Loss) -> None:
    tensors = random_tensors(11, masked_rate=0.0)
    without = {name: tensor for name, tensor in tensors.items() if name != "mask_TB"}
    for got, want in zip(loss(without), loss(tensors), strict=True):
        assert torch.equal(got, want)


@BOTH
def test_padding_changes_nothing(loss: Loss) -> None:
    """Rows appended behind the bootstrap row, whose observation the first padded row holds."""
    tensors = random_tensors(12)
    padded = {name: torch.cat([t, torch.full_like(t[:2], nan)]) for name, t in tensors.items()}
    padded["mask_TB"] = torch.cat([tensors["mask_TB"], torch.zeros(2, 4, dtype=torch.bool)])
    for got, want in zip(numbers(loss(padded)), numbers(loss(tensors)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


@BOTH
def test_low_precision_is_upcast_and_autocast_lowers_nothing(loss: Loss) -> None:
    exact = random_tensors(13)
    low = {k: v if k == "mask_TB" else v.bfloat16() for k, v in exact.items()}
    upcast = {k: v if k == "mask_TB" else v.float() for k, v in low.items()}
    want = loss(upcast)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, under_autocast = loss(low), loss(upcast)
    for terms in (cast, under_autocast):
        assert all(term.dtype == torch.float32 for term in terms)
        assert all(torch.equal(*pair) for pair in zip(terms, want, strict=True))
    assert all(term.dtype == torch.float64 for term in loss(exact))


@BOTH
def test_what_does_not_fit_is_refused(loss: Loss) -> None:
    tensors = random_tensors(14)
    with pytest.raises(ValueError, match="reduction"):
        loss(tensors, reduction="median")
    with pytest.raises(ValueError, match="lambda_"):
        loss(tensors, lambda_=-1.0)
    unused = {"values_SB", *({"target_log_probs_TB", "kl_TB"} if loss is impala else ())}
    for name in tensors.keys() - unused:
        with pytest.raises(ValueError, match=name):
            loss(tensors | {name: tensors[name][:, :1]})


def test_signatures_are_stable() -> None:
    def defaults(function: Callable[..., LossTerms]) -> dict[str, Any]:
        parameters = inspect.signature(function).parameters.values()
        assert all(p.kind is p.KEYWORD_ONLY for p in parameters)
        assert [p.name for p in parameters][-1] == "num_valid"
        return {p.name: p.default for p in parameters if p.default is not p.empty}

    shared = {
        "mask_TB": None,
        "value_cost": 0.5,
        "entropy_cost": 0.01,
        "rho_bar": 1.0,
        "c_bar": 1.0,
        "pg_rho_bar": 1.0,
        "lambda_": 1.0,
        "reduction": "mean",
        "normalize_advantages": False,
        "num_valid": None,
    }
    assert defaults(impala_loss) == shared
    appo_only = {"clip": 0.2, "is_clip": 2.0, "kl_TB": None, "kl_coeff": 0.0}
    assert defaults(appo_loss) == shared | appo_only
