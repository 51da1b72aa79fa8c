"""The first convolution: what it computes, over which memory, and that nothing is divided twice."""

import pytest
import torch
from torch import nn

from impala_async.models.entry_conv import WORD, EntryConv
from impala_async.models.torso import orthogonal

NATURE = {"kernel_size": 8, "stride": 4}


def both(num_channels=4, **how):
    """An entry, and torch's own convolution of the same weights."""
    entry, plain = (make(num_channels, 8, **how) for make in (EntryConv, nn.Conv2d))
    orthogonal(entry)
    nn.init.uniform_(entry.bias)
    plain.load_state_dict(entry.state_dict())
    return entry, plain


def some_bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("height", "width", "how", "has_squares"),
    [
        (84, 84, NATURE, True),
        (36, 40, NATURE, True),
        # Rows that fill no square are left out; columns are not words then.
        (87, 84, NATURE, True),
        (84, 86, NATURE, False),
        (84, 84, {"kernel_size": 4, "stride": 4}, True),
        (84, 84, {"kernel_size": 6, "stride": 4}, False),
        (84, 84, {"kernel_size": 8, "stride": 2}, False),
        (84, 84, {**NATURE, "padding": 2}, False),
        (12, 12, {"kernel_size": 3}, False),
    ],
)
def test_bytes_are_shares_of_255_whatever_way_is_taken(height, width, how, has_squares):
    entry, plain = both(**how)
    image = some_bytes(3, 4, height, width)
    assert (entry.squares(image) is not None) == has_squares
    features, expected = entry(image), plain(image.float() / 255)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    weights = torch.rand_like(features)
    for each in (features, expected):
        (each * weights).sum().backward()
    for name in ("weight", "bias"):
        found, wanted = (getattr(each, name).grad for each in (entry, plain))
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_floats_are_as_they_are():
    entry, plain = both(**NATURE)
    image = 255 * torch.rand(2, 4, 84, 84)
    torch.testing.assert_close(entry(image), plain(image), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("offset", range(WORD))
def test_bytes_may_lie_anywhere_in_their_memory_and_stay_as_they_are(offset):
    entry, plain = both(**NATURE)
    memory = some_bytes(2 * 4 * 84 * 84 + WORD)
    before = memory.clone()
    image = memory[offset:][: 2 * 4 * 84 * 84].view(2, 4, 84, 84)
    assert (entry.squares(image) is not None) == (offset == 0)
    torch.testing.assert_close(entry(image), plain(image / 255.0), rtol=1e-4, atol=1e-5)
    assert torch.equal(memory, before)
    last = image.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    torch.testing.assert_close(entry(last), entry(image), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("height", [8, 11, 84])
def test_squares_are_the_bytes_whatever_they_were_as_floats(height):
    """Words are moved as floats: among random ones, every 256th is no number, and some signal."""
    entry, _ = both(**NATURE)
    signals = torch.tensor([1, 0, 0x80, 0x7F], dtype=torch.uint8).repeat(2, 4, height, 21)
    for image in (some_bytes(33, 4, height, 84), signals):
        squares = entry.squares(image)
        expected = nn.functional.pixel_unshuffle(image[:, :, : height - height % WORD], WORD)
        assert torch.equal(squares, expected)
        assert squares.is_contiguous(memory_format=torch.channels_last)


def test_in_bfloat16_weights_that_are_rounded_before_give_the_same_bits():
    learner, _ = both(**NATURE)
    actor = EntryConv(4, 8, **NATURE)
    actor.load_state_dict(learner.state_dict())
    actor.to(torch.bfloat16)
    image = some_bytes(2, 4, 84, 84)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(learner(image), actor(image))
        features = learner(image)
    assert features.dtype == torch.bfloat16
    torch.testing.assert_close(features.float(), learner(image), rtol=0.05, atol=0.02)


def test_only_weights_are_divided():
    class Divided(torch.utils._python_dispatch.TorchDispatchMode):
        sizes: tuple[int, ...] = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
                self.sizes += (args[0].numel(),)
            return func(*args, **(kwargs or {}))

    entry, _ = both(**NATURE)
    with Divided() as divided:
        entry(some_bytes(2, 4, 84, 84))
    assert divided.sizes == (entry.weight.numel(),)
