"""Which precision V-trace computes in, and which inputs it refuses."""

import math

import pytest
import torch
from torch import Tensor

from impala_async.algo.vtrace import vtrace

ROWS = ("log_rhos_TB", "rewards_TB", "discounts_TB")


def random_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = {name: torch.randn(5, 3, generator=generator) for name in ROWS}
    return rows | {"values_SB": torch.randn(6, 3, generator=generator)}


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_computes_in_float32_at_least(low: torch.dtype, is_autocast: bool) -> None:
    tensors = {name: tensor.to(low) for name, tensor in random_tensors().items()}
    want = vtrace(**{name: tensor.double() for name, tensor in tensors.items()})
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
        got = vtrace(**tensors)
    for one, exact in zip(got, want, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["log_rhos_TB", "rewards_TB", "discounts_TB", "values_SB"])
def test_one_float64_input_gives_float64(name: str) -> None:
    rows = dict.fromkeys(ROWS, torch.ones(2, 1))
    tensors = rows | {"values_SB": torch.ones(3, 1)}
    tensors[name] = tensors[name].double()
    assert all(tensor.dtype == torch.float64 for tensor in vtrace(**tensors))


def test_integer_rewards_and_masks_are_read_as_numbers() -> None:
    zeros_TB = torch.zeros(2, 1)
    got = vtrace(
        log_rhos_TB=zeros_TB,
        rewards_TB=torch.tensor([[2], [3]]),
        discounts_TB=zeros_TB,
        values_SB=torch.zeros(3, 1),
        mask_TB=torch.tensor([[1], [0]], dtype=torch.uint8),
    )
    assert got.targets_TB.dtype == torch.float32
    assert got.targets_TB.tolist() == [[2.0], [0.0]]


def test_gives_constants_to_the_loss() -> None:
    rows = dict.fromkeys(ROWS, torch.ones(2, 1, requires_grad=True))
    got = vtrace(**rows, values_SB=torch.ones(3, 1, requires_grad=True))
    assert not got.targets_TB.requires_grad
    assert not got.advantages_TB.requires_grad


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("log_rhos_TB", (3, 2)),
        ("rewards_TB", (4, 1)),
        ("discounts_TB", (4,)),
        ("values_SB", (4, 2)),
        ("values_SB", (5,)),
        ("mask_TB", (5, 2)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name: str, shape: tuple[int, ...]) -> None:
    rows = dict.fromkeys((*ROWS, "mask_TB"), torch.zeros(4, 2))
    tensors = rows | {"values_SB": torch.zeros(5, 2)}
    vtrace(**tensors)
    with pytest.raises(ValueError, match=name):
        vtrace(**tensors | {name: torch.zeros(shape)})


@pytest.mark.parametrize(
    "setting",
    [
        {"rho_bar": -1.0},
        {"c_bar": math.nan},
        {"pg_rho_bar": -0.1},
        {"lambda_": 1.1},
        {"lambda_": -0.1},
        {"lambda_": math.nan},
    ],
)
def test_senseless_settings_are_refused(setting: dict[str, float]) -> None:
    rows = dict.fromkeys(ROWS, torch.zeros(1, 1))
    with pytest.raises(ValueError, match=next(iter(setting))):
        vtrace(**rows, values_SB=torch.zeros(2, 1), **setting)
