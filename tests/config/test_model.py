from impala_async.config.model import TORSOS
from tests.config.made import complaint, config_of


def test_only_a_plain_mlp_has_a_torso_each_by_default():
    for settings, is_shared in (
        ("model.name=mlp", False),
        ("model.name=mlp model.core=gru", True),
        ("model.shared_torso=true model.core=lstm", True),
        *[(f"model.name={name}", True) for name in (*TORSOS[2:], "a.b:C")],
        ("model.name=nature_cnn model.shared_torso=false", False),
    ):
        assert config_of(settings).model.has_shared_torso == is_shared


def test_whether_to_normalise_is_a_truth_or_a_word():
    for text, value in (
        ("", "auto"),
        ("model.normalize_obs=auto", "auto"),
        ("model.normalize_obs=true", True),
    ):
        assert config_of(text).model.normalize_obs == value
    says = 'model.normalize_obs: wants true or false, or auto, got "floats"'
    assert says in complaint("model.normalize_obs=floats")


def test_what_does_not_go_together_is_refused():
    text = complaint("model.shared_torso=false model.core=gru")
    assert "shared_torso (false) does not go with core (gru)" in text
    says = (
        "name must be one of auto, mlp, nature_cnn, impala_resnet, small_cnn, or package.module:N"
    )
    assert says in complaint("model.name=resnet")
