"""Observation leaves as what a network takes: vectors of numbers, normalised or not, or images.

N rows, F numbers of a vector
"""

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from impala_async.config.model import ModelSection
from impala_async.errors import SpacesError
from impala_async.schema import ArraySpec, ObsSpec

# The smallest side that the convolutions of a torso can do with; an mlp has none.
LEAST_SIDES = {"mlp": math.inf, "nature_cnn": 36, "impala_resnet": 1, "small_cnn": 3}
# float32 does not hold all of their numbers.
WIDE = ("int32", "int64", "float64")
# Below the root beside the variance. Whole numbers have a unit, and are not made larger than it: a
# flag that is hardly ever set would be 10.
EPSILON, EPSILON_OF_WHOLE = 1e-8, 1.0
LARGEST = 10.0
# A float: torch 2.11 writes no ONNX of a division by an int.
LARGEST_BYTE = 255.0
# From here on the statistics forget: float32 could not count further, and old data is old.
MAX_COUNT = 1e7
# Statistics of so many rows know what is far: so many deviations.
SURE_COUNT, FARTHEST = 10_000, 100.0


def is_image(leaf: ArraySpec) -> bool:
    """Whether a leaf has height, width and channels, or is a stack of such frames of bytes."""
    is_stack = len(leaf.shape) == 4 and leaf.dtype == "uint8"
    return (len(leaf.shape) == 3 or is_stack) and not leaf.choices


def images_of(torso: str, obs: ObsSpec) -> list[ArraySpec]:
    """The leaves that a torso of this name sees as images: all that look so, where the name is none
    of ours. All other leaves are vectors to it."""
    least = LEAST_SIDES.get(torso, 0)
    images = [leaf for leaf in obs.leaves if is_image(leaf)]
    return [leaf for leaf in images if min(image_shape(leaf)[1:3]) >= least]


def normal_leaves(section: ModelSection, obs: ObsSpec) -> list[ArraySpec]:
    """The vectors of numbers that are normalised for the torso of this section.

    Raises SpacesError where there are none and there must be some."""
    images = images_of(section.name, obs)
    vectors = [leaf for leaf in obs.leaves if not leaf.choices and leaf not in images]
    wants = section.normalize_obs
    if wants is True and not vectors:
        raise SpacesError("model.normalize_obs: the observation has no vector of numbers")
    if wants == "auto" and section.name not in LEAST_SIDES:
        # A user's own torso may take whole numbers for places in a table.
        return [leaf for leaf in obs.leaves if leaf.is_float and not is_image(leaf)]
    return vectors if wants else []


def vector_size(leaf: ArraySpec) -> int:
    """How many numbers `as_vector` makes of one row."""
    return sum(leaf.choices) or leaf.num_items


def as_vector(leaf: ArraySpec, values: Tensor) -> Tensor:
    """`[N, ...]` values as `[N, F]` float32; categories as one-hot vectors, one after the other."""
    # Not `len`, whose number an exported graph would take for the only one.
    flat = values if values.dim() == 2 else values.reshape(values.shape[0], -1)
    if flat.dtype == torch.float32:
        return flat
    if leaf.choices:
        places = flat.long() + _starts(leaf.choices, flat.device)
        zeros = torch.zeros(flat.shape[0], sum(leaf.choices), device=flat.device)
        return zeros.scatter_(1, places, 1.0)
    return flat.to(torch.float32)


def as_exact(leaf: ArraySpec, values: Tensor) -> Tensor:
    """The same of numbers, in float64 where float32 does not hold these: what they differ by is not
    lost before their mean is subtracted."""
    if leaf.dtype in WIDE:
        return values.reshape(values.shape[0], -1).to(torch.float64)
    return as_vector(leaf, values)


def as_image(leaf: ArraySpec, values: Tensor) -> Tensor:
    """`[N, ...]` values as `[N, channels, height, width]`, in what convolutions compute in; bytes
    as shares of 255."""
    image = as_pixels(leaf, values).contiguous(memory_format=torch.channels_last)
    image = image.to(dtype_of_convolutions(values.device))
    # A byte is a number of bfloat16, too: it is rounded only once, by the division.
    return image.div_(LARGEST_BYTE) if values.dtype == torch.uint8 else image


def as_pixels(leaf: ArraySpec, values: Tensor) -> Tensor:
    """`[N, ...]` values as `[N, channels, height, width]`, in the memory that they have."""
    is_stack = values.dim() == 5  # one image of the channels of all its frames, the oldest first
    if image_shape(leaf)[3]:
        return (values.movedim(1, 3).flatten(3) if is_stack else values).permute(0, 3, 1, 2)
    return values.flatten(1, 2) if is_stack else values


def dtype_of_convolutions(device: torch.device) -> torch.dtype:
    # The device that only counts memory knows nothing of autocast.
    is_known = torch.amp.is_autocast_available(device.type)
    is_coarse = is_known and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if is_coarse else torch.float32


def image_shape(leaf: ArraySpec) -> tuple[int, int, int, bool]:
    """Channels (of all frames of a stack), height, width, and whether channels come last."""
    # An image is square, and its channels are what is left; if that decides nothing, they are few.
    *stack, first, second, third = leaf.shape
    num_frames = math.prod(stack)
    is_channels_last = third <= first
    if (first == second) != (second == third):
        is_channels_last = first == second
    if is_channels_last:
        return num_frames * third, first, second, True
    return num_frames * first, second, third, False


class Normalizer(nn.Module):
    """Subtracts the running mean of a vector, divides by its standard deviation, and clips."""

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, num_features: int, *, is_whole: bool = False) -> None:
        super().__init__()
        self.epsilon = EPSILON_OF_WHOLE if is_whole else EPSILON
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("variance", torch.ones(num_features))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, values_NF: Tensor) -> Tensor:
        normal_NF = (values_NF - self.mean) * torch.rsqrt(self.variance + self.epsilon)
        return normal_NF.clamp(-LARGEST, LARGEST).to(torch.float32)

    def by_numpy(self) -> Callable[[NDArray[Any]], NDArray[np.float32]]:
        """The same for arrays, over the memory of the statistics."""
        mean_F, variance_F = self.mean.numpy(), self.variance.numpy()
        epsilon = np.float32(self.epsilon)

        def normalize(values_NF: NDArray[Any]) -> NDArray[np.float32]:
            normal_NF: NDArray[np.float32] = values_NF - mean_F
            normal_NF /= np.sqrt(variance_F + epsilon)
            return np.clip(normal_NF, -LARGEST, LARGEST, out=normal_NF)

        return normalize

    @torch.no_grad()
    def update(
        self,
        values_NF: Tensor,
        is_valid_N: Tensor,
        sum_up: Callable[[Tensor], Tensor] = lambda sums: sums,
    ) -> None:
        """Take in the valid rows (Chan et al.'s parallel variance), with no wait for the device.
        `sum_up` adds the sums of others, who take in theirs."""
        is_valid_N1 = is_valid_N.unsqueeze(-1)
        values_NF = self._near(values_NF.double())
        sums_F = torch.where(is_valid_N1, values_NF, 0.0).sum(0)
        sums = sum_up(torch.cat((is_valid_N.sum(dtype=torch.float64)[None], sums_F)))
        num_new, sums_F = sums[0], sums[1:]
        divisor = num_new.clamp(min=1)
        mean_F = sums_F / divisor
        gaps_NF = torch.where(is_valid_N1, values_NF - mean_F, 0.0)
        variance_F = sum_up(gaps_NF.square().sum(0)) / divisor
        count = self.count.double()
        share = num_new / (count + num_new).clamp(min=1)
        shift_F = mean_F - self.mean
        spread_F = share * variance_F + share * (1 - share) * shift_F.square()
        variance_F = (1 - share) * self.variance + spread_F
        # Finite in float32 too, whatever was seen.
        self.variance.copy_(variance_F.clamp(max=torch.finfo(torch.float32).max))
        self.mean.copy_(self.mean + share * shift_F)
        self.count.copy_((count + num_new).clamp(max=MAX_COUNT))

    def _near(self, values_NF: Tensor) -> Tensor:
        """The values, none farther than so many deviations from the mean, once these are known: or
        one absurd row would be all there is to see from then on. A new size is followed, batch by
        batch."""
        reach_F = FARTHEST * (self.variance.double() + self.epsilon).sqrt()
        reach_F = torch.where(self.count >= SURE_COUNT, reach_F, math.inf)
        return values_NF.clamp(self.mean - reach_F, self.mean + reach_F)


@lru_cache
def _starts(choices: tuple[int, ...], device: torch.device) -> Tensor:
    """Where the one-hot vector of each item begins. No inference tensor, whoever asks first."""
    with torch.inference_mode(False):
        return torch.tensor([0, *accumulate(choices[:-1])], device=device)
