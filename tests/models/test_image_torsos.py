"""Image torsos: their sizes against the papers', images of both orders, mixed observations."""

import pytest
import torch

from impala_async.config.model import ModelSection
from impala_async.errors import SpacesError
from impala_async.models.torso import TORSOS
from impala_async.schema import ArraySpec, ObsSpec

FRAMES = ArraySpec("", (84, 84, 4), "uint8")
TINY = ArraySpec("", (10, 10, 4), "bool")
SEEN = {"nature_cnn": FRAMES, "impala_resnet": FRAMES, "small_cnn": TINY}


def make(name, *leaves, **settings):
    return TORSOS[name](ObsSpec(leaves), ModelSection(name=name, **settings))


def rows_of(*leaves, num=3):
    def values(leaf):
        high = leaf.choices[0] if leaf.choices else 256 if leaf.dtype == "uint8" else 2
        return torch.randint(0, high, (num, *leaf.shape)).to(getattr(torch, leaf.dtype))

    return {leaf.name: values(leaf) for leaf in leaves}


def num_parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def conv(num_in, num_out, kernel):
    return num_in * num_out * kernel**2 + num_out


def stage(num_in, num_out):
    """A convolution, and two blocks of two."""
    return conv(num_in, num_out, 3) + 4 * conv(num_out, num_out, 3)


@pytest.mark.parametrize(
    ("name", "num_seen", "num_out", "convolutions"),
    [
        # 84 -> 20 -> 9 -> 7
        ("nature_cnn", 7 * 7 * 64, 512, conv(4, 32, 8) + conv(32, 64, 4) + conv(64, 64, 3)),
        # 84 -> 42 -> 21 -> 11
        ("impala_resnet", 11 * 11 * 32, 256, stage(4, 16) + stage(16, 32) + stage(32, 32)),
        ("small_cnn", 8 * 8 * 16, 128, conv(4, 16, 3)),
    ],
)
def test_sizes_are_those_of_the_paper_and_every_weight_gets_a_gradient(
    name, num_seen, num_out, convolutions
):
    torso = make(name, SEEN[name])
    assert torso.num_out == num_out
    features = torso(rows_of(SEEN[name]))
    assert features.shape == (3, num_out)
    assert num_parameters(torso.bodies) == convolutions
    assert num_parameters(torso) == convolutions + (num_seen + 1) * num_out
    # Activations in place must not spoil it: autograd would say so.
    features.square().sum().backward()
    assert all(parameter.grad.any() for parameter in torso.parameters())


def test_the_deep_network_is_as_wide_as_asked_for_and_keeps_the_signal():
    torch.manual_seed(0)
    plain, wide = make("impala_resnet", FRAMES), make("impala_resnet", FRAMES, width=3)
    for one, other in zip(plain.bodies.parameters(), wide.bodies.parameters(), strict=True):
        assert other.shape[0] == 3 * one.shape[0]
    assert wide(rows_of(FRAMES)).shape == (3, 256)
    images = torch.rand(8, 4, 84, 84)
    for part in plain.bodies[0]:
        images = part(images)
        assert 0.2 < images.std() < 5
    smallest = ArraySpec("", (1, 1, 1), "uint8")
    assert make("impala_resnet", smallest)(rows_of(smallest)).shape == (3, 256)


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


@pytest.mark.parametrize("name", SEEN)
def test_both_orders_of_an_image_and_a_stack_of_them_give_the_same_features(name):
    stack = ArraySpec("", (4, 40, 40, 3), "uint8")
    last, first = ArraySpec("", (40, 40, 12), "uint8"), ArraySpec("", (12, 40, 40), "uint8")
    torsos = [make(name, leaf) for leaf in (stack, last, first)]
    frames = rows_of(stack)[""]
    images = torch.cat([frames[:, number] for number in range(4)], -1)
    seen = []
    for torso, rows in zip(torsos, (frames, images, images.permute(0, 3, 1, 2)), strict=True):
        torso.load_state_dict(torsos[0].state_dict())
        seen.append(torso({"": rows.contiguous()}))
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen[2], seen[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "size", "instead"), [("nature_cnn", 35, "impala_resnet"), ("small_cnn", 2, "mlp")]
)
def test_images_that_are_too_small(name, size, instead):
    make(name, ArraySpec("eye", (size + 1, size + 1, 1), "uint8"))
    says = f"{name} is for larger images than 'eye' of {size} x {size}: use {instead}"
    with pytest.raises(SpacesError, match=says):
        make(name, ArraySpec("eye", (size, size, 1), "uint8"))


def test_without_an_image_it_says_what_to_use():
    says = r"nature_cnn wants an image .* three dimensions, or a stack .* of four: use mlp"
    for shape, dtype in (((84,), "uint8"), ((84, 84), "uint8"), ((4, 84, 84, 3), "float32")):
        with pytest.raises(SpacesError, match=says):
            make("nature_cnn", ArraySpec("", shape, dtype))
