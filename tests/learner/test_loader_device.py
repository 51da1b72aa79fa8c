"""The device loader's own part, on a stand-in for a GPU: which slot is whose, and when."""

import pytest
import torch

from impala_async.learner import loader
from tests.learner.device_cases import *  # noqa: F403
from tests.learner.device_cases import DeviceBench, FakeCuda


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(loader.torch, "cuda", fake)
    return fake


@pytest.fixture
def device(cuda):
    return torch.device("cpu")


def test_updates_wait_for_copies_and_copies_for_updates(device, cuda):
    bench = DeviceBench(device)
    bench.put(0)
    loaded = bench.loader.get(timeout=5.0)
    assert cuda.compute.waited_for == [bench.loader._places[loaded.place].copied]
    assert bench.loader._stream.waited_for == []
    bench.loader.release(loaded)
    assert bench.loader._stream.waited_for == [cuda.compute]
    bench.close()
