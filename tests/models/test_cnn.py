"""Image torsos: their sizes against the papers', images of both orders, mixed observations."""

import pytest
import torch

from impala_async.config.model import ModelSection
from impala_async.errors import SpacesError
from impala_async.models.torso import TORSOS
from impala_async.schema import ArraySpec, ObsSpec

FRAMES = ArraySpec("", (84, 84, 4), "uint8")
TINY = ArraySpec("", (10, 10, 4), "bool")


def make(kind, *leaves, **settings):
    return TORSOS[kind](ObsSpec(leaves), ModelSection(name=kind, **settings))


def rows_of(*leaves, num=3):
    def values(leaf):
        high = leaf.choices[0] if leaf.choices else 256 if leaf.dtype == "uint8" else 2
        return torch.randint(0, high, (num, *leaf.shape)).to(getattr(torch, leaf.dtype))

    return {leaf.name: values(leaf) for leaf in leaves}


def num_parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def conv(num_in, num_out, kernel):
    return num_in * num_out * kernel**2 + num_out


@pytest.mark.parametrize(
    ("kind", "leaf", "num_seen", "num_out", "convolutions"),
    [
        # 84 -> 20 -> 9 -> 7
        ("nature_cnn", FRAMES, 7 * 7 * 64, 512, conv(4, 32, 8) + conv(32, 64, 4) + conv(64, 64, 3)),
        # 84 -> 42 -> 21 -> 11; a stage is a convolution and two blocks of two
        (
            "impala_resnet",
            FRAMES,
            11 * 11 * 32,
            256,
            (conv(4, 16, 3) + 4 * conv(16, 16, 3))
            + (conv(16, 32, 3) + 4 * conv(32, 32, 3))
            + (conv(32, 32, 3) + 4 * conv(32, 32, 3)),
        ),
        ("small_cnn", TINY, 8 * 8 * 16, 128, conv(4, 16, 3)),
    ],
)
def test_sizes_are_those_of_the_paper(kind, leaf, num_seen, num_out, convolutions):
    torso = make(kind, leaf)
    assert torso.num_out == num_out
    assert torso(rows_of(leaf)).shape == (3, num_out)
    assert num_parameters(torso.bodies) == convolutions
    assert num_parameters(torso) == convolutions + (num_seen + 1) * num_out


def test_the_deep_network_has_fifteen_convolutions():
    """Figure 3 of the paper, right: 15 convolutional layers before the hidden one."""
    torso = make("impala_resnet", FRAMES)
    assert sum(isinstance(module, torch.nn.Conv2d) for module in torso.modules()) == 15


def test_width_multiplies_the_channels():
    plain, wide = make("impala_resnet", FRAMES), make("impala_resnet", FRAMES, width=3)
    for one, other in zip(plain.bodies.parameters(), wide.bodies.parameters(), strict=True):
        assert other.shape[0] == 3 * one.shape[0]
    assert wide.hidden.layers[0].in_features == 3 * plain.hidden.layers[0].in_features
    assert wide(rows_of(FRAMES)).shape == (3, 256)


@pytest.mark.parametrize("kind", ["nature_cnn", "impala_resnet"])
def test_both_orders_of_an_image_give_the_same_features(kind):
    last, first = make(kind, FRAMES), make(kind, ArraySpec("", (4, 84, 84), "uint8"))
    first.load_state_dict(last.state_dict())
    rows = rows_of(FRAMES)
    torch.testing.assert_close(
        last(rows), first({"": rows[""].permute(0, 3, 1, 2).contiguous()}), rtol=1e-4, atol=1e-5
    )


def test_the_smallest_network_computes_what_minatar_says():
    torso = make("small_cnn", TINY, activation="tanh")
    body, rows = torso.bodies[0], rows_of(TINY)
    image = rows[""].permute(0, 3, 1, 2).float()
    seen = torch.relu(torch.nn.functional.conv2d(image, body[0].weight, body[0].bias))
    layer = torso.hidden.layers[0]
    expected = torch.tanh(seen.flatten(1) @ layer.weight.T + layer.bias)
    torch.testing.assert_close(torso(rows), expected, rtol=1e-4, atol=1e-5)


def test_images_vectors_and_categories_together():
    leaves = (
        ArraySpec("speed", (3,), "float64"),
        ArraySpec("near", (10, 10, 3), "uint8"),
        ArraySpec("lamp", (2,), "int64", (4, 4)),
        ArraySpec("far", (2, 12, 12), "float32"),
    )
    torso = make("small_cnn", *leaves, hidden_sizes=(32, 7))
    assert torso.hidden.layers[0].in_features == 8 * 8 * 16 + 10 * 10 * 16 + 3 + 8
    rows = rows_of(*leaves)
    features = torso(rows)
    assert features.shape == (3, 7)
    for name in rows:
        others = {**rows, name: 1 - rows[name] if name != "lamp" else 3 - rows[name]}
        assert not torch.equal(torso(others), features), f"{name} is not seen"


@pytest.mark.parametrize(
    ("kind", "size", "text"),
    [
        (
            "nature_cnn",
            35,
            r"nature_cnn is for larger images than 'eye' of 35 x 35: use impala_resnet",
        ),
        ("small_cnn", 2, r"small_cnn is for larger images than 'eye' of 2 x 2: use mlp"),
    ],
)
def test_images_that_are_too_small(kind, size, text):
    make(kind, ArraySpec("eye", (size + 1, size + 1, 1), "uint8"))
    with pytest.raises(SpacesError, match=text):
        make(kind, ArraySpec("eye", (size, size, 1), "uint8"))


def test_no_image_is_too_small_for_the_deep_network():
    torso = make("impala_resnet", ArraySpec("", (1, 1, 1), "uint8"))
    assert torso(rows_of(ArraySpec("", (1, 1, 1), "uint8"))).shape == (3, 256)


@pytest.mark.parametrize(
    "leaf",
    [
        ArraySpec("", (84,), "uint8"),
        ArraySpec("", (84, 84), "uint8"),
        ArraySpec("", (4, 84, 84, 3), "float32"),
    ],
)
def test_without_an_image_it_says_what_to_use(leaf):
    says = r"nature_cnn wants an image .* three dimensions, or a stack .* of four: use mlp"
    with pytest.raises(SpacesError, match=says):
        make("nature_cnn", leaf)


@pytest.mark.parametrize("kind", ["nature_cnn", "impala_resnet", "small_cnn"])
def test_a_stack_of_coloured_frames_is_seen_as_its_channels_are(kind):
    stack, flat = ArraySpec("", (4, 40, 40, 3), "uint8"), ArraySpec("", (40, 40, 12), "uint8")
    torso, other = make(kind, stack), make(kind, flat)
    other.load_state_dict(torso.state_dict())
    rows = rows_of(stack)[""]
    side_by_side = torch.cat([rows[:, frame] for frame in range(4)], -1)
    torch.testing.assert_close(torso({"": rows}), other({"": side_by_side}))


def test_the_signal_neither_dies_nor_explodes_on_its_way_through_the_deep_network():
    torch.manual_seed(0)
    body = make("impala_resnet", FRAMES).bodies[0]
    images = torch.rand(8, 4, 84, 84)
    for stage in body:
        images = stage(images)
        assert 0.2 < images.std() < 5


@pytest.mark.parametrize("kind", ["nature_cnn", "impala_resnet", "small_cnn"])
def test_every_weight_gets_a_gradient(kind):
    """Activations in place must not spoil it: autograd would say so."""
    leaf = FRAMES if kind != "small_cnn" else TINY
    torso = make(kind, leaf)
    torso(rows_of(leaf)).square().sum().backward()
    assert all(parameter.grad.any() for parameter in torso.parameters())
