"""Times work on a device without waiting for it: by events on a GPU, by the clock on a CPU.

Runs on: learner thread
"""

import time
from collections import deque
from types import TracebackType

import torch

from impala_async.metrics.timer import TimerStat


class DeviceTimer:
    """A context manager around launches; `stat` gets the durations, on a GPU some calls later."""

    def __init__(self, device: torch.device, stat: TimerStat) -> None:
        self.stat = stat
        self._is_cuda = device.type == "cuda"
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._started_s = 0.0

    def __enter__(self) -> None:
        if self._is_cuda:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            self._pending.append(pair)
        else:
            self._started_s = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._is_cuda:
            self.stat.push(time.perf_counter() - self._started_s)
            return
        self._pending[-1][1].record()
        while self._pending and self._pending[0][1].query():
            start, stop = self._pending.popleft()
            self.stat.push(start.elapsed_time(stop) / 1000)
