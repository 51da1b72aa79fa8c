"""A packed torso computes to the last bit what the torso does, whatever its weights are by then."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from impala_async.config.model import ModelSection
from impala_async.models import packed as module
from impala_async.models.packed import packed
from impala_async.models.torso import make_torso
from impala_async.schema import ArraySpec, ObsSpec
from tests.torches import wants_torch

IMAGE = ArraySpec("", (4, 84, 84), "uint8")
NATURE = ModelSection(name="nature_cnn")
pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="wants a processor that computes in bfloat16",
)


@pytest.fixture(autouse=True)
def always_the_same():
    torch.manual_seed(0)


def make(section=NATURE, *leaves, precision=torch.bfloat16):
    torso = make_torso(section, ObsSpec(leaves or (IMAGE,)))
    for name, parameter in torso.named_parameters():
        if name.endswith("bias"):  # it is born as nothing
            nn.init.normal_(parameter, std=0.1)
    return torso.to(precision)


def images(num_rows, shape=IMAGE.shape):
    return {"": torch.randint(0, 256, (num_rows, *shape), dtype=torch.uint8)}


@torch.inference_mode()
@torch.autocast("cpu", torch.bfloat16)
def features_of(acting, obs):
    return acting(obs)


# Before, oneDNN rounded another sum of the widest layer.
@wants_torch(2, 13)
@pytest.mark.parametrize("hidden_sizes", [(512,), (33,), (64, 32)])
@pytest.mark.parametrize("first", [1, 16, 50])
def test_features_are_equal_however_many_rows_come_first_and_later(hidden_sizes, first):
    torso = make(NATURE.model_copy(update={"hidden_sizes": hidden_sizes}))
    quick = packed(torso)
    for num_rows in (first, 1, 3, 8, 16, 40):
        obs = images(num_rows)
        expected = features_of(torso, obs)
        assert torch.equal(features_of(quick, obs), expected)
        assert expected.any()


@pytest.mark.parametrize("which", ["weight", "bias"])
def test_weights_that_are_written_to_act_from_then_on(which):
    torso, obs = make(), images(2)
    quick = packed(torso)
    before = features_of(quick, obs)
    for name, parameter in torso.named_parameters():
        if name.endswith(which):
            with torch.no_grad():
                parameter.copy_(parameter + 0.01)
            found = features_of(quick, obs)
            assert torch.equal(found, features_of(torso, obs))
            assert not torch.equal(found, before)
            before = found


def test_bytes_that_are_no_words_go_through_the_torso():
    torso = make()
    memory = images(3)[""].flatten()
    odd = torch.cat([memory[:1], memory])[1:].view(3, *IMAGE.shape)
    assert odd.storage_offset() == 1
    obs = {"": odd}
    assert torch.equal(features_of(packed(torso), obs), features_of(torso, obs))


@pytest.mark.parametrize(
    ("section", "leaves", "precision"),
    [
        (ModelSection(name="impala_resnet"), (IMAGE,), torch.bfloat16),
        (ModelSection(name="small_cnn"), (IMAGE,), torch.bfloat16),
        (NATURE, (ArraySpec("", (4, 84, 84), "float32"),), torch.bfloat16),
        (ModelSection(name="mlp"), (ArraySpec("", (3,), "float32"),), torch.bfloat16),
        (NATURE, (IMAGE, ArraySpec("speed", (3,), "float32")), torch.bfloat16),
        (NATURE, (IMAGE, ArraySpec("other", (4, 84, 84), "uint8")), torch.bfloat16),
        (NATURE.model_copy(update={"activation": "tanh"}), (IMAGE,), torch.bfloat16),
        (NATURE, (IMAGE,), torch.float32),
    ],
)
def test_what_cannot_be_packed_is_left_as_it_is(section, leaves, precision):
    assert packed(make(section, *leaves, precision=precision)) is None


@pytest.mark.parametrize("name", module._NAMES)
def test_a_torch_without_one_of_the_operators_acts_as_ever(monkeypatch, name):
    names = [each for each in module._NAMES if each != name]
    monkeypatch.setattr(module, "_OPS", SimpleNamespace(**dict.fromkeys(names)))
    assert packed(make()) is None
