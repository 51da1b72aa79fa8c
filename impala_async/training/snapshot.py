"""Snapshots: the weights of one version, copied out of the model into a buffer of their own."""

from collections.abc import Sequence

from torch import Tensor

from impala_async.models.flat import flatten
from impala_async.weights import Version, Weights, WeightsLayout


class Snapshot:
    """Copies the float32 tensors of a model into flat buffers of one layout."""

    def __init__(self, layout: WeightsLayout) -> None:
        odd = [
            f"{array.name} ({array.dtype})" for array in layout.arrays if array.dtype != "float32"
        ]
        if odd:
            raise ValueError(f"only float32 weights can be published, not {', '.join(odd)}")
        self._layout = layout
        self._num_items = sum(array.num_items for array in layout.arrays)

    def take(self, tensors: Sequence[Tensor], version: Version) -> Weights:
        """Copy the tensors, given in the layout's order; they may change as soon as it returns."""
        num_items = sum(tensor.numel() for tensor in tensors)
        if num_items != self._num_items:
            raise ValueError(f"{num_items} numbers in tensors, {self._num_items} in the layout")
        flat = flatten(tensors, self._layout).cpu()
        return Weights(version, flat.numpy(), self._layout.digest)
