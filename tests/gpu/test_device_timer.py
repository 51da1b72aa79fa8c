"""Durations of work on a GPU, without waiting for it."""

import pytest
import torch

from impala_async.learner.loader import DeviceTimer

pytestmark = pytest.mark.gpu


def test_durations_are_those_of_the_device(device):
    timer = DeviceTimer()
    a = torch.randn(2048, 2048, device=device)
    for _ in range(5):
        with timer:
            for _ in range(20):
                a = (a @ a).clamp(-1, 1)
    for _ in range(2):
        torch.cuda.synchronize()
        with timer:
            pass
    assert timer.count >= 6
    assert timer.mean is not None
    assert timer.mean > 0
