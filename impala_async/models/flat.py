"""Flat weights: tensors of a model copied into one buffer, and out of one, as a layout says."""

from collections.abc import Sequence

import torch
from torch import Tensor

from impala_async.weights import BFLOAT16, Weights, WeightsLayout


def flatten(tensors: Sequence[Tensor], layout: WeightsLayout) -> Tensor:
    """A new buffer on the tensors' device; each is rounded to its dtype there on the way."""
    fine: list[Tensor] = []
    coarse: list[Tensor] = []
    for dtype, tensor in zip(layout.dtypes, tensors, strict=True):
        (coarse if dtype == BFLOAT16 else fine).append(tensor.detach().reshape(-1))
    flat = torch.empty(layout.num_bytes, dtype=torch.uint8, device=tensors[0].device)
    num_fine_bytes = sum(tensor.nbytes for tensor in fine)
    # One call for all costs less than one for each; but one that rounds as well costs twice that.
    if fine:
        torch.cat(fine, out=flat[:num_fine_bytes].view(fine[0].dtype))
    words = flat[num_fine_bytes:].view(torch.bfloat16)
    for part, tensor in zip(words.split([len(one) for one in coarse]), coarse, strict=True):
        part.copy_(tensor)
    return flat


def unflatten(
    weights: Weights, layouts: Sequence[WeightsLayout], tensors: Sequence[Tensor]
) -> None:
    """Fill tensors of whatever precision from weights that have one of these layouts.

    Raises:
        ValueError: they have none of them, or not its size.
    """
    digest = weights.layout_digest or layouts[0].digest
    layout = next((layout for layout in layouts if layout.digest == digest), None)
    if layout is None:
        raise ValueError(f"weights of layout {digest.hex()} do not fit this model")
    if weights.buffer.nbytes != layout.num_bytes:
        raise ValueError(
            f"weights of {weights.buffer.nbytes} bytes do not fit a model of {layout.num_bytes}"
        )
    # Torch cannot view what is read-only.
    buffer = weights.buffer if weights.buffer.flags.writeable else weights.buffer.copy()
    flat = torch.from_numpy(buffer)
    with torch.no_grad():
        for tensor, dtype, place in zip(tensors, layout.dtypes, layout.places, strict=True):
            tensor.copy_(flat[place].view(getattr(torch, dtype)).view(tensor.shape))
