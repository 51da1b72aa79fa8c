"""The device loader over a real copy stream and pinned memory."""

import pytest
import torch

from impala_async.learner.loader import allocator_for
from tests.learner.device_cases import *  # noqa: F403
from tests.learner.device_cases import DeviceBench, holds

pytestmark = pytest.mark.gpu

# Cycles of a GPU, some tenths of a second.
LONG = 500_000_000


def test_host_slots_are_pinned_and_batches_on_the_device(device):
    bench = DeviceBench(device)
    assert torch.from_numpy(bench.slots[0].obs).is_pinned()
    assert torch.from_numpy(allocator_for(device)(64)).is_pinned()
    bench.put(0)
    loaded = bench.loader.get(timeout=5.0)
    assert loaded.batch.rewards_BT.device.type == "cuda"
    bench.close()


def test_a_slot_is_not_written_to_before_what_reads_it_is_done(device):
    bench = DeviceBench(device, num_slots=2, num_device_slots=1)
    sent = [bench.put(seed) for seed in range(2)]
    first = bench.loader.get(timeout=5.0)
    torch.cuda._sleep(LONG)
    rewards_BT = first.batch.rewards_BT.clone()
    bench.loader.release(first)
    second = bench.loader.get(timeout=5.0)
    assert rewards_BT.cpu().numpy().tolist() == sent[0].columns.rewards_CT.tolist()
    assert holds(second, sent[1])
    bench.close()
