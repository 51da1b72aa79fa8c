"""The torso computes what its settings say, from orthogonal weights; numpy computes the same."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from impala_async.config.model import ModelSection
from impala_async.models.flat import Snapshot
from impala_async.models.mlp import MLPTorso, orthogonal
from impala_async.policy import Policy
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema, recurrent_state
from impala_async.weights import Version


def torso_of(num_in=3, sizes=(5, 7), activation="tanh"):
    obs = ObsSpec((ArraySpec("", (num_in,), "float32"),))
    return MLPTorso(obs, ModelSection(hidden_sizes=sizes, activation=activation))


@pytest.mark.parametrize(("activation", "apply"), [("tanh", torch.tanh), ("relu", torch.relu)])
def test_it_is_linear_then_activation_layer_by_layer(activation, apply):
    torso = torso_of(activation=activation)
    for layer in torso.layers:
        torch.nn.init.normal_(layer.bias)
    inputs_NF = torch.randn(11, 3)
    hidden_NH, before = inputs_NF, inputs_NF.clone()
    for layer in torso.layers:
        hidden_NH = apply(hidden_NH @ layer.weight.T + layer.bias)
    torch.testing.assert_close(torso({"": inputs_NF}), hidden_NH)
    assert torso.num_out == 7
    assert torch.equal(inputs_NF, before)
    # In place, but right for the gradient.
    double_NF = inputs_NF.double().requires_grad_()
    assert torch.autograd.gradcheck(torso.double().through, double_NF)


def test_layers_are_orthogonal_with_their_gain_and_without_bias():
    for layer in torso_of(8, (6, 20)).layers:
        weight = layer.weight if layer.weight.shape[0] <= layer.weight.shape[1] else layer.weight.T
        torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(len(weight)))
        assert not layer.bias.any()
    layer = orthogonal(torch.nn.Linear(5, 3), 0.01)
    singular = torch.linalg.svdvals(layer.weight.detach())
    torch.testing.assert_close(singular, torch.full((3,), 0.01))


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


# -------------------- acting by numpy

SCHEMA = Schema(
    ObsSpec((ArraySpec("", (2, 3), "float32"),)),
    ActionSpec((ActionPart("", "discrete", (5,)),)),
    rows=3,
)


OTHERS = (
    ActionPart("", "continuous", (), (2,)),
    ActionPart("", "discrete", (2, 3), (2,)),
    ActionPart("", "discrete", (4,), (1,)),
)
MASKED = Schema(
    ObsSpec((ArraySpec("seen", (3,), "float32"), ArraySpec("legal", (5,), "int8"))),
    ActionSpec(SCHEMA.action.parts, legal="legal"),
    rows=3,
)


def obs_of(num_columns, seed=0):
    return {"": np.random.default_rng(seed).normal(0, 2, (num_columns, 2, 3)).astype(np.float32)}


@pytest.mark.parametrize(
    "section",
    [{}, {"activation": "relu"}, {"hidden_sizes": [7]}, {"shared_torso": True}],
    ids=str,
)
def test_by_numpy_it_acts_as_by_torch_also_with_newer_weights(section, monkeypatch):
    quick, other = (Policy(SCHEMA, ModelSection(**section), seed=seed) for seed in (3, 9))
    slow = Policy(SCHEMA, ModelSection(**section), seed=3)
    assert quick._quick is not None
    slow._quick = None
    first, second = (torch.Generator().manual_seed(5) for _ in range(2))
    for num_columns in (1, 8, 300):
        obs = obs_of(num_columns)
        before = obs[""].copy()
        mine, theirs = quick.act(obs, {}, first), slow.act(obs, {}, second)
        np.testing.assert_array_equal(mine.actions[""], theirs.actions[""])
        assert mine.actions[""].dtype == theirs.actions[""].dtype
        np.testing.assert_allclose(mine.log_probs, theirs.log_probs, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(obs[""], before)
        assert mine.state == {}
        weights = Snapshot(other.layout, other.tensors).take(Version(1, 7))
        for policy in (quick, slow):
            policy.load(weights)
    # One of them by numpy: so it is told nothing of inference.
    monkeypatch.setattr(torch, "inference_mode", None)
    quick.act(obs, {}, first)


@pytest.mark.parametrize(
    ("schema", "section"),
    [
        (SCHEMA, {"core": "lstm", "core_size": 4}),
        (SCHEMA, {"normalize_obs": True}),
        (replace(SCHEMA, obs=ObsSpec((ArraySpec("", (3,), "uint8"),))), {}),
        (replace(SCHEMA, obs=ObsSpec((ArraySpec("", (), "int64", (4,)),))), {}),
        *((replace(SCHEMA, action=ActionSpec((part,))), {}) for part in OTHERS),
        (MASKED, {}),
        (replace(SCHEMA, obs=ObsSpec((ArraySpec("", (48, 48, 3), "uint8"),))),
         {"name": "nature_cnn"}),
    ],
    ids=str,
)  # fmt: skip
def test_what_numpy_does_not_know_goes_through_torch(schema, section):
    model = ModelSection(**section)
    schema = replace(schema, state=recurrent_state(model.core, model.core_size))
    assert Policy(schema, model, seed=0)._quick is None
