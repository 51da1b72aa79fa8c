"""The example's torso fits any observation."""

import pytest
import torch

from examples.custom_model import MyTorso
from impala_async.config.model import ModelSection
from impala_async.errors import SpacesError
from impala_async.models.actor_critic import ActorCritic
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec

NAME = "examples.custom_model:MyTorso"
ACTION = ActionSpec((ActionPart("", "discrete", (2,)),))
OBS = ObsSpec(
    (
        ArraySpec("eye", (5, 5, 2), "uint8"),
        ArraySpec("lamp", (), "int64", (3,)),
        ArraySpec("speed", (2,), "float64"),
    )
)


@pytest.mark.parametrize("core", [None, "gru"])
def test_the_package_finds_it_by_its_name(core):
    section = ModelSection.model_validate({"name": NAME, "hidden_sizes": (8, 8, 8), "core": core})
    model = ActorCritic(section, OBS, ACTION)
    assert isinstance(model.policy_torso, MyTorso)
    assert len(model.policy_torso.layers) == 3
    obs = {
        "eye": torch.randint(0, 256, (4, 5, 5, 2), dtype=torch.uint8),
        "lamp": torch.tensor([0, 1, 2, 0]),
        "speed": torch.randn(4, 2, dtype=torch.float64),
    }
    assert model.policy_torso(obs).shape == (4, 8)


def test_what_it_cannot_build_is_said():
    with pytest.raises(SpacesError, match=r"model\.hidden_sizes: MyTorso wants equal ones"):
        ActorCritic(ModelSection(name=NAME, hidden_sizes=(8, 9)), OBS, ACTION)
