"""V-trace against its definition, summed term by term in plain Python floats."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from impala_async.algo.vtrace import Returns, accumulate, scan, vtrace

BARS = st.sampled_from([None, 0.0, 0.3, 1.0, 2.5])
LAMBDAS = st.sampled_from([0.0, 0.5, 0.95, 1.0])
nan = math.nan


class Batch(NamedTuple):
    log_rhos_TB: Tensor
    rewards_TB: Tensor
    discounts_TB: Tensor
    values_SB: Tensor
    mask_TB: Tensor

    def vtrace(self, **bars: float | None) -> Returns:
        return vtrace(**self._asdict(), **bars)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Masks, terminations and log-ratios anywhere, in no order an environment would give."""
    num_rows, num_columns = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    masked_rate = draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))
    end_rate = draw(st.sampled_from([0.0, 0.2, 0.6]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (num_rows, num_columns)
    discounts = rng.choice([0.5, 0.9, 1.0], shape) * (rng.random(shape) >= end_rate)
    return Batch(
        torch.tensor(rng.normal(0, 0.7, shape)),
        torch.tensor(rng.normal(0, 1, shape)),
        torch.tensor(discounts),
        torch.tensor(rng.normal(0, 2, (num_rows + 1, num_columns))),
        torch.tensor(rng.random(shape) >= masked_rate),
    )


def by_definition(
    batch: Batch,
    rho_bar: float | None,
    c_bar: float | None,
    pg_rho_bar: float | None,
    lambda_: float,
) -> tuple[list[list[float]], list[list[float]]]:
    """v_s = V_s + sum over t >= s of (prod of discount_i c_i, s <= i < t) rho_t delta_t."""
    log_rho, reward, discount, value, mask = (tensor.tolist() for tensor in batch)
    num_rows, num_columns = batch.mask_TB.shape
    targets = [row[:] for row in value]
    advantages = [[0.0] * num_columns for _ in range(num_rows)]

    def ratio(t: int, b: int, bar: float | None) -> float:
        return min(math.exp(log_rho[t][b]), math.inf if bar is None else bar)

    def error(t: int, b: int, following: list[list[float]]) -> float:
        bootstrap = discount[t][b] * following[t + 1][b] if discount[t][b] > 0 else 0.0
        return float(reward[t][b] + bootstrap - value[t][b])

    for b in range(num_columns):
        for s in range(num_rows):
            weight = 1.0
            for t in range(s, num_rows):
                if not mask[t][b]:
                    break
                targets[s][b] += weight * ratio(t, b, rho_bar) * error(t, b, value)
                weight *= discount[t][b] * lambda_ * ratio(t, b, c_bar)
        for t in range(num_rows):
            if mask[t][b]:
                advantages[t][b] = ratio(t, b, pg_rho_bar) * error(t, b, targets)
    return targets[:-1], advantages


@settings(deadline=None, max_examples=200)
@given(batch=batches(), rho_bar=BARS, c_bar=BARS, pg_rho_bar=BARS, lambda_=LAMBDAS)
def test_follows_the_definition(
    batch: Batch,
    rho_bar: float | None,
    c_bar: float | None,
    pg_rho_bar: float | None,
    lambda_: float,
) -> None:
    got = batch.vtrace(rho_bar=rho_bar, c_bar=c_bar, pg_rho_bar=pg_rho_bar, lambda_=lambda_)
    targets, advantages = by_definition(batch, rho_bar, c_bar, pg_rho_bar, lambda_)
    np.testing.assert_allclose(got.targets_TB, targets, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(got.advantages_TB, advantages, rtol=1e-9, atol=1e-9)


def column(*numbers: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype).unsqueeze(1)


# Ratios 2, 1/2, 1; rewards 1, 2, 3; values 1, 2, 3 and 4 behind them; discount 1/2.
# By hand, all bars 1: deltas 1, 0.75, 2; accumulated 1.625, 1.25, 2.
LITERAL = [
    ({}, {}, [2.625, 3.25, 5], [1.625, 1.25, 2]),
    ({}, {"rho_bar": None, "c_bar": None, "pg_rho_bar": None}, [4.25, 3.25, 5], [3.25, 1.25, 2]),
    ({}, {"rho_bar": None}, [3.625, 3.25, 5], [1.625, 1.25, 2]),
    ({}, {"c_bar": None}, [3.25, 3.25, 5], [1.625, 1.25, 2]),
    ({}, {"pg_rho_bar": None}, [2.625, 3.25, 5], [3.25, 1.25, 2]),
    ({}, {"c_bar": 0.25, "pg_rho_bar": 0.5}, [2.125, 3, 5], [0.75, 1.25, 1]),
    ({}, {"lambda_": 0.5}, [2.25, 3, 5], [1.5, 1.25, 2]),
    ({"mask_TB": (1, 0, 1)}, {}, [2, 2, 5], [1, 0, 2]),
    ({"mask_TB": (0, 1, 1)}, {}, [1, 3.25, 5], [0, 1.25, 2]),
    ({"discounts_TB": (0.5, 0, 0.5)}, {}, [2, 2, 5], [1, 0, 2]),
    ({"discounts_TB": (0.5, 0.5, 0)}, {}, [2.375, 2.75, 3], [1.375, 0.75, 0]),
]


@pytest.mark.parametrize(("rows", "settings_", "targets", "advantages"), LITERAL)
def test_literal_table(
    rows: dict[str, tuple[float, ...]],
    settings_: dict[str, float | None],
    targets: list[float],
    advantages: list[float],
) -> None:
    tensors = {
        "log_rhos_TB": column(math.log(2), math.log(0.5), 0),
        "rewards_TB": column(1, 2, 3),
        "discounts_TB": column(0.5, 0.5, 0.5),
        "values_SB": column(1, 2, 3, 4),
    } | {name: column(*numbers) for name, numbers in rows.items()}
    got = vtrace(**tensors, **settings_)
    np.testing.assert_allclose(got.targets_TB, column(*targets), rtol=1e-12)
    np.testing.assert_allclose(got.advantages_TB, column(*advantages), rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=100)
@given(batch=batches(), lambda_=LAMBDAS, rho_bar=BARS, gamma=st.sampled_from([0.5, 0.99, 1.0]))
def test_a_constant_world_needs_no_correction(
    batch: Batch, lambda_: float, rho_bar: float | None, gamma: float
) -> None:
    """r = 1 - gamma and V = 1: whatever is cut where, every target is 1, every advantage 0."""
    mask_TB = batch.mask_TB
    got = vtrace(
        log_rhos_TB=torch.zeros(mask_TB.shape),
        rewards_TB=torch.full(mask_TB.shape, 1 - gamma),
        discounts_TB=torch.full(mask_TB.shape, gamma),
        values_SB=torch.ones(batch.values_SB.shape),
        mask_TB=mask_TB,
        rho_bar=rho_bar,
        lambda_=lambda_,
    )
    np.testing.assert_allclose(got.targets_TB, np.ones(mask_TB.shape), atol=1e-6)
    np.testing.assert_allclose(got.advantages_TB, np.zeros(mask_TB.shape), atol=1e-6)


@pytest.mark.parametrize("end", range(6))
def test_an_episode_learns_nothing_from_the_next_one(end: int) -> None:
    """A truncated at row `end` with V = 1, then B with V = 100: A's targets stay 1."""
    num_rows = 8
    values_SB = torch.full((num_rows + 1, 1), 100.0)
    values_SB[: end + 2] = 1.0
    mask_TB = torch.ones(num_rows, 1, dtype=torch.bool)
    mask_TB[end + 1] = False
    zeros_TB = torch.zeros(num_rows, 1)
    got = vtrace(
        log_rhos_TB=zeros_TB,
        rewards_TB=zeros_TB,
        discounts_TB=torch.ones(num_rows, 1),
        values_SB=values_SB,
        mask_TB=mask_TB,
    )
    assert got.targets_TB[:, 0].tolist() == [1.0] * (end + 2) + [100.0] * (num_rows - end - 2)
    assert got.advantages_TB.tolist() == zeros_TB.tolist()


def poisoned(batch: Batch) -> Batch:
    """NaN in every place that no valid row may look at."""
    rows = [torch.where(batch.mask_TB, tensor_TB, nan) for tensor_TB in batch[:3]]
    values_SB = batch.values_SB.clone()
    num_rows = len(batch.mask_TB)
    is_seen_SB = torch.zeros_like(values_SB, dtype=torch.bool)
    is_seen_SB[:num_rows] |= batch.mask_TB
    is_seen_SB[1:] |= batch.mask_TB & (batch.discounts_TB > 0)
    values_SB[~is_seen_SB] = nan
    return Batch(*rows, values_SB, batch.mask_TB)


@settings(deadline=None, max_examples=150)
@given(batch=batches(), rho_bar=BARS, c_bar=BARS)
def test_nan_reaches_no_valid_row(batch: Batch, rho_bar: float | None, c_bar: float | None) -> None:
    bars = {"rho_bar": rho_bar, "c_bar": c_bar, "pg_rho_bar": rho_bar}
    dirty = poisoned(batch)
    clean, got = batch.vtrace(**bars), dirty.vtrace(**bars)
    mask_TB = batch.mask_TB
    assert torch.equal(got.targets_TB[mask_TB], clean.targets_TB[mask_TB])
    assert torch.equal(got.advantages_TB, clean.advantages_TB)
    assert not got.advantages_TB[~mask_TB].any()
    masked_values = dirty.values_SB[:-1][~mask_TB]
    np.testing.assert_array_equal(got.targets_TB[~mask_TB], masked_values)


def test_nan_behind_an_unmasked_termination_stays_there() -> None:
    """Two episodes back to back: the second one's broken value is none of the first one's."""
    got = vtrace(
        log_rhos_TB=column(0, 0),
        rewards_TB=column(1, 1),
        discounts_TB=column(0, 0.5),
        values_SB=column(0.25, nan, 2),
    )
    assert got.targets_TB[0].item() == 1.0
    assert got.advantages_TB[0].item() == 0.75


def test_nan_in_a_valid_row_is_not_hidden() -> None:
    for name in ("log_rhos_TB", "rewards_TB", "discounts_TB"):
        tensors = dict.fromkeys(("log_rhos_TB", "rewards_TB", "discounts_TB"), column(0.5, 0.5))
        tensors[name] = column(0.5, nan)
        got = vtrace(**tensors, values_SB=column(1, 1, 1))
        assert got.targets_TB.isnan().all(), name


@settings(deadline=None, max_examples=50)
@given(batch=batches(), seed=st.integers(0, 1000))
def test_permuting_columns_permutes_results(batch: Batch, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(batch.mask_TB.shape[1])
    permuted = Batch(*(tensor[:, order] for tensor in batch)).vtrace()
    for got, whole in zip(permuted, batch.vtrace(), strict=True):
        assert torch.equal(got, whole[:, order])


@settings(deadline=None, max_examples=150)
@given(
    batch=batches(),
    data=st.data(),
    boundary=st.sampled_from(["before masked row", "behind masked row", "behind termination"]),
)
def test_splitting_at_an_episode_end_changes_nothing(
    batch: Batch, data: st.DataObject, boundary: str
) -> None:
    cut = data.draw(st.integers(1, len(batch.mask_TB)))
    if boundary == "behind termination":
        batch.discounts_TB[cut - 1] = 0.0
    else:
        masked_row = cut if boundary == "before masked row" else cut - 1
        batch.mask_TB[masked_row : masked_row + 1] = False
    rows = [tensor_TB.split([cut, len(batch.mask_TB) - cut]) for tensor_TB in batch[:3]]
    masks_TB = batch.mask_TB[:cut], batch.mask_TB[cut:]
    first = Batch(*(pair[0] for pair in rows), batch.values_SB[: cut + 1], masks_TB[0])
    second = Batch(*(pair[1] for pair in rows), batch.values_SB[cut:], masks_TB[1])
    for *parts, whole in zip(first.vtrace(), second.vtrace(), batch.vtrace(), strict=True):
        assert torch.equal(torch.cat(parts), whole)


@settings(deadline=None, max_examples=50)
@given(batch=batches())
def test_reads_permuted_views_and_writes_to_none_of_them(batch: Batch) -> None:
    """Slots are column-major: the learner passes [T, B] views of [B, T] memory."""
    views = Batch(*(tensor.T.contiguous().T for tensor in batch))
    before = [tensor.clone() for tensor in views]
    for got, want in zip(views.vtrace(), batch.vtrace(), strict=True):
        assert torch.equal(got, want)
    assert all(torch.equal(*pair) for pair in zip(views, before, strict=True))


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("size", [20.0, 21.0, 1000.0, math.inf])
def test_log_ratios_are_clamped_before_exp(sign: int, size: float) -> None:
    got = vtrace(
        log_rhos_TB=column(sign * size),
        rewards_TB=column(1),
        discounts_TB=column(0),
        values_SB=column(0, 0),
        rho_bar=None,
        pg_rho_bar=None,
    )
    want = pytest.approx(math.exp(sign * 20), rel=1e-12)
    assert got.targets_TB.item() == want
    assert got.advantages_TB.item() == want


@pytest.mark.parametrize("sum_up", [accumulate, scan])
def test_accumulate_stops_at_a_zero_carry(sum_up: Callable[[Tensor, Tensor], Tensor]) -> None:
    got = sum_up(column(1, 2, nan), column(0.5, 0, 1))
    assert got[:2].tolist() == [[2.0], [2.0]]
    assert got[2].isnan().all()


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 5, 8, 20, 51])
@pytest.mark.parametrize("stop_rate", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("behind", [0.5, nan, math.inf])
def test_the_scan_of_a_device_is_the_loop_of_a_cpu(
    num_rows: int, stop_rate: float, behind: float
) -> None:
    rng = np.random.default_rng(num_rows)
    shape = (num_rows, 7)
    deltas_TB = rng.normal(size=shape)
    carries_TB = rng.random(shape) * (rng.random(shape) >= stop_rate)
    # Behind a stop anything may lie.
    deltas_TB[1:][carries_TB[:-1] == 0] = behind
    pair = torch.from_numpy(deltas_TB), torch.from_numpy(carries_TB)
    close = {"rtol": 1e-12, "atol": 1e-12, "equal_nan": True}
    torch.testing.assert_close(scan(*pair), accumulate(*pair), **close)
