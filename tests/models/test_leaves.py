"""Leaves of every dtype and shape as vectors and images."""

import numpy as np
import pytest
import torch

from impala_async.models.leaves import as_image, as_vector, image_shape, is_image, vector_size
from impala_async.spec import ArraySpec


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "uint16", "int16", "int32", "int64"])
def test_numbers_are_cast_and_stay_what_they_are(dtype):
    leaf = ArraySpec("x", (2, 2), dtype)
    values = torch.tensor([[[0, 1], [1, 1]], [[1, 0], [0, 0]]]).to(getattr(torch, dtype))
    vector = as_vector(leaf, values)
    assert vector.dtype == torch.float32
    assert vector.tolist() == [[0, 1, 1, 1], [1, 0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_floats_of_one_number_per_row(dtype):
    vector = as_vector(ArraySpec("x", (), "float32"), torch.tensor([0.5, -2.0], dtype=dtype))
    assert vector.dtype == torch.float32
    assert vector.tolist() == [[0.5], [-2.0]]


def test_bytes_are_scaled_only_as_images():
    """What an mlp sees as a vector may be object numbers, as in MiniGrid."""
    leaf = ArraySpec("x", (1, 2, 1), "uint8")
    values = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 2, 1)
    assert as_vector(leaf, values).tolist() == [[0, 255]]
    assert as_image(values, True).flatten().tolist() == [0, 1]
    assert values.flatten().tolist() == [0, 255]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int64", "bool"])
def test_a_category_is_a_one_hot_vector(dtype):
    num_choices = 2 if dtype == "bool" else 4
    leaf = ArraySpec("x", (), dtype, (num_choices,))
    values = torch.tensor([1, 0, num_choices - 1]).to(getattr(torch, dtype))
    assert vector_size(leaf) == num_choices
    assert as_vector(leaf, values).tolist() == np.eye(num_choices)[values.long()].tolist()


def test_categories_lie_one_after_the_other_each_with_its_own_size():
    leaf = ArraySpec("x", (2, 2), "int32", (2, 3, 1, 2))
    values = torch.tensor([[[0, 2], [0, 1]], [[1, 0], [0, 0]]], dtype=torch.int32)
    assert vector_size(leaf) == 8
    assert as_vector(leaf, values).tolist() == [
        [1, 0, 0, 0, 1, 1, 0, 1],
        [0, 1, 1, 0, 0, 1, 1, 0],
    ]


def test_what_acting_asked_for_first_can_be_trained_on():
    """The offsets are kept: made under inference mode they would be no use to autograd."""
    leaf = ArraySpec("x", (2,), "int64", (5, 7))
    values = torch.tensor([[4, 6]])
    with torch.inference_mode():
        as_vector(leaf, values.clone())
    weights = torch.ones(12, requires_grad=True)
    (as_vector(leaf, values) * weights).sum().backward()
    assert weights.grad.nonzero().flatten().tolist() == [4, 11]


@pytest.mark.parametrize(
    ("shape", "channels", "height", "width", "is_last"),
    [
        ((84, 84, 4), 4, 84, 84, True),
        ((4, 84, 84), 4, 84, 84, False),
        ((210, 160, 3), 3, 210, 160, True),
        ((3, 210, 160), 3, 210, 160, False),
        ((10, 10, 4), 4, 10, 10, True),
        # More channels than pixels: it is the square that tells.
        ((7, 7, 20), 20, 7, 7, True),
        ((20, 7, 7), 20, 7, 7, False),
        ((5, 5, 5), 5, 5, 5, True),
        ((1, 1, 1), 1, 1, 1, True),
        ((1, 5, 9), 1, 5, 9, False),
        # A stack has the channels of all its frames.
        ((4, 84, 84, 3), 12, 84, 84, True),
        ((4, 3, 84, 84), 12, 84, 84, False),
        ((2, 210, 160, 3), 6, 210, 160, True),
    ],
)
def test_where_the_channels_of_an_image_are(shape, channels, height, width, is_last):
    leaf = ArraySpec("x", shape, "uint8")
    assert is_image(leaf)
    assert image_shape(leaf) == (channels, height, width, is_last)


def test_an_image_has_three_dimensions_and_no_categories():
    assert not is_image(ArraySpec("x", (8, 8), "uint8"))
    assert not is_image(ArraySpec("x", (1, 2, 1), "uint8", (3, 3)))


def test_only_bytes_are_stacks_of_images():
    assert not is_image(ArraySpec("x", (4, 8, 8, 3), "float32"))
    assert not is_image(ArraySpec("x", (1, 2, 1, 1), "uint8", (3, 3)))
    assert not is_image(ArraySpec("x", (2, 4, 8, 8, 3), "uint8"))


@pytest.mark.parametrize("is_channels_last", [False, True])
def test_a_stack_is_one_image_of_the_channels_of_all_its_frames(is_channels_last):
    frames = torch.randint(0, 256, (2, 4, 3, 6, 6), dtype=torch.uint8)
    rows = frames.movedim(2, -1).contiguous() if is_channels_last else frames
    image = as_image(rows, is_channels_last)
    assert image.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(image, frames.reshape(2, 12, 6, 6) / 255)


def test_both_orders_give_one_image():
    rows = torch.randint(0, 256, (2, 5, 6, 3), dtype=torch.uint8)
    last, first = as_image(rows, True), as_image(rows.permute(0, 3, 1, 2), False)
    assert last.shape == (2, 3, 5, 6)
    assert last.dtype == torch.float32
    torch.testing.assert_close(last, first)
    torch.testing.assert_close(last[1, 2, 3, 4], rows[1, 3, 4, 2] / 255)
    assert last.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64, torch.int32])
def test_images_of_other_dtypes_are_not_scaled(dtype):
    rows = torch.tensor([0, 1, 1, 0]).view(1, 2, 2, 1).to(dtype)
    before = rows.clone()
    assert as_image(rows, True).flatten().tolist() == [0, 1, 1, 0]
    assert torch.equal(rows, before)


def test_in_bfloat16_every_byte_is_the_number_that_float32_would_round_to():
    rows = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1)
    exact = as_image(rows, True)
    with torch.autocast("cpu", torch.bfloat16):
        coarse = as_image(rows, True)
    assert (exact.dtype, coarse.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(coarse, exact.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_images_lie_in_memory_as_convolutions_like_them(dtype):
    rows = torch.ones(2, 3, 5, 5, dtype=dtype)
    image = as_image(rows, False)
    assert image.is_contiguous(memory_format=torch.channels_last)
    # What came in is still what it was: it may be a slot.
    assert rows.eq(1).all()
