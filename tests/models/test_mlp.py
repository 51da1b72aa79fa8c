"""The torso computes what its settings say, from orthogonal weights."""

import math

import pytest
import torch

from impala_async.models.mlp import MLPTorso, orthogonal_linear


@pytest.mark.parametrize(("activation", "apply"), [("tanh", torch.tanh), ("relu", torch.relu)])
def test_forward_is_linear_then_activation_layer_by_layer(activation, apply):
    torso = MLPTorso(3, (5, 7), activation)
    for layer in torso.layers:
        torch.nn.init.normal_(layer.bias)
    inputs_NF = torch.randn(11, 3)
    hidden_NH = inputs_NF
    for layer in torso.layers:
        hidden_NH = apply(hidden_NH @ layer.weight.T + layer.bias)
    torch.testing.assert_close(torso(inputs_NF), hidden_NH)
    assert torso.num_out == 7


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_activations_in_place_keep_the_gradient_right(activation):
    torso = MLPTorso(3, (5, 4), activation).double()
    inputs_NF = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(torso, inputs_NF)


def test_the_input_is_left_as_it_is():
    inputs_NF = torch.randn(4, 3)
    before = inputs_NF.clone()
    MLPTorso(3, (5,), "relu")(inputs_NF)
    assert torch.equal(inputs_NF, before)


def test_hidden_layers_are_orthogonal_with_gain_root_two():
    torso = MLPTorso(8, (6, 20), "tanh")
    for layer in torso.layers:
        weight = layer.weight if layer.weight.shape[0] <= layer.weight.shape[1] else layer.weight.T
        torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(len(weight)))
        assert not layer.bias.any()


def test_gain_scales_a_layer():
    layer = orthogonal_linear(5, 3, 0.01)
    singular = torch.linalg.svdvals(layer.weight.detach())
    torch.testing.assert_close(singular, torch.full((3,), 0.01))
    assert math.isclose(float(layer.bias.detach().abs().sum()), 0.0)
