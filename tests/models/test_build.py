"""A model is built from its section, with torch's default generator as the only randomness."""

import pytest
import torch
from torch import nn

from impala_async.config.model import TORSOS, ModelSection
from impala_async.models.build import build_model
from impala_async.models.mlp import Hidden, joined
from impala_async.spec import ActionPart, ActionSpec, ArraySpec, ObsSpec

HERE = __name__
OBS = ObsSpec((ArraySpec("", (3,), "float32"),))
EYE = ObsSpec((ArraySpec("", (36, 36, 2), "uint8"),))
ACTION = ActionSpec((ActionPart("", "discrete", (2,)),))


def weights_of(seed, section, obs=OBS):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return list(build_model(section, obs, ACTION).parameters())


@pytest.mark.parametrize(
    "section",
    [
        ModelSection(),
        ModelSection(core="lstm", core_size=8),
        *map(lambda n: ModelSection(name=n), TORSOS),
    ],
    ids=str,
)
def test_one_seed_gives_one_model_and_another_seed_another(section):
    first, same, other = (weights_of(seed, section, EYE) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_section_decides_widths_and_torsos():
    shapes = [tuple(p.shape) for p in weights_of(0, ModelSection(hidden_sizes=(5,)))]
    assert shapes.count((5, 3)) == 2
    shared = ModelSection(hidden_sizes=(5,), shared_torso=True)
    assert [tuple(p.shape) for p in weights_of(0, shared)].count((5, 3)) == 1


def test_it_is_built_without_memory_too():
    """So a learner finds out what a model would take."""
    with torch.device("meta"):
        model = build_model(ModelSection(name="impala_resnet", core="gru"), EYE, ACTION)
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


class TooWide(Own):
    def forward(self, obs):
        return torch.cat([super().forward(obs)] * 2, -1)


class OneRow(Own):
    def forward(self, obs):
        return super().forward(obs)[:1]


class InDouble(Own):
    def forward(self, obs):
        return super().forward(obs).double()


class WithoutSize(Own):
    num_out = property(lambda self: None, lambda self, value: None)

    def __init__(self, obs, section):
        nn.Module.__init__(self)


class Fails(Own):
    def forward(self, obs):
        return obs["pixels"]


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


def test_an_own_torso_gets_the_spec_and_the_section():
    model = build_model(own("Own", hidden_sizes=(5,), shared_torso=False), OBS, ACTION)
    assert isinstance(model.policy_torso, Own)
    assert isinstance(model.value_torso, Own)
    assert model.policy_torso is not model.value_torso
    assert model({"": torch.randn(4, 3)}).parameters_NP.shape == (4, 2)


def test_by_default_policy_and_value_share_it():
    assert build_model(own("Own"), OBS, ACTION).value_torso is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TooWide", r"must give float32 of \[N, 6\], .* it gave torch.float32 of \[2, 12\]"),
        ("OneRow", r"it gave torch.float32 of \[1, 6\]"),
        ("InDouble", r"it gave torch.float64 of \[2, 6\]"),
        ("NoModule", "must make an nn.Module with a whole number num_out"),
        ("WithoutSize", "must make an nn.Module with a whole number num_out"),
        ("Fails", r"failed on two rows of zeros, at .*test_build\.py:[0-9]+: KeyError: 'pixels'"),
        ("TakesNothing", r"failed when it was made, at .*: TypeError: .* positional argument"),
        ("A_NUMBER", "is of type int and makes no torso"),
        ("Missing", "module .* has no attribute 'Missing'"),
    ],
)
def test_a_torso_that_does_not_fit_is_told_why(name, text):
    with pytest.raises(ValueError, match=rf"model\.name: .*{name}.*{text}"):
        build_model(own(name), OBS, ACTION)


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(
        ValueError, match=r"model\.name: cannot import no_such.module:Own: No module"
    ):
        build_model(ModelSection(name="no_such.module:Own"), OBS, ACTION)


def test_what_comes_with_python_is_not_called() -> None:
    with pytest.raises(ValueError, match=r"model\.name: subprocess:Popen comes with Python"):
        build_model(ModelSection(name="subprocess:Popen"), OBS, ACTION)
