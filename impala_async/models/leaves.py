"""Observation leaves as what a network takes: vectors of numbers, or images.

N rows, F numbers of a vector
"""

import torch
from torch import Tensor

from impala_async.spec import ArraySpec


def is_image(leaf: ArraySpec) -> bool:
    """Whether a leaf has height, width and channels."""
    return len(leaf.shape) == 3 and not leaf.choices


def vector_size(leaf: ArraySpec) -> int:
    """How many numbers `as_vector` makes of one row."""
    return sum(leaf.choices) or leaf.num_items


def as_vector(leaf: ArraySpec, values: Tensor) -> Tensor:
    """`[N, ...]` values as `[N, F]` float32; categories as one-hot vectors, one after the other."""
    flat = values if values.dim() == 2 else values.reshape(len(values), -1)
    if not leaf.choices:
        return flat if flat.dtype == torch.float32 else flat.to(torch.float32)
    starts = [sum(leaf.choices[:i]) for i in range(len(leaf.choices))]
    places = flat.long() + torch.tensor(starts, device=flat.device)
    return torch.zeros(len(flat), sum(leaf.choices), device=flat.device).scatter_(1, places, 1.0)


def as_image(values: Tensor, is_channels_last: bool) -> Tensor:
    """`[N, ...]` values as `[N, channels, height, width]`; bytes become numbers up to 1."""
    image = values.permute(0, 3, 1, 2) if is_channels_last else values
    return image.to(torch.float32) / 255 if values.dtype == torch.uint8 else image.float()


def image_shape(leaf: ArraySpec) -> tuple[int, int, int, bool]:
    """Channels, height, width, and whether channels come last: they are the fewest."""
    first, second, third = leaf.shape
    if third <= first:
        return third, first, second, True
    return first, second, third, False
