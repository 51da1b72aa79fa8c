"""Copies that the host waits for when it wants them, and the snapshots of weights made of these.

A snapshot is the weights of one version, copied out of the model into a buffer of their own.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from impala_async.errors import ConfigError
from impala_async.models.flat import flatten
from impala_async.weights import Version, Weights, WeightsLayout


class HostCopy:
    """A tensor as it is when all that is launched by now is done; on a CPU, the tensor itself.

    A side stream may read it after what is launched next: there it must not be written to again.
    """

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream | None = None) -> None:
        self._tensor = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._begin(tensor, stream)

    def wait(self) -> Tensor:
        """The copy, complete."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor

    def _begin(self, source: Tensor, side: torch.cuda.Stream | None) -> None:
        self._tensor = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._copied = torch.cuda.Event()
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(source.device))
            # Its memory must not be another's as long as it is read there.
            source.record_stream(side)
        with torch.cuda.stream(side):
            self._tensor.copy_(source, non_blocking=True)
            self._copied.record(side or torch.cuda.current_stream(source.device))


class WeightsCopy(NamedTuple):
    """Weights out of a model, maybe still on their way from a device."""

    flat: HostCopy
    layout_digest: bytes
    num_fine_bytes: int
    """The size of the weights in float32, which come before those in bfloat16."""

    def is_finite(self) -> bool:
        """Wait until they are here; then whether they may be published."""
        flat = self.flat.wait()
        fine = flat[: self.num_fine_bytes].view(torch.float32)
        coarse = flat[self.num_fine_bytes :].view(torch.bfloat16)
        # One number that is not finite spoils a sum, which costs a tenth of looking at each.
        return all(
            not len(part) or math.isfinite(part.sum().item()) or bool(part.isfinite().all())
            for part in (fine, coarse)
        )

    def as_version(self, version: Version) -> Weights:
        """Wait until they are here. Which version they are may not have been known before."""
        return Weights(version, self.flat.wait().numpy(), self.layout_digest)


class Snapshot:
    """Copies the float32 tensors of a model, in the layout's order, into flat buffers.

    From a GPU they go on a stream of its own, beside the updates that follow.
    """

    def __init__(
        self,
        layout: WeightsLayout,
        tensors: Sequence[Tensor],
        device: torch.device | str = "cpu",
    ) -> None:
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
        # A number takes four bytes in float32 and two in bfloat16.
        self._num_fine_bytes = 2 * layout.num_bytes - 4 * num_items
        # One beside that of the updates, on which a copy holds up none of them.
        is_cuda = torch.device(device).type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None

    def take(self) -> WeightsCopy:
        """Copy the tensors, which may change as soon as it returns."""
        if self._flat:
            flat = torch.cat(self._flat).view(torch.uint8)
        else:
            flat = flatten(self._tensors, self._layout)
        copy = HostCopy(flat, self._stream)
        return WeightsCopy(copy, self._layout.digest, self._num_fine_bytes)
