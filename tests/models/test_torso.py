"""Every torso of ours keeps the protocol that a user's own has to keep."""

import pytest
import torch
from torch import nn

from impala_async.config.model import TORSOS, ModelSection
from impala_async.models import build
from impala_async.models.torso import Torso
from impala_async.spec import ArraySpec, ObsSpec

OBS = ObsSpec((ArraySpec("eye", (36, 36, 2), "uint8"), ArraySpec("speed", (2,), "float32")))


def test_the_config_names_those_that_there_are():
    assert set(build.TORSOS) == set(TORSOS)


@pytest.mark.parametrize("name", TORSOS)
def test_a_torso_makes_features_of_rows(name):
    torso: Torso = build.TORSOS[name](OBS, ModelSection(name=name, hidden_sizes=(9,)))
    assert isinstance(torso, nn.Module)
    assert torso.num_out == 9
    obs = {
        "eye": torch.randint(0, 256, (5, 36, 36, 2), dtype=torch.uint8),
        "speed": torch.randn(5, 2),
    }
    before = {key: leaf.clone() for key, leaf in obs.items()}
    features = torso(obs)
    assert (features.shape, features.dtype) == ((5, 9), torch.float32)
    assert all(torch.equal(obs[key], leaf) for key, leaf in before.items())
    # Rows know nothing of each other.
    alone = torso({key: leaf[2:3] for key, leaf in obs.items()})
    torch.testing.assert_close(alone[0], features[2], rtol=1e-4, atol=1e-5)
