"""Keys of the model that go together, and those that do nothing together."""

import pytest

from impala_async.config.load import validate_config
from impala_async.config.model import TORSOS, ModelSection
from impala_async.errors import ConfigError
from tests.config.test_run import nested


def model_of(**settings):
    keys = {f"model.{key}": value for key, value in settings.items()}
    return validate_config(nested({"env.id": "X", **keys})).model


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"width": 2}, ["width (2)", "name (mlp)", "impala_resnet"]),
        ({"width": 4, "name": "nature_cnn"}, ["width (4)", "name (nature_cnn)"]),
        ({"width": 4, "name": "a.b:C"}, ["width (4)", "name (a.b:C)"]),
        ({"core_size": 64}, ["core_size (64)", "without core"]),
        ({"shared_torso": False, "core": "gru"}, ["shared_torso (false)", "core (gru)"]),
    ],
)
def test_a_key_that_does_nothing_is_refused_with_the_one_it_depends_on(settings, named):
    with pytest.raises(ConfigError) as caught:
        model_of(**settings)
    text = str(caught.value)
    assert "model: " in text
    assert all(name in text for name in named)


@pytest.mark.parametrize(
    "settings",
    [
        {"width": 2, "name": "impala_resnet"},
        {"core_size": 64, "core": "lstm"},
        {"shared_torso": True, "core": "lstm"},
        {"shared_torso": False, "name": "nature_cnn"},
    ],
)
def test_and_beside_it_is_fine(settings):
    model = model_of(**settings)
    assert ModelSection.model_validate_json(model.model_dump_json()) == model


@pytest.mark.parametrize(
    ("settings", "is_shared"),
    [
        ({}, False),
        ({"core": "gru"}, True),
        ({"shared_torso": True}, True),
        *[({"name": name}, True) for name in TORSOS[1:]],
        ({"name": "a.b:C"}, True),
        ({"name": "nature_cnn", "shared_torso": False}, False),
    ],
)
def test_only_a_plain_mlp_has_a_torso_each_by_default(settings, is_shared):
    assert model_of(**settings).has_shared_torso == is_shared


def test_a_name_that_is_no_torso_is_told_all_of_them():
    with pytest.raises(
        ConfigError, match="name must be one of mlp, nature_cnn, impala_resnet, small_"
    ):
        model_of(name="resnet")
