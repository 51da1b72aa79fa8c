"""GAE against the paper's other definition: the weighted mean of all n-step advantages."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from impala_async.algo.gae import gae
from tests.algo.batches import LAMBDAS, Batch, batches, column


def by_n_step_returns(batch, t, b, lambda_):
    """(1 - lambda) sum of lambda^(n-1) A^(n), the longest one taking all weight that is left."""
    reward, discount, value, mask = (tensor[:, b].tolist() for tensor in batch[1:])
    if not mask[t]:
        return 0.0
    total, n_step_return, weight, discounting = 0.0, 0.0, 1.0, 1.0
    for i in range(t, len(reward)):
        n_step_return += discounting * reward[i]
        discounting *= discount[i]
        advantage = n_step_return + discounting * value[i + 1] - value[t]
        if i + 1 == len(reward) or not mask[i + 1] or discounting == 0:
            return float(total + weight * advantage)
        total += weight * (1 - lambda_) * advantage
        weight *= lambda_
    raise AssertionError("a column has a last row")


@settings(max_examples=150)
@given(batch=batches(), lambda_=LAMBDAS)
def test_follows_the_definition_and_has_the_targets_of_on_policy_vtrace(batch, lambda_):
    got = batch.gae(lambda_)
    num_rows, num_columns = batch.mask_TB.shape
    want = np.array(
        [
            [by_n_step_returns(batch, t, b, lambda_) for b in range(num_columns)]
            for t in range(num_rows)
        ]
    )
    np.testing.assert_allclose(got.advantages_TB, want, rtol=1e-9, atol=1e-9)
    on_policy = batch._replace(log_rhos_TB=torch.zeros_like(batch.rewards_TB))
    assert torch.equal(got.targets_TB, on_policy.vtrace(lambda_=lambda_).targets_TB)


@pytest.mark.parametrize(
    ("discounts", "mask", "lambda_", "advantages"),
    [
        # One-step errors by hand: 1 + 0.5 * 2 - 1 = 1, 2 + 0.5 * 3 - 2 = 1.5, 3 + 0.5 * 4 - 3 = 2.
        ((0.5, 0.5, 0.5), (1, 1, 1), 0.0, (1, 1.5, 2)),
        ((0.5, 0.5, 0.5), (1, 1, 1), 0.5, (1.5, 2, 2)),
        ((0.5, 0.5, 0.5), (1, 1, 1), 1.0, (2.25, 2.5, 2)),
        ((0.5, 0, 0.5), (1, 1, 1), 1.0, (1, 0, 2)),
        ((0.5, 0.5, 0.5), (1, 0, 1), 1.0, (1, 0, 2)),
    ],
)
def test_literal_table(discounts, mask, lambda_, advantages):
    rows = column(0, 0, 0), column(1, 2, 3), column(*discounts)
    batch = Batch(*rows, column(1, 2, 3, 4), column(*mask, dtype=torch.bool))
    got = batch.gae(lambda_)
    assert torch.equal(got.advantages_TB, column(*advantages))
    assert torch.equal(got.targets_TB, column(1, 2, 3) + column(*advantages))


@given(batch=batches(), lambda_=LAMBDAS)
def test_nan_reaches_no_valid_row(batch, lambda_):
    mask_TB = batch.mask_TB
    clean, got = batch.gae(lambda_), batch.poisoned().gae(lambda_)
    assert torch.equal(got.advantages_TB, clean.advantages_TB)
    assert torch.equal(got.targets_TB[mask_TB], clean.targets_TB[mask_TB])


def test_it_gives_constants_in_float32_at_least():
    torch.manual_seed(0)
    names = ("rewards_TB", "discounts_TB", "values_SB")
    low = [torch.randn(5 + (name == "values_SB"), 3).bfloat16() for name in names]
    low[2].requires_grad_()
    want = gae(**{name: tensor.float() for name, tensor in zip(names, low, strict=True)})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gae(**dict(zip(names, low, strict=True)))
    for one, other in zip(got, want, strict=True):
        assert (one.dtype, one.requires_grad) == (torch.float32, False)
        assert torch.equal(one, other)
    double = gae(**dict(zip(names, low[:2], strict=False)), values_SB=low[2].double())
    assert double.advantages_TB.dtype == torch.float64


def test_what_does_not_fit_is_refused():
    fits = dict.fromkeys(("rewards_TB", "discounts_TB", "mask_TB"), torch.ones(2, 3))
    fits["values_SB"] = torch.ones(3, 3)
    gae(**fits)
    for name, value in (
        ("discounts_TB", torch.ones(2, 1)),
        ("rewards_TB", torch.ones(3, 3)),
        ("values_SB", torch.ones(2, 3)),
        ("lambda_", 2.0),
    ):
        with pytest.raises(ValueError, match=name if name == "lambda_" else r"must be \[T, B\]"):
            gae(**fits | {name: value})
