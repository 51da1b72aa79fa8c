"""An environment that computes for a given time, where env workers find it without torch."""

import time
from typing import Any

import numpy as np

from bench.probes import Counting


class Burning(Counting):
    """Takes `step_s` seconds of a core per step, however many others want it."""

    def __init__(self, step_s: float = 0.001, length: int = 100) -> None:
        super().__init__(length)
        self._step_s = step_s

    def step(self, action: np.int64) -> Any:
        ends_at = time.thread_time() + self._step_s
        while time.thread_time() < ends_at:
            pass
        return super().step(action)
