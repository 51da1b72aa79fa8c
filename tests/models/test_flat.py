"""Flat weights are laid out by dtype and place, and go back to where they came from."""

import numpy as np
import pytest
import torch

from impala_async.errors import ConfigError
from impala_async.models.flat import Snapshot, unflatten
from impala_async.schema import ArraySpec
from impala_async.weights import Version, Weights, WeightsLayout

SHAPES = {"odd": (3,), "w": (2, 2), "s": ()}
FINE = WeightsLayout(tuple(ArraySpec(name, shape, "float32") for name, shape in SHAPES.items()))
COARSE = FINE.coarse({"odd", "s"})
# One that bfloat16 cannot tell from 1, and one that lies otherwise in memory.
TENSORS = [
    torch.tensor([1.0, 1.001, -2.0]),
    torch.arange(4.0).reshape(2, 2).t(),
    torch.tensor(5.0),
]


def flat_of(layout):
    return torch.from_numpy(Snapshot(layout, TENSORS).take(Version(1, 1)).buffer)


def test_each_tensor_lies_in_its_place_and_dtype():
    fine = flat_of(FINE)
    assert fine.view(torch.float32).tolist() == pytest.approx([1, 1.001, -2, 0, 2, 1, 3, 5])
    coarse = flat_of(COARSE)
    assert coarse[:16].view(torch.float32).tolist() == [0, 2, 1, 3]
    assert coarse[16:].view(torch.bfloat16).tolist() == [1, 1, -2, 5]


@pytest.mark.parametrize("layout", [FINE, COARSE, FINE.coarse(SHAPES)])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_writeable", [True, False])
def test_it_goes_back_whatever_the_precision(layout, precision, is_writeable):
    buffer = flat_of(layout).numpy()
    if not is_writeable:
        buffer.flags.writeable = False
    # Without a layout they have the first.
    digests = [layout.digest, *([b""] if layout is FINE else [])]
    for digest in digests:
        back = [torch.zeros(tensor.shape, dtype=precision) for tensor in TENSORS]
        unflatten(Weights(Version(1, 1), buffer, digest), (FINE, layout), back)
        for tensor, sent, dtype in zip(back, TENSORS, layout.dtypes, strict=True):
            exact = sent.bfloat16().float() if dtype == "bfloat16" else sent
            assert torch.equal(tensor, exact.to(precision))


def test_another_layout_and_another_size_are_refused():
    buffer = flat_of(COARSE).numpy()
    short = np.zeros(COARSE.num_bytes - 1, np.uint8)
    for held, digest, fault in (
        (buffer, b"?" * 16, "layout 3f3f"),
        (buffer, b"", "24 bytes do not fit"),
        (short, COARSE.digest, "23 bytes do not fit"),
    ):
        with pytest.raises(ValueError, match=fault):
            unflatten(Weights(Version(1, 1), held, digest), (FINE, COARSE), TENSORS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_number_that_is_not_finite_is_found(dtype, value):
    layout = WeightsLayout((ArraySpec("w", (4,), "float32"), ArraySpec("v", (3,), "float32")))
    if dtype == "bfloat16":
        layout = layout.coarse(["w"])
    weights = [torch.full((4,), 3e38), torch.full((3,), -2e38)]
    # Their sum is beyond float32.
    assert Snapshot(layout, weights).take(Version(1, 0)) is not None
    for number in range(2):
        spoiled = [tensor.clone() for tensor in weights]
        spoiled[number][1] = value
        assert Snapshot(layout, spoiled).take(Version(1, 0)) is None


def test_other_dtypes_and_other_sizes_are_refused():
    """Whole numbers of a user's torso among them, of as many bytes as bfloat16 has."""
    layout = WeightsLayout((ArraySpec("seen", (1,), "uint16"), ArraySpec("w", (4,), "float32")))
    tensors = [torch.tensor([16256], dtype=torch.uint16), torch.zeros(4)]
    for each in (layout, layout.coarse(["w"])):
        with pytest.raises(ConfigError, match=r"model\.name: .*seen \(uint16\)"):
            Snapshot(each, tensors)
