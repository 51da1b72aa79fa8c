"""V-trace against its definition, summed term by term in plain Python floats."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.algo.vtrace import ValidRows, accumulate, scan, vtrace
from tests.algo.batches import LAMBDAS, Batch, batches, column, nan

BARS = st.sampled_from([None, 0.0, 0.3, 1.0, 2.5])
ROWS = ("log_rhos_TB", "rewards_TB", "discounts_TB")


def by_definition(batch, rho_bar, c_bar, pg_rho_bar, lambda_, has_pg_ratio):
    """v_s = V_s + sum over t >= s of (prod of discount_i c_i, s <= i < t) rho_t delta_t."""
    log_rho, reward, discount, value, mask = (tensor.tolist() for tensor in batch)
    num_rows, num_columns = batch.mask_TB.shape
    targets = [row[:] for row in value]
    advantages = [[0.0] * num_columns for _ in range(num_rows)]

    def ratio(t, b, bar):
        return min(math.exp(log_rho[t][b]), math.inf if bar is None else bar)

    def error(t, b, following):
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
                weight = ratio(t, b, pg_rho_bar) if has_pg_ratio else 1.0
                advantages[t][b] = weight * error(t, b, targets)
    return targets[:-1], advantages


@settings(max_examples=200)
@given(batches(), BARS, BARS, BARS, LAMBDAS, st.booleans())
def test_follows_the_definition(batch, rho_bar, c_bar, pg_rho_bar, lambda_, has_pg_ratio):
    settings_ = {"rho_bar": rho_bar, "c_bar": c_bar, "pg_rho_bar": pg_rho_bar}
    settings_ |= {"lambda_": lambda_, "has_pg_ratio": has_pg_ratio}
    got = batch.vtrace(**settings_)
    targets, advantages = by_definition(batch, **settings_)
    np.testing.assert_allclose(got.targets_TB, targets, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(got.advantages_TB, advantages, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("end", range(6))
def test_an_episode_learns_nothing_from_the_next_one(end):
    """A truncated at row `end` with V = 1, then B with V = 100: A's targets stay 1."""
    zeros_TB, values_SB = torch.zeros(8, 1), torch.full((9, 1), 100.0)
    values_SB[: end + 2] = 1.0
    mask_TB = torch.ones(8, 1, dtype=torch.bool)
    mask_TB[end + 1] = False
    got = Batch(zeros_TB, zeros_TB, torch.ones(8, 1), values_SB, mask_TB).vtrace()
    assert got.targets_TB[:, 0].tolist() == [1.0] * (end + 2) + [100.0] * (8 - end - 2)
    assert got.advantages_TB.tolist() == zeros_TB.tolist()


@settings(max_examples=150)
@given(batch=batches(), rho_bar=BARS, c_bar=BARS)
def test_nan_reaches_no_valid_row(batch, rho_bar, c_bar):
    bars = {"rho_bar": rho_bar, "c_bar": c_bar, "pg_rho_bar": rho_bar}
    dirty, mask_TB = batch.poisoned(), batch.mask_TB
    clean, got = batch.vtrace(**bars), dirty.vtrace(**bars)
    assert torch.equal(got.targets_TB[mask_TB], clean.targets_TB[mask_TB])
    assert torch.equal(got.advantages_TB, clean.advantages_TB)
    assert not got.advantages_TB[~mask_TB].any()
    np.testing.assert_array_equal(got.targets_TB[~mask_TB], dirty.values_SB[:-1][~mask_TB])


@given(batch=batches(), data=st.data(), seed=st.integers(0, 1000))
def test_neither_order_nor_memory_nor_a_split_at_an_episode_end_changes_anything(batch, data, seed):
    cut = data.draw(st.integers(1, len(batch.mask_TB)))
    boundary = data.draw(st.sampled_from(["masked row", "behind masked row", "termination"]))
    if boundary == "termination":
        batch.discounts_TB[cut - 1] = 0.0
    else:
        masked_row = cut if boundary == "masked row" else cut - 1
        batch.mask_TB[masked_row : masked_row + 1] = False
    whole = batch.vtrace()
    rows = [batch.log_rhos_TB, batch.rewards_TB, batch.discounts_TB]
    first = Batch(*(r[:cut] for r in rows), batch.values_SB[: cut + 1], batch.mask_TB[:cut])
    second = Batch(*(r[cut:] for r in rows), batch.values_SB[cut:], batch.mask_TB[cut:])
    for *parts, want in zip(first.vtrace(), second.vtrace(), whole, strict=True):
        assert torch.equal(torch.cat(parts), want)
    order = np.random.default_rng(seed).permutation(batch.mask_TB.shape[1])
    shuffled = Batch(*(tensor[:, order] for tensor in batch))
    for got, want in zip(shuffled.vtrace(), whole, strict=True):
        assert torch.equal(got, want[:, order])
    # Slots are column-major: the learner passes [T, B] views of [B, T] memory.
    views = Batch(*(tensor.T.contiguous().T for tensor in batch))
    for got, want in zip(views.vtrace(), whole, strict=True):
        assert torch.equal(got, want)
    assert all(torch.equal(*pair) for pair in zip(views, batch, strict=True)), "it is read only"


@pytest.mark.parametrize("sign", [-1, 1])
def test_log_ratios_are_clamped_before_exp(sign):
    bars = {"rho_bar": None, "pg_rho_bar": None}
    for size in (20.0, 21.0, 1000.0, math.inf):
        row = Batch(column(sign * size), column(1), column(0), column(0, 0), column(1))
        for got in row.vtrace(**bars):
            assert got.item() == pytest.approx(math.exp(sign * 20), rel=1e-12)


@pytest.mark.parametrize("behind", [0.5, nan, math.inf])
def test_the_scan_of_a_device_is_the_loop_of_a_cpu(behind):
    for num_rows in (0, 1, 2, 3, 5, 8, 20, 51):
        for stop_rate in (0.0, 0.2, 1.0):
            rng = np.random.default_rng(num_rows)
            shape = (num_rows, 7)
            deltas_TB = rng.normal(size=shape)
            carries_TB = rng.random(shape) * (rng.random(shape) >= stop_rate)
            # Behind a stop anything may lie.
            deltas_TB[1:][carries_TB[:-1] == 0] = behind
            pair = torch.from_numpy(deltas_TB), torch.from_numpy(carries_TB)
            torch.testing.assert_close(
                scan(*pair), accumulate(*pair), rtol=1e-12, atol=1e-12, equal_nan=True
            )


def normalize(advantages_TB, mask_TB=None):
    num_rows, num_columns = advantages_TB.shape
    return ValidRows(torch.zeros(num_rows + 1, num_columns), mask_TB).normalize(advantages_TB)


def test_advantages_of_valid_rows_have_mean_0_and_deviation_1():
    mask_TB = torch.tensor([[True, False], [True, True], [False, True]])
    got_TB = normalize(torch.tensor([[1.0, nan], [3.0, 5.0], [1e9, 7.0]]), mask_TB)
    # 1, 3, 5, 7: mean 4, deviation sqrt(5).
    want_TB = torch.tensor([[-3.0, 0.0], [-1.0, 1.0], [0.0, 3.0]]) / math.sqrt(5)
    torch.testing.assert_close(got_TB, want_TB, rtol=1e-6, atol=0)
    assert got_TB.dtype == torch.float32
    assert not got_TB[~mask_TB].any()


def test_equal_advantages_become_0_and_no_valid_row_is_no_nan():
    for number in (0.0, 5.0, 1 / 3, -1e8, 1e-8):
        assert not normalize(torch.full((50, 41), number)).any(), number
    assert not normalize(torch.full((3, 2), nan), torch.zeros(3, 2, dtype=torch.bool)).any()


def test_one_float64_gives_float64_and_whole_numbers_are_read():
    ones = dict.fromkeys(ROWS, torch.ones(2, 1)) | {"values_SB": torch.ones(3, 1)}
    for name, tensor in ones.items():
        got = vtrace(**ones | {name: tensor.double()})
        assert all(tensor.dtype == torch.float64 for tensor in got), name
    rewards_TB, mask_TB = torch.tensor([[3], [3]]), torch.tensor([[1], [0]], dtype=torch.uint8)
    got = vtrace(**ones | {"rewards_TB": rewards_TB}, mask_TB=mask_TB)
    assert got.targets_TB.dtype == torch.float32
    assert got.targets_TB.tolist() == [[4.0], [1.0]]


REFUSED = [
    *((name, torch.ones(shape)) for name in (*ROWS, "mask_TB") for shape in ((3, 2), (4, 1), (4,))),
    *(("values_SB", torch.ones(shape)) for shape in ((4, 2), (5,), (0, 2))),
    *((name, -0.1) for name in ("rho_bar", "c_bar", "pg_rho_bar", "lambda_")),
    *((name, nan) for name in ("rho_bar", "c_bar", "pg_rho_bar", "lambda_")),
    ("lambda_", 1.1),
]


def test_what_does_not_fit_is_refused():
    fits = dict.fromkeys((*ROWS, "mask_TB"), torch.ones(4, 2)) | {"values_SB": torch.ones(5, 2)}
    vtrace(**fits)
    for name, value in REFUSED:
        with pytest.raises(ValueError, match=r"must be \[T" if name[-1] == "B" else name):
            vtrace(**fits | {name: value})


@settings(max_examples=100)
@given(batches(), BARS, LAMBDAS, st.data())
def test_rows_before_a_cut_have_the_targets_of_a_trajectory_that_ends_there(
    batch, bar, lambda_, data
):
    end = data.draw(st.integers(1, len(batch.mask_TB)))
    cut = batch._replace(mask_TB=batch.mask_TB.clone())
    cut.mask_TB[end:] = False
    rows = (rows_TB[:end] for rows_TB in batch[:3])
    short = Batch(*rows, batch.values_SB[: end + 1], batch.mask_TB[:end])
    bars = {"rho_bar": bar, "c_bar": bar, "pg_rho_bar": bar, "lambda_": lambda_}
    for got, want in (
        (cut.vtrace(**bars), short.vtrace(**bars)),
        (cut.gae(lambda_), short.gae(lambda_)),
    ):
        assert torch.equal(got.targets_TB[:end], want.targets_TB)
        assert torch.equal(got.advantages_TB[:end], want.advantages_TB)
        assert not got.advantages_TB[end:].any()
