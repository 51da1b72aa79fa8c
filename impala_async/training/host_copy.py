"""What a device has computed, on its way to the host: waited for when it is wanted, not before."""

import torch
from torch import Tensor


def side_stream(device: torch.device | str) -> torch.cuda.Stream | None:
    """One beside that of the updates, on which a copy holds up none of them; none on a CPU."""
    return torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None


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
