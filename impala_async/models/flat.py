"""Flat weights: tensors of a model copied into one buffer, and out of one, as a layout says."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from impala_async.errors import ConfigError
from impala_async.weights import BFLOAT16, Version, Weights, WeightsLayout


class Snapshot:
    """Copies the float32 tensors of a model, in the layout's order, into flat buffers."""

    def __init__(self, layout: WeightsLayout, tensors: Sequence[Tensor]) -> None:
        odd = ", ".join(f"{x.name} ({x.dtype})" for x in layout.arrays if x.dtype != "float32")
        if odd:
            raise ConfigError(f"model.name: only float32 weights can be published, not {odd}")
        self._layout = layout
        self._fine: list[Tensor] = []
        self._coarse: list[Tensor] = []
        for dtype, tensor in zip(layout.dtypes, tensors, strict=True):
            (self._coarse if dtype == BFLOAT16 else self._fine).append(tensor.detach())
        self._num_fine_bytes = sum(tensor.nbytes for tensor in self._fine)
        self._device = tensors[0].device

    def take(self, version: Version) -> Weights | None:
        """Copy the weights of now; None if they are not finite, and may not be published."""
        flat = torch.empty(self._layout.num_bytes, dtype=torch.uint8, device=self._device)
        fine, coarse = self._parts(flat)
        # One call for all costs less than one for each, but twice that where it rounds as well.
        if self._fine:
            torch.cat([tensor.reshape(-1) for tensor in self._fine], out=fine)
        parts = coarse.split([tensor.numel() for tensor in self._coarse])
        for part, tensor in zip(parts, self._coarse, strict=True):
            part.copy_(tensor.reshape(-1))
        # One number that is not finite spoils a sum, which costs a tenth of looking at each.
        sums = [part.sum() for part in self._parts(flat)]
        if flat.is_cuda:
            # A GPU copies to pinned memory, which torch keeps for the next, several times as fast.
            flat = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat)
        for part, total in zip(self._parts(flat), sums, strict=True):
            if not math.isfinite(total.item()) and not part.isfinite().all():
                return None
        return Weights(version, flat.numpy(), self._layout.digest)

    def _parts(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        fine, coarse = flat[: self._num_fine_bytes], flat[self._num_fine_bytes :]
        return fine.view(torch.float32), coarse.view(torch.bfloat16)


def unflatten(
    weights: Weights, layouts: Sequence[WeightsLayout], tensors: Sequence[Tensor]
) -> None:
    """Fill tensors of whatever precision from weights; ValueError if no layout fits them."""
    digest = weights.layout_digest or layouts[0].digest
    layout = next((layout for layout in layouts if layout.digest == digest), None)
    if layout is None or weights.buffer.nbytes != layout.num_bytes:
        found = f"layout {digest.hex()} and {weights.buffer.nbytes} bytes"
        raise ValueError(f"weights of {found} do not fit this model")
    # Torch cannot view what is read-only.
    buffer = weights.buffer if weights.buffer.flags.writeable else weights.buffer.copy()
    flat = torch.from_numpy(buffer)
    with torch.no_grad():
        for tensor, dtype, place in zip(tensors, layout.dtypes, layout.places, strict=True):
            tensor.copy_(flat[place].view(getattr(torch, dtype)).view(tensor.shape))
