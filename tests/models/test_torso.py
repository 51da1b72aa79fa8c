"""Torsos by name and of one's own, all by one protocol, and the precision that each computes in."""

import pytest
import torch
from torch import nn

from impala_async.config.model import TORSOS, ModelSection
from impala_async.errors import ConfigError, SpacesError
from impala_async.models import torso
from impala_async.models.actor_critic import ActorCritic
from impala_async.models.mlp import Hidden, joined
from impala_async.models.torso import pick_precision
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec

HERE = __name__
OBS = ObsSpec((ArraySpec("", (3,), "float32"),))
EYE = ObsSpec((ArraySpec("", (36, 36, 2), "uint8"),))
MIXED = ObsSpec((ArraySpec("eye", (36, 36, 2), "uint8"), ArraySpec("speed", (2,), "float32")))
ACTION = ActionSpec((ActionPart("", "discrete", (2,)),))
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_config_names_those_that_there_are():
    assert set(torso.TORSOS) == set(TORSOS)


@pytest.mark.parametrize("name", TORSOS)
def test_a_torso_makes_features_of_rows(name):
    made = torso.TORSOS[name](MIXED, ModelSection(name=name, hidden_sizes=(9,)))
    assert isinstance(made, nn.Module)
    assert made.num_out == 9
    obs = {
        "eye": torch.randint(0, 256, (5, 36, 36, 2), dtype=torch.uint8),
        "speed": torch.randn(5, 2),
    }
    before = {key: leaf.clone() for key, leaf in obs.items()}
    features = made(obs)
    assert (features.shape, features.dtype) == ((5, 9), torch.float32)
    assert all(torch.equal(obs[key], leaf) for key, leaf in before.items())
    # Rows know nothing of each other.
    alone = made({key: leaf[2:3] for key, leaf in obs.items()})
    torch.testing.assert_close(alone[0], features[2], rtol=1e-4, atol=1e-5)


def weights_of(seed, section, obs=EYE):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return list(ActorCritic(section, obs, ACTION).parameters())


@pytest.mark.parametrize("settings", [{"core": "lstm"}, *({"name": name} for name in TORSOS)])
def test_one_seed_gives_one_model_and_another_seed_another(settings):
    first, same, other = (weights_of(seed, ModelSection(**settings)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_section_decides_widths_and_torsos():
    for is_shared, num_torsos in ((None, 2), (True, 1)):
        section = ModelSection(hidden_sizes=(5,), shared_torso=is_shared)
        shapes = [tuple(p.shape) for p in weights_of(0, section, OBS)]
        assert shapes.count((5, 3)) == num_torsos


def test_it_is_built_without_memory_too():
    """So a learner finds out what a model would take."""
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


def fail_later(obs, features):
    if len(obs[""]) > 2:
        raise SystemExit(0)
    return features(obs)


TooWide = own_that(lambda obs, features: torch.cat([features(obs)] * 2, -1))
OneRow = own_that(lambda obs, features: features(obs)[:1])
InDouble = own_that(lambda obs, features: features(obs).double())
Fails = own_that(lambda obs, features: obs["pixels"])
InPlace = own_that(lambda obs, features: features({"": obs[""].mul_(10)}))
InItsDict = own_that(lambda obs, features: obs.update({"": obs[""] * 10}) or features(obs))
FailsLater = own_that(fail_later)


class WithoutSize(Own):
    num_out = property(lambda self: None, lambda self, value: None)

    def __init__(self, obs, section):
        nn.Module.__init__(self)


class TakesNothing(nn.Module):
    def __init__(self):
        super().__init__()


class NoModule:
    num_out = 6

    def __init__(self, obs, section):
        pass


A_NUMBER = 5


def own(name, **settings):
    return ModelSection(name=f"{HERE}:{name}", **settings)


def test_an_own_torso_gets_the_spec_and_the_section_and_is_shared_by_default():
    model = ActorCritic(own("Own", hidden_sizes=(5,), shared_torso=False), OBS, ACTION)
    assert isinstance(model.policy_torso, Own)
    assert isinstance(model.value_torso, Own)
    assert model.policy_torso is not model.value_torso
    assert model({"": torch.randn(4, 3)})[0].shape == (4, 2)
    assert ActorCritic(own("Own"), OBS, ACTION).value_torso is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TooWide", r"must give float32 of \[N, 6\], .* not torch.float32 of \[2, 12\]"),
        ("OneRow", r"not torch.float32 of \[1, 6\]"),
        ("InDouble", r"not torch.float64 of \[2, 6\]"),
        ("NoModule", "must make an nn.Module with a whole number num_out"),
        ("WithoutSize", "must make an nn.Module with a whole number num_out"),
        ("Fails", r"failed on two rows of zeros, at .*test_torso\.py:[0-9]+: KeyError: 'pixels'"),
        ("InPlace", r"must not change \[''\] in place"),
        ("TakesNothing", r"failed when it was made, at .*: TypeError: .* positional argument"),
        ("A_NUMBER", "is of type int, and cannot be called"),
        ("Missing", "tests.models.test_torso has no 'Missing'"),
    ],
)
def test_a_torso_that_does_not_fit_is_told_why(name, text):
    with pytest.raises(SpacesError, match=rf"model\.name: .*{name}.*{text}"):
        ActorCritic(own(name), OBS, ACTION)


def test_a_module_that_is_not_there_and_what_comes_with_python_are_named():
    for name, text in (
        ("no_such.module:Own", "no_such.module:Own failed to import no_such.module: Mod"),
        ("subprocess:Popen", "subprocess:Popen comes with Python"),
    ):
        with pytest.raises(SpacesError, match=rf"model\.name: {text}"):
            ActorCritic(ModelSection(name=name), OBS, ACTION)


def test_what_a_torso_stores_in_its_dict_is_not_for_the_other_one():
    model = ActorCritic(own("InItsDict", shared_torso=False), OBS, ACTION)
    model.value_torso.load_state_dict(model.policy_torso.state_dict())
    obs = {"": torch.randn(4, 3)}
    features = model.policy_torso(dict(obs))
    torch.testing.assert_close(model(obs)[1], model.value_head(features).squeeze(-1))


def test_what_an_own_torso_raises_when_it_is_called_is_told_as_its_own():
    model = ActorCritic(own("FailsLater"), OBS, ACTION)
    obs = {"": torch.randn(4, 3)}
    says = r"model\.name: .*FailsLater failed to make features, at .*test_torso\.py:\d+: SystemExit"
    for call in (model, lambda obs: model.act(obs, ())):
        with pytest.raises(SpacesError, match=says):
            call(obs)


# -------------------- precision


@pytest.mark.parametrize(
    ("flags", "model", "taken"),
    [
        ({"avx2", "avx512_bf16"}, "nature_cnn", torch.bfloat16),
        ({"amx_bf16"}, "impala_resnet", torch.bfloat16),
        ({"avx2", "avx512f"}, "nature_cnn", torch.float32),
        ({"avx512_bf16"}, "mlp", torch.float32),
        ({"avx512_bf16"}, "small_cnn", torch.float32),
    ],
)
def test_auto_takes_bfloat16_on_a_cpu_where_it_pays(flags, model, taken, monkeypatch):
    monkeypatch.setattr(torso, "_cpu_flags", lambda: frozenset(flags))
    assert pick_precision("auto", model, CPU) == taken


def test_a_precision_that_was_asked_for_is_taken(monkeypatch):
    monkeypatch.setattr(torso, "_cpu_flags", frozenset)
    assert pick_precision("bfloat16", "mlp", CPU) == torch.bfloat16
    monkeypatch.setattr(torso, "_cpu_flags", lambda: frozenset({"amx_bf16"}))
    assert pick_precision("float32", "nature_cnn", CPU) == torch.float32


def test_a_gpu_takes_bfloat16_when_it_is_new_enough(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert pick_precision("auto", "mlp", CUDA) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert pick_precision("auto", "nature_cnn", CUDA) == torch.float32
    with pytest.raises(ConfigError, match=r"model\.precision: Old GPU has no bfloat16"):
        pick_precision("bfloat16", "nature_cnn", CUDA)
