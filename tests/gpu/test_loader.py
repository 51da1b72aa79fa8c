"""The device loader over a real copy stream and pinned memory."""

import pytest
import torch

from impala_async.learner.loader import allocator_for
from tests.learner.device_bench import DeviceBench
from tests.learner.device_cases import *  # noqa: F403

pytestmark = pytest.mark.gpu


def test_host_slots_are_pinned_and_batches_on_the_device(device: torch.device) -> None:
    bench = DeviceBench(device)
    assert torch.from_numpy(bench.slots[0].obs).is_pinned()
    assert torch.from_numpy(allocator_for(device)(64)).is_pinned()
    bench.put(0)
    loaded = bench.loader.get(timeout=5.0)
    assert loaded.tensors.rewards_BT.device.type == "cuda"
    bench.close()
