"""Running statistics against numpy, however the rows are split."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.models.normalizer import LARGEST, MAX_COUNT, Normalizer


def feed(normalizer, rows, valid):
    normalizer.update(torch.from_numpy(rows), torch.from_numpy(valid))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=8),
    st.floats(0.0, 1.0),
    st.sampled_from([(0.0, 1.0), (100.0, 0.1), (-3.0, 50.0)]),
    st.integers(0, 10**6),
)
def test_statistics_are_numpys_of_all_valid_rows(sizes, share, scale, seed):
    rng = np.random.default_rng(seed)
    center, spread = scale
    normalizer, seen = Normalizer(3), []
    for size in sizes:
        rows = (center + spread * rng.normal(size=(size, 3))).astype(np.float32)
        valid = rng.random(size) < share
        rows[~valid] = rng.choice([np.nan, np.inf, 1e30], size=(int((~valid).sum()), 3))
        feed(normalizer, rows, valid)
        seen.append(rows[valid])
    everything = np.concatenate(seen).astype(np.float64)
    assert normalizer.count.item() == len(everything)
    if len(everything) == 0:
        assert normalizer.mean.tolist() == [0, 0, 0]
        assert normalizer.variance.tolist() == [1, 1, 1]
        return
    np.testing.assert_allclose(normalizer.mean, everything.mean(0), rtol=1e-5, atol=1e-4 * spread)
    np.testing.assert_allclose(
        normalizer.variance, everything.var(0), rtol=1e-3, atol=1e-4 * spread**2
    )


def test_one_row_replaces_what_nobody_has_seen():
    normalizer = Normalizer(2)
    feed(normalizer, np.array([[5.0, -1.0]], np.float32), np.array([True]))
    assert normalizer.mean.tolist() == [5, -1]
    assert normalizer.variance.tolist() == [0, 0]
    assert normalizer(torch.tensor([[5.0, -1.0]])).tolist() == [[0, 0]]


def test_values_come_out_with_mean_0_and_deviation_1():
    rows = np.random.default_rng(0).normal(7, 3, size=(1000, 2)).astype(np.float32)
    normalizer = Normalizer(2)
    feed(normalizer, rows, np.ones(1000, np.bool_))
    normal = normalizer(torch.from_numpy(rows))
    torch.testing.assert_close(normal.mean(0), torch.zeros(2), atol=1e-4, rtol=0)
    torch.testing.assert_close(normal.std(0), torch.ones(2), atol=1e-2, rtol=0)


def test_before_any_row_it_only_clips():
    values = torch.tensor([[-1e9, -2.5, 3.0, 1e9]])
    assert Normalizer(4)(values).tolist() == [[-LARGEST, -2.5, 3.0, LARGEST]]


def test_after_many_rows_it_forgets():
    normalizer = Normalizer(1)
    normalizer.count.fill_(MAX_COUNT)
    feed(normalizer, np.ones((1000, 1), np.float32), np.ones(1000, np.bool_))
    assert normalizer.count.item() == MAX_COUNT
    assert 0 < normalizer.mean.item() < 2 * 1000 / MAX_COUNT
    # Exactly countable up to there.
    assert torch.tensor(MAX_COUNT) + 1 > torch.tensor(MAX_COUNT)


def test_its_statistics_are_float32_buffers_without_gradient():
    normalizer = Normalizer(3)
    assert [name for name, _ in normalizer.named_buffers()] == ["mean", "variance", "count"]
    assert {buffer.dtype for buffer in normalizer.buffers()} == {torch.float32}
    assert not list(normalizer.parameters())
    values = torch.randn(4, 3, requires_grad=True)
    normalizer.update(values, torch.ones(4, dtype=torch.bool))
    assert not any(buffer.requires_grad for buffer in normalizer.buffers())
    normalizer(values).sum().backward()
    assert values.grad is not None


def test_statistics_stay_finite_whatever_is_seen():
    normalizer = Normalizer(2)
    feed(normalizer, np.array([[3e38, 1.0], [-3e38, 2.0]], np.float32), np.array([True, True]))
    assert all(statistic.isfinite().all() for statistic in normalizer.buffers())
