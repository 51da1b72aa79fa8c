"""Snapshots: the weights of one version, copied out of the model into a buffer of their own."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from impala_async.weights import Version, Weights, WeightsLayout


class Snapshot:
    """Copies tensors of one layout, which is float32 throughout, into flat buffers."""

    def __init__(self, layout: WeightsLayout) -> None:
        odd = [
            f"{array.name} ({array.dtype})" for array in layout.arrays if array.dtype != "float32"
        ]
        if odd:
            raise ValueError(f"only float32 weights can be published, not {', '.join(odd)}")
        self._layout = layout

    def take(self, tensors: Sequence[Tensor], version: Version) -> Weights:
        """Copy the tensors, given in the layout's order; they may change as soon as it returns."""
        with torch.no_grad():
            # Concatenating always makes a new tensor; its memory goes into the result as it is.
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
        if flat.nbytes != self._layout.num_bytes:
            raise ValueError(
                f"{flat.nbytes} bytes of tensors, {self._layout.num_bytes} in the layout"
            )
        return Weights(version, flat.numpy().view(np.uint8))
