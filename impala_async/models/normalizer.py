"""Running mean and variance of a vector: part of the model, so it travels with the weights.

N rows, F numbers
"""

import torch
from torch import Tensor, nn

EPSILON = 1e-8
LARGEST = 10.0
# From here on the statistics forget: float32 could not count further, and old data is old.
MAX_COUNT = 1e7


class Normalizer(nn.Module):
    """Subtracts the mean, divides by the standard deviation, and clips."""

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("variance", torch.ones(num_features))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, values_NF: Tensor) -> Tensor:
        normal_NF = (values_NF - self.mean) * torch.rsqrt(self.variance + EPSILON)
        return normal_NF.clamp(-LARGEST, LARGEST)

    @torch.no_grad()
    def update(self, values_NF: Tensor, is_valid_N: Tensor) -> None:
        """Take in the valid rows (Chan et al.'s parallel variance)."""
        valid_NF = values_NF[is_valid_N].double()
        num_new = len(valid_NF)
        if num_new == 0:
            return
        mean, variance = valid_NF.mean(0), valid_NF.var(0, correction=0)
        count = self.count.double()
        share = num_new / (count + num_new)
        gap = mean - self.mean
        total = (1 - share) * self.variance + share * variance + share * (1 - share) * gap**2
        self.variance.copy_(total)
        self.mean.add_(share * gap)
        self.count.copy_((count + num_new).clamp(max=MAX_COUNT))
