"""Flat weights are laid out by dtype and place, and go back to where they came from."""

import numpy as np
import pytest
import torch

from impala_async.models.flat import flatten, unflatten
from impala_async.schema import ArraySpec
from impala_async.weights import Version, Weights, WeightsLayout

FINE = WeightsLayout(
    (
        ArraySpec("odd", (3,), "float32"),
        ArraySpec("w", (2, 2), "float32"),
        ArraySpec("s", (), "float32"),
    )
)
COARSE = FINE.coarse({"odd", "s"})


def tensors():
    # One that lies otherwise in memory, and one that bfloat16 cannot tell from 1.
    return [
        torch.tensor([1.0, 1.001, -2.0]),
        torch.arange(4.0).reshape(2, 2).t(),
        torch.tensor(5.0),
    ]


def test_each_tensor_lies_in_its_place_and_dtype():
    fine = flatten(tensors(), FINE)
    assert fine.view(torch.float32).tolist() == pytest.approx([1, 1.001, -2, 0, 2, 1, 3, 5])
    coarse = flatten(tensors(), COARSE)
    assert coarse[:16].view(torch.float32).tolist() == [0, 2, 1, 3]
    assert coarse[16:].view(torch.bfloat16).tolist() == [1, 1, -2, 5]


@pytest.mark.parametrize("layout", [FINE, COARSE, FINE.coarse({"odd", "w", "s"})])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_writeable", [True, False])
def test_it_goes_back_whatever_the_precision(layout, precision, is_writeable):
    buffer = flatten(tensors(), layout).numpy()
    if not is_writeable:
        buffer.flags.writeable = False
    back = [torch.zeros(tensor.shape, dtype=precision) for tensor in tensors()]
    unflatten(Weights(Version(1, 1), buffer, layout.digest), (FINE, layout), back)
    for tensor, sent, dtype in zip(back, tensors(), layout.dtypes, strict=True):
        exact = sent.bfloat16().float() if dtype == "bfloat16" else sent
        assert torch.equal(tensor, exact.to(precision))


def test_weights_without_a_layout_have_the_first():
    back = [torch.zeros_like(tensor) for tensor in tensors()]
    unflatten(Weights(Version(1, 1), flatten(tensors(), FINE).numpy()), (FINE, COARSE), back)
    assert back[0].tolist() == tensors()[0].tolist()


def test_another_layout_and_another_size_are_refused():
    buffer = flatten(tensors(), COARSE).numpy()
    for digest, fault in ((b"?" * 16, "layout 3f3f"), (b"", "24 bytes do not fit a model of 32")):
        with pytest.raises(ValueError, match=fault):
            unflatten(Weights(Version(1, 1), buffer, digest), (FINE, COARSE), tensors())
    short = np.zeros(COARSE.num_bytes - 1, np.uint8)
    with pytest.raises(ValueError, match="23 bytes do not fit a model of 24"):
        unflatten(Weights(Version(1, 1), short, COARSE.digest), (FINE, COARSE), tensors())
