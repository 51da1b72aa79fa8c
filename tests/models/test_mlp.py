"""The torso computes what its settings say, from orthogonal weights."""

import pytest
import torch

from impala_async.config.model import ModelSection
from impala_async.models.mlp import MLPTorso, orthogonal_linear
from impala_async.schema import ArraySpec, ObsSpec


def torso_of(num_in=3, sizes=(5, 7), activation="tanh"):
    obs = ObsSpec((ArraySpec("", (num_in,), "float32"),))
    return MLPTorso(obs, ModelSection(hidden_sizes=sizes, activation=activation))


@pytest.mark.parametrize(("activation", "apply"), [("tanh", torch.tanh), ("relu", torch.relu)])
def test_forward_is_linear_then_activation_layer_by_layer(activation, apply):
    torso = torso_of(activation=activation)
    for layer in torso.layers:
        torch.nn.init.normal_(layer.bias)
    inputs_NF = torch.randn(11, 3)
    hidden_NH = inputs_NF
    for layer in torso.layers:
        hidden_NH = apply(hidden_NH @ layer.weight.T + layer.bias)
    torch.testing.assert_close(torso({"": inputs_NF}), hidden_NH)
    assert torso.num_out == 7


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_activations_in_place_keep_the_gradient_right(activation):
    torso = torso_of(3, (5, 4), activation).double()
    inputs_NF = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(torso.through, inputs_NF)


def test_the_input_is_left_as_it_is():
    inputs_NF = torch.randn(4, 3)
    before = inputs_NF.clone()
    torso_of(3, (5,), "relu")({"": inputs_NF})
    assert torch.equal(inputs_NF, before)


def test_hidden_layers_are_orthogonal_with_gain_root_two():
    for layer in torso_of(8, (6, 20)).layers:
        weight = layer.weight if layer.weight.shape[0] <= layer.weight.shape[1] else layer.weight.T
        torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(len(weight)))
        assert not layer.bias.any()


def test_gain_scales_a_layer():
    layer = orthogonal_linear(5, 3, 0.01)
    singular = torch.linalg.svdvals(layer.weight.detach())
    torch.testing.assert_close(singular, torch.full((3,), 0.01))
    assert not layer.bias.any()


def test_leaves_are_joined_in_the_order_of_the_spec():
    obs = ObsSpec(
        (
            ArraySpec("image", (2, 2), "uint8"),
            ArraySpec("lamp", (), "int64", (3,)),
            ArraySpec("speed", (1,), "float64"),
        )
    )
    torso = MLPTorso(obs, ModelSection(hidden_sizes=(8,), activation="relu"))
    torch.nn.init.eye_(torso.layers[0].weight)
    leaves = {
        "speed": torch.tensor([[0.5], [0.25]], dtype=torch.float64),
        "lamp": torch.tensor([2, 0]),
        "image": torch.tensor([[[1, 2], [3, 255]], [[0, 0], [0, 9]]], dtype=torch.uint8),
    }
    features = torso(leaves)
    assert features.dtype == torch.float32
    assert features.tolist() == [[1, 2, 3, 255, 0, 0, 1, 0.5], [0, 0, 0, 9, 1, 0, 0, 0.25]]


def test_without_settings_it_has_two_layers_of_64():
    torso = MLPTorso(ObsSpec((ArraySpec("", (3,), "float32"),)), ModelSection())
    assert [tuple(layer.weight.shape) for layer in torso.layers] == [(64, 3), (64, 64)]
    assert (torso({"": torch.full((1, 3), -5.0)}) < 0).any(), "tanh, not relu"
