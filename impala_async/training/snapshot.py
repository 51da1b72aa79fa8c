"""Snapshots: the weights of one version, copied out of the model into a buffer of their own."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from impala_async.errors import ConfigError
from impala_async.models.flat import flatten
from impala_async.weights import Version, Weights, WeightsLayout


class Snapshot:
    """Copies the float32 tensors of a model, in the layout's order, into flat buffers."""

    def __init__(self, layout: WeightsLayout, tensors: Sequence[Tensor]) -> None:
        odd = [
            f"{array.name} ({array.dtype})" for array in layout.arrays if array.dtype != "float32"
        ]
        if odd:
            raise ConfigError(
                f"model.name: only float32 weights can be published, not {', '.join(odd)}"
            )
        num_items = sum(array.num_items for array in layout.arrays)
        assert sum(tensor.numel() for tensor in tensors) == num_items
        self._layout = layout
        self._tensors = tensors
        # Their memory stays where it is: a small model is seen flat once, and not at every update.
        is_plain = not layout.rounded and all(tensor.is_contiguous() for tensor in tensors)
        self._flat = [tensor.detach().view(-1) for tensor in tensors] if is_plain else []
        # A number takes four bytes in float32, which come first, and two in bfloat16.
        self._num_fine_bytes = 2 * layout.num_bytes - 4 * num_items

    def take(self, version: Version) -> Weights | None:
        """Copy the weights of now; None if they are not finite, and may not be published."""
        if self._flat:
            flat = torch.cat(self._flat).view(torch.uint8)
        else:
            flat = flatten(self._tensors, self._layout)
        flat = flat.cpu()
        fine = flat[: self._num_fine_bytes].view(torch.float32)
        coarse = flat[self._num_fine_bytes :].view(torch.bfloat16)
        if not (_is_finite(fine) and _is_finite(coarse)):
            return None
        return Weights(version, flat.numpy(), self._layout.digest)


def _is_finite(numbers: Tensor) -> bool:
    # One number that is not finite spoils a sum, which costs a tenth of looking at each.
    return not len(numbers) or math.isfinite(numbers.sum().item()) or bool(numbers.isfinite().all())
