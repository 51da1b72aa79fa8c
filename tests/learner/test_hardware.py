"""Which device a learner takes."""

import pytest
import torch

from impala_async.errors import ConfigError
from impala_async.learner.hardware import make_current, pick_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_auto_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_there, device in ((True, CUDA), (False, CPU)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        assert pick_device("auto") == device
    assert pick_device("cpu") == CPU


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"^learner\.device: 'cuda:1' is not on .* has 1 GPUs"):
        pick_device("cuda:1")


def test_only_a_gpu_with_a_number_is_made_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("cpu", "cpu:0", "cuda", "cuda:1"):
        make_current(torch.device(name))
    assert current == [torch.device("cuda:1")]
