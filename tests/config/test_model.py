"""Keys of the model that go together, and those that do nothing together."""

import pytest

from impala_async.config.model import TORSOS
from tests.config.made import complaint, config_of


def settings_of(settings):
    return {f"model__{key}": value for key, value in settings.items()}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"width": 2}, "width (2) does nothing where name is mlp: drop it, or set name = impala"),
        ({"width": 4, "name": "nature_cnn"}, "width (4) does nothing where name is nature_cnn"),
        ({"width": 4, "name": "a.b:C"}, "width (4) does nothing where name is a.b:C"),
        (
            {"core_size": 64},
            "core_size (64) does nothing where core is none: drop it, or set core = lstm",
        ),
        (
            {"shared_torso": False, "core": "gru"},
            "shared_torso (false) does not go with core (gru)",
        ),
    ],
)
def test_a_key_that_does_nothing_is_refused_with_the_one_it_depends_on(settings, says):
    assert f"config: model: {says}" in complaint(**settings_of(settings))


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
    config_of(**settings_of(settings))


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
    assert config_of(**settings_of(settings)).model.has_shared_torso == is_shared


def test_a_name_that_is_no_torso_is_told_all_of_them():
    says = "name must be one of mlp, nature_cnn, impala_resnet, small_cnn, or package.module:Name"
    assert says in complaint(model__name="resnet")
