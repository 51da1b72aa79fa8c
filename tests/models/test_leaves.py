"""Leaves of every dtype and shape as vectors and images; running statistics against numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.config.model import ModelSection
from impala_async.errors import SpacesError
from impala_async.models.leaves import (
    LARGEST,
    MAX_COUNT,
    Normalizer,
    as_exact,
    as_image,
    as_vector,
    image_shape,
    images_of,
    is_image,
    normal_leaves,
    vector_size,
)
from impala_async.schema import ArraySpec, ObsSpec


def test_numbers_are_cast_and_stay_what_they_are():
    for dtype in ("bool", "uint8", "int8", "uint16", "int16", "int32", "int64"):
        leaf = ArraySpec("x", (2, 2), dtype)
        values = torch.tensor([[[0, 1], [1, 1]], [[1, 0], [0, 0]]]).to(getattr(torch, dtype))
        vector = as_vector(leaf, values)
        assert vector.dtype == torch.float32
        assert vector.tolist() == [[0, 1, 1, 1], [1, 0, 0, 0]]
    for dtype in (torch.float16, torch.float32, torch.float64):
        vector = as_vector(ArraySpec("x", (), "float32"), torch.tensor([0.5, -2.0], dtype=dtype))
        assert vector.dtype == torch.float32
        assert vector.tolist() == [[0.5], [-2.0]]


def test_bytes_are_scaled_only_as_images():
    """The bytes that an mlp sees as a vector may be object numbers, as in MiniGrid."""
    leaf = ArraySpec("x", (1, 2, 1), "uint8")
    values = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 2, 1)
    assert as_vector(leaf, values).tolist() == [[0, 255]]
    assert as_image(leaf, values).flatten().tolist() == [0, 1]
    assert values.flatten().tolist() == [0, 255]
    for dtype in (torch.bool, torch.float32, torch.float64, torch.int32):
        rows = torch.tensor([0, 1, 1, 0]).view(1, 2, 2, 1).to(dtype)
        assert as_image(leaf, rows).flatten().tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int64"])
def test_categories_lie_one_after_the_other_each_with_its_own_size(dtype):
    leaf = ArraySpec("x", (2, 2), dtype, (2, 3, 1, 2))
    values = torch.tensor([[[0, 2], [0, 1]], [[1, 0], [0, 0]]]).to(getattr(torch, dtype))
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


def test_where_the_channels_of_an_image_are():
    for shape, channels, height, width, is_last in (
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
    ):
        leaf = ArraySpec("x", shape, "uint8")
        assert is_image(leaf), shape
        assert image_shape(leaf) == (channels, height, width, is_last)


def test_an_image_has_three_dimensions_and_no_categories_and_only_bytes_are_stacked():
    for shape, dtype, choices in (
        ((8, 8), "uint8", ()),
        ((1, 2, 1), "uint8", (3, 3)),
        ((4, 8, 8, 3), "float32", ()),
        ((1, 2, 1, 1), "uint8", (3, 3)),
        ((2, 4, 8, 8, 3), "uint8", ()),
    ):
        assert not is_image(ArraySpec("x", shape, dtype, choices))


# -------------------- what is an image to a torso, and what is normalised

LEAVES = ObsSpec(
    (
        ArraySpec("large", (84, 84, 4), "uint8"),
        ArraySpec("small", (10, 12, 3), "float32"),
        ArraySpec("tiny", (5, 5, 25), "uint8"),
        ArraySpec("thin", (9, 2, 4), "int16"),
        ArraySpec("speed", (3,), "float64"),
        ArraySpec("memory", (128,), "uint8"),
        ArraySpec("flags", (4,), "bool"),
        ArraySpec("stock", (2, 2), "int64"),
        ArraySpec("lamp", (), "int64", (3,)),
    )
)
NUMBERS = ["speed", "memory", "flags", "stock"]


def named(leaves):
    return [leaf.name for leaf in leaves]


def test_an_image_is_large_enough_for_the_convolutions_and_all_else_is_a_vector():
    for torso, images in (
        ("nature_cnn", ["large"]),
        ("small_cnn", ["large", "small", "tiny"]),
        ("impala_resnet", ["large", "small", "tiny", "thin"]),
        ("mlp", []),
        ("my.module:Torso", ["large", "small", "tiny", "thin"]),
    ):
        assert named(images_of(torso, LEAVES)) == images, torso
        # The large one would be 28,224 numbers for an mlp too.
        others = [name for name in ("large", "small", "tiny", "thin") if name not in images]
        wants = True if ":" in torso else "auto"
        section = ModelSection(name=torso, normalize_obs=wants)
        assert named(normal_leaves(section, LEAVES)) == others + NUMBERS, torso


def test_which_vectors_are_normalised():
    for torso, wants, names in (
        ("small_cnn", True, ["thin", *NUMBERS]),
        ("small_cnn", False, []),
        # Whole numbers may be places in a table of embeddings.
        ("my.module:Torso", "auto", ["speed"]),
    ):
        section = ModelSection(name=torso, normalize_obs=wants)
        assert named(normal_leaves(section, LEAVES)) == names, (torso, wants)
    lamp = ObsSpec(LEAVES.leaves[-1:])
    assert normal_leaves(ModelSection(name="mlp"), lamp) == []
    with pytest.raises(SpacesError, match=r"model\.normalize_obs: .* no vector of numbers"):
        normal_leaves(ModelSection(name="mlp", normalize_obs=True), lamp)


@pytest.mark.parametrize("is_channels_last", [False, True])
def test_a_stack_is_one_image_of_the_channels_of_all_its_frames(is_channels_last):
    frames = torch.randint(0, 256, (2, 4, 3, 6, 6), dtype=torch.uint8)
    rows = frames.movedim(2, -1).contiguous() if is_channels_last else frames
    image = as_image(ArraySpec("x", tuple(rows.shape[1:]), "uint8"), rows)
    assert image.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(image, frames.reshape(2, 12, 6, 6) / 255)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_both_orders_give_one_image_that_lies_as_convolutions_like_it(dtype):
    rows = torch.randint(0, 256, (2, 5, 6, 3)).to(dtype)
    before = rows.clone()
    turned = rows.permute(0, 3, 1, 2)
    last, first = (as_image(ArraySpec("x", tuple(r.shape[1:]), "uint8"), r) for r in (rows, turned))
    scale = 255 if dtype == torch.uint8 else 1
    for image in (last, first):
        assert (image.shape, image.dtype) == ((2, 3, 5, 6), torch.float32)
        torch.testing.assert_close(image, rows.permute(0, 3, 1, 2) / scale)
        assert image.is_contiguous(memory_format=torch.channels_last)
    # The rows that came in are as they were: they may be a slot.
    assert torch.equal(rows, before)


def test_in_bfloat16_every_byte_is_the_number_that_float32_would_round_to():
    rows = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1)
    leaf = ArraySpec("x", (16, 16, 1), "uint8")
    exact = as_image(leaf, rows)
    with torch.autocast("cpu", torch.bfloat16):
        coarse = as_image(leaf, rows)
    assert (exact.dtype, coarse.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(coarse, exact.to(torch.bfloat16))


def feed(normalizer, rows, valid):
    normalizer.update(torch.from_numpy(rows), torch.from_numpy(valid))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=8),
    st.floats(0.0, 1.0),
    st.sampled_from([(0.0, 1.0), (100.0, 0.1), (-3.0, 50.0)]),
    st.integers(0, 10**6),
)
def test_statistics_are_numpys_of_all_valid_rows(sizes, share, scale, seed):
    rng = np.random.default_rng(seed)
    center, spread = scale
    normalizer, seen = Normalizer(3), []
    for size in sizes:
        rows = (center + spread * rng.normal(size=(size, 3))).astype(np.float32)
        valid = rng.random(size) < share
        rows[~valid] = rng.choice([np.nan, np.inf, 1e30], size=(int((~valid).sum()), 3))
        feed(normalizer, rows, valid)
        seen.append(rows[valid])
    everything = np.concatenate(seen).astype(np.float64)
    assert normalizer.count.item() == len(everything)
    if len(everything) == 0:
        assert normalizer.mean.tolist() == [0, 0, 0]
        assert normalizer.variance.tolist() == [1, 1, 1]
        return
    np.testing.assert_allclose(normalizer.mean, everything.mean(0), rtol=1e-5, atol=1e-4 * spread)
    np.testing.assert_allclose(
        normalizer.variance, everything.var(0), rtol=1e-3, atol=1e-4 * spread**2
    )


def test_values_come_out_with_mean_0_and_deviation_1_and_clipped():
    rows = np.random.default_rng(0).normal(7, 3, size=(1000, 2)).astype(np.float32)
    normalizer = Normalizer(2)
    values = torch.tensor([[-1e9, -2.5], [3.0, 1e9]])
    assert normalizer(values).tolist() == [[-LARGEST, -2.5], [3.0, LARGEST]], "before any row"
    feed(normalizer, np.array([[5.0, -1.0]], np.float32), np.array([True]))
    assert (normalizer.mean.tolist(), normalizer.variance.tolist()) == ([5, -1], [0, 0])
    assert normalizer(torch.tensor([[5.0, -1.0]])).tolist() == [[0, 0]]
    normalizer = Normalizer(2)
    feed(normalizer, rows, np.ones(1000, np.bool_))
    normal = normalizer(torch.from_numpy(rows))
    torch.testing.assert_close(normal.mean(0), torch.zeros(2), atol=1e-4, rtol=0)
    torch.testing.assert_close(normal.std(0), torch.ones(2), atol=1e-2, rtol=0)


def normal_of(leaf, rows):
    """Rows as a normaliser gives them that has seen them, all of them valid."""
    normalizer = Normalizer(leaf.num_items, is_whole=not leaf.is_float)
    exact = as_exact(leaf, torch.from_numpy(rows))
    normalizer.update(exact, torch.ones(len(rows), dtype=torch.bool))
    return normalizer(exact)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "int32", "int64"])
def test_whole_numbers_are_normalised_as_floats_of_their_size_are(dtype):
    rows = np.random.default_rng(0).integers(0, 120, (500, 2))
    found = normal_of(ArraySpec("x", (2,), dtype), rows.astype(dtype))
    assert found.dtype == torch.float32
    expected = normal_of(ArraySpec("x", (2,), "float32"), rows.astype(np.float32))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bool", "int8"])
def test_a_flag_keeps_its_size_however_rarely_it_is_set(dtype):
    rows = np.zeros((1000, 2), dtype)
    rows[0, 0] = rows[::2, 1] = 1
    rare, even = normal_of(ArraySpec("x", (2,), dtype), rows).T
    for flag, length in ((rare, 1.0), (even, 0.89)):
        assert (flag.max() - flag.min()).item() == pytest.approx(length, abs=0.01)
        assert flag.mean().item() == pytest.approx(0.0, abs=1e-5)
    as_floats = normal_of(ArraySpec("x", (2,), "float32"), rows.astype(np.float32))
    assert as_floats[0, 0] == LARGEST


@pytest.mark.parametrize("dtype", ["int32", "int64", "float64"])
def test_large_numbers_are_told_apart(dtype):
    """float32 has steps of 128 there."""
    rows = 2**30 + np.arange(1000, dtype=dtype)[:, None]
    normal = normal_of(ArraySpec("x", (1,), dtype), rows)
    assert len(normal.unique()) == 1000
    assert 0.9 < normal.std() < 1.1


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float32"])
def test_a_number_that_stands_still_is_0_and_when_it_moves_floats_are_clipped(dtype):
    leaf, rows = ArraySpec("x", (1,), dtype), np.ones((100, 1), dtype)
    normalizer = Normalizer(1, is_whole=not leaf.is_float)
    for _ in range(5):
        normalizer.update(as_exact(leaf, torch.from_numpy(rows)), torch.ones(100).bool())
    assert not normalizer(as_exact(leaf, torch.from_numpy(rows))).any()
    moved = normalizer(as_exact(leaf, torch.from_numpy(0 * rows)))
    assert moved.unique().tolist() == [-LARGEST if leaf.is_float else -1.0]


@pytest.mark.parametrize("is_whole", [False, True])
def test_by_numpy_it_makes_the_same(is_whole):
    normalizer, rows = Normalizer(3, is_whole=is_whole), torch.randint(0, 5, (50, 3)).float()
    normalizer.update(rows, torch.ones(50).bool())
    found = normalizer.by_numpy()(rows.numpy())
    torch.testing.assert_close(torch.from_numpy(found), normalizer(rows))


def test_after_many_rows_it_forgets():
    normalizer = Normalizer(1)
    normalizer.count.fill_(MAX_COUNT)
    feed(normalizer, np.ones((1000, 1), np.float32), np.ones(1000, np.bool_))
    assert normalizer.count.item() == MAX_COUNT
    assert 0 < normalizer.mean.item() < 2 * 1000 / MAX_COUNT
    # Exactly countable up to there.
    assert torch.tensor(MAX_COUNT) + 1 > torch.tensor(MAX_COUNT)


def test_an_absurd_row_is_not_all_there_is_to_see_from_then_on():
    rng, valid = np.random.default_rng(0), np.ones(1000, np.bool_)
    rows = rng.normal(size=(20, 1000, 2)).astype(np.float32)
    normalizer, plain = Normalizer(2), Normalizer(2)
    for number, each in enumerate(rows):
        feed(plain, each, valid)
        each = each.copy()
        if number == 15:
            each[0, 0] = 1e15
        feed(normalizer, each, valid)
    assert torch.equal(normalizer.mean[1], plain.mean[1])
    assert torch.equal(normalizer.variance[1], plain.variance[1])
    assert 1 < normalizer.variance[0] < 2
    assert normalizer.mean[0].abs() < 0.1
    # A number that stood still, and then moves, is followed within some batches.
    moves, late = Normalizer(1), rng.normal(5, 1, size=(1000, 1)).astype(np.float32)
    for number in range(20):
        feed(moves, late * (number >= 12), valid)
    assert moves(torch.from_numpy(late)).abs().max() < LARGEST


def test_its_statistics_are_finite_float32_buffers_without_gradient():
    normalizer = Normalizer(2)
    assert [name for name, _ in normalizer.named_buffers()] == ["mean", "variance", "count"]
    assert not list(normalizer.parameters())
    values = torch.randn(4, 2, requires_grad=True)
    normalizer.update(values, torch.ones(4, dtype=torch.bool))
    feed(normalizer, np.array([[3e38, 1.0], [-3e38, 2.0]], np.float32), np.array([True, True]))
    for statistic in normalizer.buffers():
        assert (statistic.dtype, statistic.requires_grad) == (torch.float32, False)
        assert statistic.isfinite().all()
    normalizer(values).sum().backward()
    assert values.grad is not None
