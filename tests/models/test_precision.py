"""Which precision a learner and its actors take."""

import pytest
import torch

from impala_async.errors import ConfigError
from impala_async.models import precision
from impala_async.models.precision import pick_precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


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
    monkeypatch.setattr(precision, "_cpu_flags", lambda: frozenset(flags))
    assert pick_precision("auto", model, CPU) == taken


def test_a_precision_that_was_asked_for_is_taken(monkeypatch):
    monkeypatch.setattr(precision, "_cpu_flags", frozenset)
    assert pick_precision("bfloat16", "mlp", CPU) == torch.bfloat16
    monkeypatch.setattr(precision, "_cpu_flags", lambda: frozenset({"amx_bf16"}))
    assert pick_precision("float32", "nature_cnn", CPU) == torch.float32


def test_a_gpu_takes_bfloat16_when_it_is_new_enough(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert pick_precision("auto", "mlp", CUDA) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert pick_precision("auto", "nature_cnn", CUDA) == torch.float32
    with pytest.raises(ConfigError, match=r"model\.precision: Old GPU has no bfloat16"):
        pick_precision("bfloat16", "nature_cnn", CUDA)
