"""Advantages of valid rows are made normal."""

import math

import torch

from impala_async.algo.terms import ValidRows
from tests.algo.batches import nan


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
