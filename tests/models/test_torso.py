"""Torsos by name and of one's own, all by one protocol, and the precision that each computes in."""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from impala_async.config.model import TORSOS, ModelSection
from impala_async.errors import ConfigError, SpacesError
from impala_async.models import torso
from impala_async.models.actor_critic import ActorCritic
from impala_async.models.flat import Snapshot
from impala_async.models.leaves import LEAST_SIDES, images_of
from impala_async.models.torso import (
    Hidden,
    MLPTorso,
    choose_torso,
    joined,
    orthogonal,
    pick_precision,
)
from impala_async.policy import Policy
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema, recurrent_state
from impala_async.weights import Version

HERE = __name__
OBS = ObsSpec((ArraySpec("", (3,), "float32"),))
EYE = ObsSpec((ArraySpec("", (36, 36, 2), "uint8"),))
ACTION = ActionSpec((ActionPart("", "discrete", (2,)),))
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_config_names_those_that_there_are():
    assert {*torso.TORSOS, "auto"} == {*LEAST_SIDES, "auto"} == set(TORSOS)


def test_auto_goes_by_the_smallest_image_that_a_convolution_could_see():
    vector = ArraySpec("v", (4,), "float32")
    choice = ArraySpec("c", (4,), "int64", (3,) * 4)
    for leaves, name in (
        ([vector], "mlp"),
        ([vector, choice], "mlp"),
        ([ArraySpec("i", (36, 40, 3), "uint8"), vector], "nature_cnn"),
        ([ArraySpec("i", (4, 84, 84, 1), "uint8")], "nature_cnn"),
        ([ArraySpec("i", (84, 84, 3), "uint8"), ArraySpec("j", (10, 35, 2), "bool")], "small_cnn"),
        ([ArraySpec("i", (10, 10, 4), "float32")], "small_cnn"),
        ([ArraySpec("i", (9, 2, 4), "float32")], "mlp"),
        # A vector to all torsos that it could be.
        ([ArraySpec("i", (84, 84, 4), "uint8"), ArraySpec("j", (9, 2, 4), "uint8")], "nature_cnn"),
        ([ArraySpec("i", (10, 10, 4), "bool"), ArraySpec("j", (1, 1, 6), "float32")], "small_cnn"),
    ):
        obs = ObsSpec(tuple(leaves))
        assert choose_torso(ModelSection(core="gru"), obs).name == name
        model = ActorCritic(ModelSection(), obs, ACTION)
        assert model.torso_name == name
        # Where images are, policy and value share what sees them.
        assert (model.value_torso is None) == (name != "mlp")
        given = ModelSection(name="impala_resnet")
        assert choose_torso(given, obs) is given


def test_it_is_built_without_memory_too():
    """A learner finds out so how much memory a model would take."""
    with torch.device("meta"):
        model = ActorCritic(ModelSection(name="impala_resnet", core="gru"), EYE, ACTION)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


# -------------------- a user's own torso


class Own(nn.Module):
    num_out = 6

    def __init__(self, obs, section):
        super().__init__()
        self.leaves = obs.leaves
        self.layers = Hidden(3, (*(section.hidden_sizes or ()), self.num_out), "tanh")

    def forward(self, obs):
        return self.layers.through(joined(self.leaves, obs))


def own_that(forward):
    """A torso that does this with the observation and with what `Own` makes of it."""

    class Odd(Own):
        def forward(self, obs):
            return forward(obs, super().forward)

    return Odd


TooWide = own_that(lambda obs, features: torch.cat([features(obs)] * 2, -1))
OneRow = own_that(lambda obs, features: features(obs)[:1])
InDouble = own_that(lambda obs, features: features(obs).double())
Several = own_that(lambda obs, features: (features(obs), None))
NoNumber = own_that(lambda obs, features: features(obs) * math.nan)
NoNumberOfZero = own_that(lambda obs, features: features(obs) * (obs[""] / obs[""])[:, :1])
Fails = own_that(lambda obs, features: obs["pixels"])
InPlace = own_that(lambda obs, features: features({"": obs[""].mul_(10)}))
InItsDict = own_that(lambda obs, features: obs.update({"": obs[""] * 10}) or features(obs))
FailsLater = own_that(lambda obs, features: sys.exit(0) if len(obs[""]) > 2 else features(obs))
Detached = own_that(lambda obs, features: features(obs).detach())
ByChance = own_that(lambda obs, features: features(obs) + torch.rand(6))
Centred = own_that(lambda obs, features: features(obs) - features(obs).mean(0))
LAYERS = [nn.Linear(6, 6)]
InAList = own_that(lambda obs, features: LAYERS[0](features(obs)))


def own_with(*layers):
    """A torso that has layers besides."""

    class With(Own):
        def __init__(self, obs, section):
            super().__init__(obs, section)
            self.extra = nn.Sequential(*layers)

        def forward(self, obs):
            return self.extra(super().forward(obs))

    return With


class OverRows(nn.Module):
    """It takes the rows of a batch for those of time."""

    num_out = 6

    def __init__(self, obs, section):
        super().__init__()
        self.memory = nn.LSTM(3, 6)

    def forward(self, obs):
        return self.memory(obs[""])[0]


Drops, Drops0 = own_with(nn.ReLU(), nn.Dropout(0.1)), own_with(nn.Dropout(0.0), nn.LayerNorm(6))
InBatches = own_with(nn.BatchNorm1d(6, track_running_stats=False))


class WithoutSize(Own):
    num_out = property(lambda self: None, lambda self, value: None)

    def __init__(self, obs, section):
        nn.Module.__init__(self)


class NoModule:
    num_out = 6

    def __init__(self, obs, section):
        pass


def make_none():
    """It takes neither the observation nor the section."""


def own(name, **settings):
    return ModelSection(name=f"{HERE}:{name}", **settings)


def test_an_own_torso_gets_the_spec_and_the_section_and_is_shared_by_default():
    model = ActorCritic(own("Own", hidden_sizes=(5,), shared_torso=False), OBS, ACTION)
    assert model.policy_torso is not model.value_torso
    assert model({"": torch.randn(4, 3)})[0].shape == (4, 2)
    assert ActorCritic(own("Own"), OBS, ACTION).value_torso is None
    assert ActorCritic(own("Drops0"), OBS, ACTION).value_torso is None
    # One that divides by what it sees has no number of zeros alone.
    assert ActorCritic(own("NoNumberOfZero"), OBS, ACTION).value_torso is None


def test_a_torso_that_does_not_fit_is_told_why():
    for name, text in (
        ("TooWide", r"must give float32 of \[N, 6\], .* not torch.float32 of \[2, 12\]"),
        ("OneRow", r"not torch.float32 of \[1, 6\]"),
        ("InDouble", r"not torch.float64 of \[2, 6\]"),
        ("Several", "must give a tensor, not tuple"),
        ("NoNumber", "gives no finite number, for a row of zeros nor for one of ones"),
        ("NoModule", "must make an nn.Module with a whole number num_out"),
        ("WithoutSize", "must make an nn.Module with a whole number num_out"),
        ("Fails", r"zeros of the leaves \[''\]: KeyError: 'pixels' \(.*test_torso\.py:[0-9]+\)"),
        *(
            (name, "the same features for a row each time, whatever is beside it, and does not")
            for name in ("ByChance", "Centred", "OverRows")
        ),
        ("InAList", "has weights that its nn.Module does not know"),
        ("Detached", "no gradient comes from its features"),
        ("InPlace", r"must not change \[''\] in place"),
        ("Drops", "the same features for a row each time, and extra.1 is Dropout: leave it out"),
        ("InBatches", "extra.0 is BatchNorm1d"),
        ("make_none", r"failed when it was made: TypeError: .* positional argument"),
        ("Missing", "tests.models.test_torso has no 'Missing'"),
    ):
        with pytest.raises(SpacesError, match=rf"model\.name: .*{name}.*{text}"):
            ActorCritic(own(name), OBS, ACTION)


def test_what_a_torso_stores_in_its_dict_is_not_for_the_other_one():
    model = ActorCritic(own("InItsDict", shared_torso=False), OBS, ACTION)
    model.value_torso.load_state_dict(model.policy_torso.state_dict())
    obs = {"": torch.randn(4, 3)}
    features = model.policy_torso(dict(obs))
    torch.testing.assert_close(model(obs)[1], model.value_head(features).squeeze(-1))


def test_what_an_own_torso_raises_when_it_is_called_is_told_as_its_own():
    model = ActorCritic(own("FailsLater"), OBS, ACTION)
    obs = {"": torch.randn(4, 3)}
    says = r"model\.name: .*FailsLater failed to make features: SystemExit.*test_torso\.py:\d+\)"
    for call in (model, lambda obs: model.act(obs, ())):
        with pytest.raises(SpacesError, match=says):
            call(obs)


# -------------------- precision


def test_auto_takes_bfloat16_on_a_cpu_where_it_pays(monkeypatch):
    for flags, model, taken in (
        ({"avx2", "avx512_bf16"}, "nature_cnn", torch.bfloat16),
        ({"amx_bf16"}, "impala_resnet", torch.bfloat16),
        ({"avx2", "avx512f"}, "nature_cnn", torch.float32),
        ({"avx512_bf16"}, "mlp", torch.float32),
        ({"avx512_bf16"}, "small_cnn", torch.float32),
    ):
        monkeypatch.setattr(torso, "_cpu_flags", lambda flags=flags: flags)
        assert pick_precision("auto", model, CPU) == taken, (flags, model)


def test_a_precision_that_was_asked_for_is_taken_and_a_gpu_must_be_new_enough(monkeypatch):
    monkeypatch.setattr(torso, "_cpu_flags", frozenset)
    assert pick_precision("bfloat16", "mlp", CPU) == torch.bfloat16
    monkeypatch.setattr(torso, "_cpu_flags", lambda: frozenset({"amx_bf16"}))
    assert pick_precision("float32", "nature_cnn", CPU) == torch.float32
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert pick_precision("auto", "impala_resnet", CUDA) == torch.bfloat16
    assert pick_precision("bfloat16", "mlp", CUDA) == torch.bfloat16
    assert pick_precision("auto", "mlp", CUDA) == torch.float32
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert pick_precision("auto", "nature_cnn", CUDA) == torch.float32
    with pytest.raises(ConfigError, match=r"model\.precision: Old GPU has no bfloat16"):
        pick_precision("bfloat16", "nature_cnn", CUDA)


# -------------------- images

FRAMES = ArraySpec("", (84, 84, 4), "uint8")
TINY = ArraySpec("", (10, 10, 4), "bool")
SEEN = {"nature_cnn": FRAMES, "impala_resnet": FRAMES, "small_cnn": TINY}


def make(name, *leaves, **settings):
    return torso.TORSOS[name](ObsSpec(leaves), ModelSection(name=name, **settings))


def rows_of(*leaves, num=3):
    def values(leaf):
        high = leaf.choices[0] if leaf.choices else 256 if leaf.dtype == "uint8" else 2
        return torch.randint(0, high, (num, *leaf.shape)).to(getattr(torch, leaf.dtype))

    return {leaf.name: values(leaf) for leaf in leaves}


def test_sizes_are_those_of_the_paper_and_every_weight_gets_a_gradient():
    for name, num_seen, num_out, convolutions in (
        # 84 -> 20 -> 9 -> 7
        ("nature_cnn", 7 * 7 * 64, 512, 77_984),
        # 84 -> 42 -> 21 -> 11; each stage a convolution, and two blocks of two
        ("impala_resnet", 11 * 11 * 32, 256, 97_744),
        ("small_cnn", 8 * 8 * 16, 128, 592),
    ):
        torso = make(name, SEEN[name])
        assert torso.num_out == num_out, name
        features = torso(rows_of(SEEN[name]))
        assert features.shape == (3, num_out), name
        assert sum(each.numel() for each in torso.bodies.parameters()) == convolutions, name
        assert torso.hidden.layers[0].in_features == num_seen, name
        # Activations in place must not spoil it: autograd would say so.
        features.square().sum().backward()
        assert all(parameter.grad.any() for parameter in torso.parameters()), name


@pytest.mark.parametrize("name", ["nature_cnn", "impala_resnet"])
def test_a_rectifier_and_its_gradient_have_one_order_in_memory(name):
    class Rectified(torch.utils._python_dispatch.TorchDispatchMode):
        strides: tuple[tuple[int, ...], ...] = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket is torch.ops.aten.threshold_backward:
                gradient, features, _ = args
                assert gradient.stride() == features.stride()
                self.strides += (features.stride(),)
            return func(*args, **(kwargs or {}))

    torso = make(name, FRAMES)
    features = torso(rows_of(FRAMES))
    with Rectified() as rectified:
        features.backward(torch.rand_like(features))
    # Behind the hidden layer, behind the convolutions as features, and between convolutions.
    assert [len(strides) for strides in rectified.strides[:3]] == [2, 2, 4]


def test_a_residual_block_adds_to_what_it_sees():
    first = make("impala_resnet", FRAMES).bodies[0][0]
    images = torch.rand(2, 4, 84, 84)
    with torch.no_grad():
        for block in first.blocks:
            block[-1].weight.zero_()
            block[-1].bias.fill_(1.0)
        torch.testing.assert_close(first(images), first.enter(images) + 2)


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


SMALLEST = pytest.mark.parametrize(
    ("name", "size", "instead"),
    [("nature_cnn", 35, "impala_resnet or small_cnn"), ("small_cnn", 2, "mlp")],
)


@SMALLEST
def test_images_that_are_too_small(name, size, instead):
    make(name, ArraySpec("eye", (size + 1, size + 1, 1), "uint8"))
    says = f"{name} is for larger images than 'eye' of {size} x {size}: use {instead}$"
    with pytest.raises(SpacesError, match=says):
        make(name, ArraySpec("eye", (size, size, 1), "uint8"))


@SMALLEST
def test_beside_a_large_one_an_image_that_is_too_small_is_a_vector(name, size, instead):
    large, small = ArraySpec("eye", (40, 40, 1), "uint8"), ArraySpec("map", (40, size, 1), "uint8")
    alone, torso = make(name, large), make(name, large, small)
    assert (torso.images, torso.vectors) == ([large], [small])
    num_seen = alone.hidden.layers[0].in_features
    assert torso.hidden.layers[0].in_features == num_seen + 40 * size
    assert torso(rows_of(large, small)).shape == (3, torso.num_out)
    # So it is normalised as one.
    model = ActorCritic(ModelSection(name=name), ObsSpec((large, small)), ACTION)
    assert [each.mean.numel() for each in model.normalizers] == [40 * size]
    assert images_of(name, ObsSpec((small,))) == []


def test_an_actor_that_nobody_knows_cannot_ask_for_a_thousand_networks():
    leaves = [ArraySpec(f"eye{i}", (8, 8, 1), "uint8") for i in range(torso.MOST_IMAGES + 1)]
    with pytest.raises(SpacesError, match=r"has 65 images, each with .*: wants 64 at most$"):
        make("small_cnn", *leaves)
    assert len(make("small_cnn", *leaves[1:]).bodies) == torso.MOST_IMAGES


def test_without_an_image_it_says_what_to_use():
    says = r"nature_cnn wants an image .* three dimensions, or a stack .* of four: use mlp"
    for shape, dtype in (((84,), "uint8"), ((84, 84), "uint8"), ((4, 84, 84, 3), "float32")):
        with pytest.raises(SpacesError, match=says):
            make("nature_cnn", ArraySpec("", shape, dtype))


# -------------------- the multi-layer perceptron, and acting by numpy


@pytest.mark.parametrize(("activation", "apply"), [("tanh", torch.tanh), ("relu", torch.relu)])
def test_it_is_linear_then_activation_from_orthogonal_layers_without_bias(activation, apply):
    torso = MLPTorso(OBS, ModelSection(hidden_sizes=(5, 7), activation=activation))
    inputs_NF = torch.randn(11, 3)
    hidden_NH, before = inputs_NF, inputs_NF.clone()
    for layer in torso.layers:
        assert not layer.bias.any()
        torch.testing.assert_close(layer.weight.T @ layer.weight, 2 * torch.eye(layer.in_features))
        torch.nn.init.normal_(layer.bias)
        hidden_NH = apply(hidden_NH @ layer.weight.T + layer.bias)
    torch.testing.assert_close(torso({"": inputs_NF}), hidden_NH)
    assert torso.num_out == 7
    assert torch.equal(inputs_NF, before)
    # It works in place, and its gradient is right all the same.
    double_NF = inputs_NF.double().requires_grad_()
    assert torch.autograd.gradcheck(torso.double().through, double_NF)
    weight = orthogonal(torch.nn.Linear(5, 3), 0.01).weight.detach()
    torch.testing.assert_close(torch.linalg.svdvals(weight), torch.full((3,), 0.01))


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
MASKED = replace(
    SCHEMA,
    obs=ObsSpec((*SCHEMA.obs.leaves, ArraySpec("legal", (5,), "int8"))),
    action=replace(SCHEMA.action, legal="legal"),
)


@pytest.mark.parametrize(
    "section",
    [{}, {"activation": "relu"}, {"hidden_sizes": [7]}, {"normalize_obs": False}],
    ids=str,
)
def test_by_numpy_it_acts_as_by_torch_also_with_newer_weights(section, monkeypatch):
    quick, other = (Policy(SCHEMA, ModelSection(**section), seed=seed) for seed in (3, 9))
    slow = Policy(SCHEMA, ModelSection(**section), seed=3)
    for normalizer in other.model.normalizers:
        normalizer.update(3 * torch.randn(50, 6) + 1, torch.ones(50, dtype=torch.bool))
    assert quick._quick is not None
    slow._quick = None
    first, second = (torch.Generator().manual_seed(5) for _ in range(2))
    for num_columns in (1, 8, 300):
        numbers = np.random.default_rng(0).normal(0, 2, (num_columns, 2, 3))
        obs = {"": numbers.astype(np.float32)}
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


def test_what_numpy_does_not_know_goes_through_torch():
    for schema, section in (
        (SCHEMA, {"core": "lstm", "core_size": 4}),
        (replace(SCHEMA, obs=ObsSpec((ArraySpec("", (3,), "uint8"),))), {}),
        (replace(SCHEMA, obs=ObsSpec((ArraySpec("", (), "int64", (4,)),))), {}),
        *((replace(SCHEMA, action=ActionSpec((part,))), {}) for part in OTHERS),
        (MASKED, {}),
        (replace(SCHEMA, obs=ObsSpec((ArraySpec("", (48, 48, 3), "uint8"),))),
         {"name": "nature_cnn"}),
    ):  # fmt: skip
        model = ModelSection(**section)
        schema = replace(schema, state=recurrent_state(model.core, model.core_size))
        assert Policy(schema, model, seed=0)._quick is None, (schema, section)


def test_where_an_environment_has_numpy_raise_a_policy_acts_by_torch():
    with np.errstate(all="raise"):
        policy = Policy(SCHEMA, ModelSection(), seed=0)
        obs = {"": np.full((1, *SCHEMA.obs.leaves[0].shape), 1e-38, np.float32)}
        assert np.isfinite(policy.act(obs, {}, policy.new_generator()).log_probs).all()
