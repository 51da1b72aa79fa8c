"""Layers by numpy give what torch gives, and so do their gradients."""

import pytest
import torch
from torch import nn

from impala_async.config.model import ModelSection
from impala_async.models import dense
from impala_async.models.torso import MLPTorso
from impala_async.schema import ArraySpec, ObsSpec

ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("is_input_learned", [False, True])
def test_features_and_gradients_are_those_of_torch(activation, is_input_learned):
    torch.manual_seed(0)
    layers = [nn.Linear(5, 16), nn.Linear(16, 8), nn.Linear(8, 3)]
    rows = torch.randn(40, 5, requires_grad=is_input_learned)
    wanted = [rows, *(weight for layer in layers for weight in layer.parameters())]
    wanted = [tensor for tensor in wanted if tensor.requires_grad]

    hidden = rows
    for layer in layers:
        hidden = ACTIVATIONS[activation](layer(hidden))
    features = dense.through(rows, layers, activation)
    torch.testing.assert_close(features, hidden, rtol=1e-5, atol=1e-6)
    weights = torch.randn_like(features)
    expected, found = (torch.autograd.grad((x * weights).sum(), wanted) for x in (hidden, features))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_layer_that_changed_before_its_gradient_is_noticed():
    layer = nn.Linear(3, 2)
    features = dense.through(torch.randn(4, 3), [layer], "tanh")
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        features.sum().backward()


def test_it_is_for_float32_on_one_thread_of_a_cpu():
    rows = torch.zeros(2, 3)
    assert dense.pays(rows)
    assert not dense.pays(rows.double())
    assert not dense.pays(rows.to("meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert not dense.pays(rows)
    torch.set_num_threads(2)
    assert not dense.pays(rows)


def test_a_torso_built_from_the_mlp_computes_as_it_says():
    class Own(MLPTorso):
        def __init__(self, *given):
            super().__init__(*given)
            self.activate = torch.nn.functional.gelu

    torso = Own(ObsSpec((ArraySpec("", (3,), "float32"),)), ModelSection(hidden_sizes=(4,)))
    rows = torch.randn(5, 3)
    expected = torch.nn.functional.gelu(torso.layers[0](rows))
    torch.testing.assert_close(torso({"": rows}), expected)
