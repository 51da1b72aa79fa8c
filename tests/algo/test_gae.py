"""GAE against the paper's other definition: the weighted mean of all n-step advantages."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from impala_async.algo.gae import gae
from impala_async.algo.vtrace import Returns, vtrace

LAMBDAS = st.sampled_from([0.0, 0.5, 0.95, 1.0])


class Batch(NamedTuple):
    rewards_TB: Tensor
    discounts_TB: Tensor
    values_SB: Tensor
    mask_TB: Tensor

    def gae(self, lambda_: float) -> Returns:
        return gae(**self._asdict(), lambda_=lambda_)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    shape = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    masked_rate = draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))
    end_rate = draw(st.sampled_from([0.0, 0.2, 0.6]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    discounts = rng.choice([0.5, 0.9, 1.0], shape) * (rng.random(shape) >= end_rate)
    return Batch(
        torch.tensor(rng.normal(0, 1, shape)),
        torch.tensor(discounts),
        torch.tensor(rng.normal(0, 2, (shape[0] + 1, shape[1]))),
        torch.tensor(rng.random(shape) >= masked_rate),
    )


def by_n_step_returns(batch: Batch, t: int, b: int, lambda_: float) -> float:
    """(1 - lambda) sum of lambda^(n-1) A^(n), the longest one taking all weight that is left."""
    reward, discount, value, mask = (tensor[:, b].tolist() for tensor in batch)
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


@settings(deadline=None, max_examples=150)
@given(batch=batches(), lambda_=LAMBDAS)
def test_follows_the_definition(batch: Batch, lambda_: float) -> None:
    got = batch.gae(lambda_)
    num_rows, num_columns = batch.mask_TB.shape
    want = torch.tensor(
        [
            [by_n_step_returns(batch, t, b, lambda_) for b in range(num_columns)]
            for t in range(num_rows)
        ],
        dtype=torch.float64,
    )
    np.testing.assert_allclose(got.advantages_TB, want, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(got.targets_TB, want + batch.values_SB[:-1], rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=50)
@given(batch=batches(), lambda_=LAMBDAS)
def test_targets_are_those_of_on_policy_vtrace(batch: Batch, lambda_: float) -> None:
    on_policy = vtrace(
        **batch._asdict(), log_rhos_TB=torch.zeros_like(batch.rewards_TB), lambda_=lambda_
    )
    assert torch.equal(batch.gae(lambda_).targets_TB, on_policy.targets_TB)


def column(*numbers: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype).unsqueeze(1)


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
def test_literal_table(
    discounts: tuple[float, ...],
    mask: tuple[int, ...],
    lambda_: float,
    advantages: tuple[float, ...],
) -> None:
    values_SB = column(1, 2, 3, 4)
    got = gae(
        rewards_TB=column(1, 2, 3),
        discounts_TB=column(*discounts),
        values_SB=values_SB,
        mask_TB=column(*mask, dtype=torch.bool),
        lambda_=lambda_,
    )
    assert torch.equal(got.advantages_TB, column(*advantages))
    assert torch.equal(got.targets_TB, values_SB[:-1] + column(*advantages))


def test_an_episode_learns_nothing_from_the_next_one() -> None:
    got = gae(
        rewards_TB=torch.zeros(5, 1),
        discounts_TB=torch.ones(5, 1),
        values_SB=column(1, 1, 1, 100, 100, 100, dtype=torch.float32),
        mask_TB=column(1, 1, 0, 1, 1, dtype=torch.bool),
    )
    assert got.targets_TB[:, 0].tolist() == [1, 1, 1, 100, 100]
    assert not got.advantages_TB.any()


@settings(deadline=None, max_examples=100)
@given(batch=batches(), lambda_=LAMBDAS)
def test_nan_reaches_no_valid_row(batch: Batch, lambda_: float) -> None:
    mask_TB = batch.mask_TB
    values_SB = batch.values_SB.clone()
    is_seen_SB = torch.zeros_like(values_SB, dtype=torch.bool)
    is_seen_SB[:-1] |= mask_TB
    is_seen_SB[1:] |= mask_TB & (batch.discounts_TB > 0)
    values_SB[~is_seen_SB] = torch.nan
    rows = [torch.where(mask_TB, tensor_TB, torch.nan) for tensor_TB in batch[:2]]
    clean, got = batch.gae(lambda_), Batch(*rows, values_SB, mask_TB).gae(lambda_)
    assert torch.equal(got.advantages_TB, clean.advantages_TB)
    assert torch.equal(got.targets_TB[mask_TB], clean.targets_TB[mask_TB])


@settings(deadline=None, max_examples=50)
@given(batch=batches(), seed=st.integers(0, 1000))
def test_permuting_columns_permutes_results(batch: Batch, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(batch.mask_TB.shape[1])
    permuted = Batch(*(tensor[:, order] for tensor in batch)).gae(0.9)
    for got, whole in zip(permuted, batch.gae(0.9), strict=True):
        assert torch.equal(got, whole[:, order])


def test_precision_and_constancy() -> None:
    torch.manual_seed(0)
    rewards_TB, values_SB = torch.randn(5, 3), torch.randn(6, 3, requires_grad=True)
    discounts_TB = torch.full((5, 3), 0.9)
    low = [tensor.bfloat16() for tensor in (rewards_TB, discounts_TB, values_SB)]
    upcast = [tensor.float() for tensor in low]
    names = ("rewards_TB", "discounts_TB", "values_SB")
    want = gae(**dict(zip(names, upcast, strict=True)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gae(**dict(zip(names, low, strict=True)))
    for one, other in zip(got, want, strict=True):
        assert one.dtype == torch.float32
        assert not one.requires_grad
        assert torch.equal(one, other)
    double = gae(rewards_TB=rewards_TB, discounts_TB=discounts_TB, values_SB=values_SB.double())
    assert double.targets_TB.dtype == double.advantages_TB.dtype == torch.float64


def test_what_does_not_fit_is_refused() -> None:
    rows = dict.fromkeys(("rewards_TB", "discounts_TB", "mask_TB"), torch.ones(2, 3))
    gae(**rows, values_SB=torch.ones(3, 3))
    with pytest.raises(ValueError, match="discounts_TB must be"):
        gae(**rows | {"discounts_TB": torch.ones(2, 1)}, values_SB=torch.ones(3, 3))
    with pytest.raises(ValueError, match="to fit values_SB"):
        gae(**rows, values_SB=torch.ones(2, 3))
    with pytest.raises(ValueError, match="lambda_"):
        gae(**rows, values_SB=torch.ones(3, 3), lambda_=2.0)
