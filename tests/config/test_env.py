import json

from impala_async.config.env import EnvSection
from impala_async.config.load import load_config
from impala_async.config.section import Named
from tests.config.made import mistake

REPEATED = {"name": "gymnasium.wrappers:RepeatAction", "kwargs": {"num_repeats": 3}}
PREPROCESSED = {"name": "gymnasium.wrappers:AtariPreprocessing", "kwargs": {"frame_skip": 2}}


def test_a_wrapper_is_a_name_or_a_table():
    wrappers = '["a.b:C", {name = "a:D", kwargs = {size = 2}}]'
    config = load_config(None, ["env.id=X", f"env.wrappers={wrappers}"])
    assert config.env.wrappers == (Named(name="a.b:C"), Named(name="a:D", kwargs={"size": 2}))
    assert EnvSection.model_validate_json(config.env.model_dump_json()) == config.env
    says = "wrappers must be package.module:Name of your own, got 'C'"
    assert mistake('env.wrappers=["C"]') == f"--set: env: {says}"


def test_frames_per_step_follow_the_frame_skip():
    for env_id, settings, frames in (
        ("CartPole-v1", {}, 1),
        ("MyGame-v0", {"kwargs": {"frameskip": 9}}, 1),
        ("ALE/Pong-v5", {}, 4),
        ("ale_py:ALE/Pong-v5", {"kwargs": {"frameskip": 2}}, 2),
        ("ale_py:PongNoFrameskip-v4", {}, 4),
        ("ALE/Pong-v5", {"kwargs": {"frameskip": [2, 5]}}, 1),
        ("ALE/Pong-v5", {"preprocess": "off"}, 4),
        ("ale_py:PongNoFrameskip-v4", {"preprocess": "off"}, 1),
        ("CartPole-v1", {"wrappers": ["a.b:C", REPEATED]}, 3),
        ("ALE/Pong-v5", {"wrappers": [REPEATED]}, 12),
        ("CartPole-v1", {"wrappers": ["gymnasium.wrappers:MaxAndSkipObservation"]}, 4),
        ("ALE/Pong-v5", {"kwargs": {"frameskip": 1}, "wrappers": [PREPROCESSED]}, 2),
    ):
        assert EnvSection(id=env_id, **settings).frames_per_step == frames


def test_an_id_that_no_path_can_hold_is_refused():
    said = mistake(f"env.id={json.dumps(chr(0) + 'x')}")
    assert said == r"--set: env: id wants the name of an environment, got '\x00x'"
