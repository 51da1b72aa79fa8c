"""Which device and which precision a learner takes."""

import pytest
import torch

from impala_async.errors import ConfigError
from impala_async.learner import hardware
from impala_async.learner.hardware import pick_device, pick_precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_auto_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_there, device in ((True, CUDA), (False, CPU)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        assert pick_device("auto") == device
    assert pick_device("cpu") == CPU


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpu", "no device"),
        ("cuda:x", "no device"),
        ("meta", "not supported"),
        ("cuda:1", "1 GPUs"),
    ],
)
def test_a_wrong_device_is_named(name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=says) as error:
        pick_device(name)
    assert str(error.value).startswith("learner.device: ")
    assert repr(name) in str(error.value)


@pytest.mark.parametrize(
    ("flags", "model", "taken"),
    [
        ({"avx2", "avx512_bf16"}, "nature_cnn", torch.bfloat16),
        ({"amx_bf16"}, "impala_resnet", torch.bfloat16),
        ({"avx2", "avx512f"}, "nature_cnn", torch.float32),
        ({"avx512_bf16"}, "mlp", torch.float32),
        ({"avx512_bf16"}, "small_cnn", torch.float32),
    ],
)
def test_auto_takes_bfloat16_on_a_cpu_where_it_pays(flags, model, taken, monkeypatch):
    monkeypatch.setattr(hardware, "_cpu_flags", lambda: frozenset(flags))
    assert pick_precision("auto", model, CPU) == taken


def test_a_precision_that_was_asked_for_is_taken(monkeypatch):
    monkeypatch.setattr(hardware, "_cpu_flags", frozenset)
    assert pick_precision("bfloat16", "mlp", CPU) == torch.bfloat16
    monkeypatch.setattr(hardware, "_cpu_flags", lambda: frozenset({"amx_bf16"}))
    assert pick_precision("float32", "nature_cnn", CPU) == torch.float32


def test_a_gpu_takes_bfloat16_when_it_is_new_enough(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert pick_precision("auto", "mlp", CUDA) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert pick_precision("auto", "nature_cnn", CUDA) == torch.float32
    with pytest.raises(ConfigError, match=r"learner\.precision: Old GPU has no bfloat16"):
        pick_precision("bfloat16", "nature_cnn", CUDA)
