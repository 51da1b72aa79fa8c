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
        """Take in the valid rows (Chan et al.'s parallel variance).

        Nothing here makes the host wait for the device. Invalid rows may hold anything.
        """
        is_valid_N1 = is_valid_N.unsqueeze(-1)
        num_new = is_valid_N.sum(dtype=torch.float64)
        divisor = num_new.clamp(min=1)
        mean_F = torch.where(is_valid_N1, values_NF.double(), 0.0).sum(0) / divisor
        gaps_NF = torch.where(is_valid_N1, values_NF - mean_F, 0.0)
        variance_F = gaps_NF.square().sum(0) / divisor
        count = self.count.double()
        share = num_new / (count + num_new).clamp(min=1)
        shift_F = mean_F - self.mean
        spread_F = share * variance_F + share * (1 - share) * shift_F.square()
        variance_F = (1 - share) * self.variance + spread_F
        # Finite in float32 too, whatever was seen.
        self.variance.copy_(variance_F.clamp(max=torch.finfo(torch.float32).max))
        self.mean.copy_(self.mean + share * shift_F)
        self.count.copy_((count + num_new).clamp(max=MAX_COUNT))
