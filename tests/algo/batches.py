"""Batches for returns and losses: masks, terminations and log-ratios in no order of any world."""

import math
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from impala_async.algo.gae import gae
from impala_async.algo.vtrace import vtrace

nan = math.nan
LAMBDAS = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def column(*numbers, dtype=torch.float64):
    return torch.tensor(numbers, dtype=dtype).unsqueeze(1)


class Batch(NamedTuple):
    log_rhos_TB: Tensor
    rewards_TB: Tensor
    discounts_TB: Tensor
    values_SB: Tensor
    mask_TB: Tensor

    def vtrace(self, **bars):
        return vtrace(**self._asdict(), **bars)

    def gae(self, lambda_):
        rows = self._asdict()
        del rows["log_rhos_TB"]
        return gae(**rows, lambda_=lambda_)

    def poisoned(self):
        """NaN in every place that no valid row may look at."""
        rows = [torch.where(self.mask_TB, tensor_TB, nan) for tensor_TB in self[:3]]
        values_SB = poisoned_values(self.values_SB, self.discounts_TB, self.mask_TB)
        return Batch(*rows, values_SB, self.mask_TB)


def poisoned_values(values_SB, discounts_TB, mask_TB):
    is_seen_SB = torch.zeros_like(values_SB, dtype=torch.bool)
    is_seen_SB[:-1] |= mask_TB
    is_seen_SB[1:] |= mask_TB & (discounts_TB > 0)
    return values_SB.masked_fill(~is_seen_SB, nan)


@st.composite
def batches(draw):
    shape = num_rows, num_columns = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    masked_rate = draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))
    end_rate = draw(st.sampled_from([0.0, 0.2, 0.6]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    discounts = rng.choice([0.5, 0.9, 1.0], shape) * (rng.random(shape) >= end_rate)
    return Batch(
        torch.tensor(rng.normal(0, 0.7, shape)),
        torch.tensor(rng.normal(0, 1, shape)),
        torch.tensor(discounts),
        torch.tensor(rng.normal(0, 2, (num_rows + 1, num_columns))),
        torch.tensor(rng.random(shape) >= masked_rate),
    )
