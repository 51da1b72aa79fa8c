"""From a file and `--set` to a config, and every mistake told with its source."""

import json
import os
import tomllib
from pathlib import Path

import pytest

from impala_async.config.load import load_config, merge_overrides
from impala_async.config.warnings import warnings_of
from impala_async.errors import ConfigError
from tests.config.made import mistake, mistakes

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# They learn more from their passes than they lose by the lag of these; or are there to lag.
REUSING = {"cartpole_lagged.toml"}


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.toml")), ids=lambda path: path.name)
def test_every_config_loads(path):
    config = load_config(path)
    written = tomllib.loads(path.read_text(encoding="utf-8"))
    stored = json.loads(config.model_dump_json(by_alias=True))
    for section, keys in written.items():
        if isinstance(keys, dict):
            assert {key: stored[section][key] for key in keys} == keys
    assert bool(warnings_of(config)) == (path.name in REUSING)


def test_file_then_overrides_then_defaults(toml):
    config = load_config(toml, ["seed=4", "env.kwargs.speed=1.5", "learner.num_passes=3"])
    assert (config.seed, config.learner.num_passes, config.learner.queue_size) == (4, 3, 1)
    assert (config.env.id, config.env.kwargs) == ("FromFile", {"size": 5, "speed": 1.5})
    assert load_config(toml).env.kwargs == {"size": 5}


def test_a_file_that_is_not_there_and_one_with_a_byte_order_mark(tmp_path):
    missing = "No such file or directory"
    for name in ("x.toml", "x.json"):
        path = tmp_path / name
        assert mistakes(path) == [f"{path}: cannot read this config file: {missing}"]
    # A word may be meant as the name of a config.
    (told,) = mistakes(Path("nope"))
    assert told.startswith(f"nope: cannot read this config file: {missing}; configs by name are at")
    # A pipe would be waited for, and a device read without end.
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        assert mistakes(path) == [f"{path}: cannot be read: it is no regular file"]
    for name, text in (("x.toml", 'env.id = "X"'), ("x.json", '{"config": {"env": {"id": "X"}}}')):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8-sig")
        assert load_config(path).env.id == "X"


def test_a_file_that_is_not_toml(tmp_path):
    path = tmp_path / "bad.toml"
    for content, says in (
        (b"[env", ""),
        (b"a=1\na=2", ""),
        ("env.id = 'Some-v1'\n".encode("utf-16"), "codec can't decode"),
        (b"[env]\nid = CartPole-v1", "line 2, column 6); text wants double quotes, and TOML"),
        (b"[env]\r\n kwargs.on = True # y\r\n", "line 2, column 14); text wants double quotes"),
        (b"[env]\nkwargs.a = None", 'and TOML has true, false and, for settings, "none"'),
        (b"env.id = 'X'\nseed = " + b"[" * 5000, "maximum recursion depth exceeded"),
        (b"env.id = 'X'\nseed = " + b"9" * 5000, "Exceeds the limit"),
    ):
        path.write_bytes(content)
        (line,) = mistakes(path)
        assert line.startswith(f"{path}: not a valid TOML file: ")
        assert says in line


def test_values_are_read_as_toml_or_are_text():
    for text, value in (
        *(("7", 7), ("-7", -7), ("1_000", 1000), ("0x10", 16), ("1e-3", 1e-3), ("  7  ", 7)),
        *(("true", True), ("false", False), ("none", None), ("null", None), ("None", None)),
        *(('"none"', "none"), ("'none'", "none"), ('"7"', "7"), ("'true'", "true")),
        *(("CartPole-v1", "CartPole-v1"), ("my.envs:Maze", "my.envs:Maze"), ("a=b", "a=b")),
        *(('"with space"', "with space"), ("with space", "with space"), ("", ""), ("''", "")),
        *(("[]", []), ("[1, 'a', 2.5]", [1, "a", 2.5]), ("{a = 1}", {"a": 1})),
        *(("1#hard", "1#hard"), ("#ff0000", "#ff0000"), ("[1, 2]  ", [1, 2])),
        *(("a\nb = 2", "a\nb = 2"), ("1\nb = 2", "1\nb = 2"), ('"', '"'), ("\0", "\0")),
    ):
        merged, sources, wrong = merge_overrides({}, [f" env.kwargs.x ={text}"])
        assert (merged, wrong) == ({"env": {"kwargs": {"x": value}}}, []), text
        assert sources == {"env.kwargs.x": "--set"}
        assert type(merged["env"]["kwargs"]["x"]) is type(value), text


def test_the_last_override_wins_and_nothing_changes_that_was_given():
    given = {"env": {"id": "X", "kwargs": {"a": [1]}}}
    merged, *_ = merge_overrides(given, ["env.kwargs.b=1", "env.kwargs.b=2", "env.id=Y"])
    assert given == {"env": {"id": "X", "kwargs": {"a": [1]}}}
    assert merged == {"env": {"id": "Y", "kwargs": {"a": [1], "b": 2}}}
    # Whole sections, and values of every type.
    whole = ["env={id='X', kwargs={n=3}}", "model.hidden_sizes=[32, 16]", "stop.env_steps=1e6"]
    config = load_config(None, [*whole, "algorithm.lambda=0.9", "algorithm.grad_clip=none"])
    assert (config.env.id, config.env.kwargs) == ("X", {"n": 3})
    assert (config.model.hidden_sizes, config.stop.env_steps) == ((32, 16), 1_000_000)
    assert (config.algorithm.lambda_, config.algorithm.grad_clip) == (0.9, None)


def test_what_python_has_otherwise_than_toml_is_no_text():
    for override in (
        *("env.kwargs.x=True", "env.kwargs.x=FALSE", "env.kwargs.x.y= False ", "env.kwargs.x=-.5"),
        *("env.kwargs.x=[1, True]", 'env.kwargs.x={"a": 1}', "env.kwargs.x=" + "[" * 5000),
        *("env.kwargs={x = None}", "env.wrappers=[{name='a:b', kwargs={x=True}}]"),
        *("model.shared_torso=True", "report.sinks=[tensorboard]"),
    ):
        line = mistake(override)
        assert line.startswith(f"--set: {override.partition('=')[0]}: wants a value as TOML has it")
        assert line.endswith("if it is meant as text, put double quotes within single ones")


@pytest.mark.parametrize("override", ["learner.max_lag=100", "learner.queue_size=1"])
def test_what_does_nothing_in_lockstep_is_refused_beside_it_and_not_in_a_preset(toml, override):
    key = override.partition("=")[0]
    line = f"--set: {key}: does nothing with pace.mode lockstep: drop it"
    assert mistake("pace.mode=lockstep", override) == line
    assert mistake("pace={mode='lockstep'}", f"learner={{{override[8:]}}}") == line
    toml.write_text("[env]\nid = 'X'\n[pace]\nmode = 'lockstep'\n")
    assert mistakes(toml, override) == [line]
    load_config(toml, [override, "pace.mode=async"])
    preset = f"{override}\nenv.id = 'X'\nlearner.num_passes = 2\n"
    toml.write_text(preset)
    load_config(toml, ["pace.mode=lockstep"])
    toml.write_text(f"{preset}pace.mode = 'lockstep'\n")
    assert mistakes(toml) == [f"{toml}: {key}: does nothing with pace.mode lockstep: drop it"]


def written(path, config):
    path.write_text(json.dumps({"run_id": "7", "config": config}))
    return path


def test_a_run_s_own_config_is_a_config(tmp_path):
    for overrides in (["pace.mode=lockstep"], ["algorithm.lambda=0.9", "env.kwargs={a=[1, 2]}"]):
        config = load_config(None, ["env.id=X", *overrides])
        path = written(tmp_path / "config.json", config.model_dump(mode="json", by_alias=True))
        assert load_config(path) == config
        assert load_config(path, ["seed=3"]) == config.model_copy(update={"seed": 3})


def test_what_is_wrong_in_it_is_told_by_its_name(tmp_path):
    config = load_config(None, ["env.id=X"]).model_dump(mode="json", by_alias=True)
    config["learner"] |= {"num_pases": 3, "queue_size": 0}
    path = written(tmp_path / "config.json", config)
    assert sorted(mistakes(path, "learner.max_lag=0")) == [
        "--set: learner.max_lag: wants a whole number from 1 to 10000, got 0",
        f"{path}: learner.num_pases: unknown key; did you mean learner.num_passes?",
        f"{path}: learner.queue_size: wants a whole number from 1 up, got 0",
    ]
    written(path, config | {"learner": {}})
    # Two settings that do not go together may be of either.
    (line,) = mistakes(path, "actor.num_envs=65")
    assert line.startswith(f"--set and {path}: learner.batch_columns (64) must")
    for text in ("", "[]", "{}", '{"config": 3}', '{"config": {}, "decided": [1]}', "env.id = 'X'"):
        path.write_text(text)
        assert mistakes(path) == [f"{path}: is not the config.json of a run"]


def test_keys_of_a_file_that_have_nothing_to_do_beside_an_override_are_passed_over(tmp_path):
    """Beside the mode in the file, or on the command line, they are mistakes."""
    path = tmp_path / "a.toml"
    path.write_text(
        '[env]\nid = "X"\n[algorithm]\nname = "appo"\nkl_coeff = 0.5\nkl_target = 0.1\n'
        '[pace]\nmode = "lockstep"\nlag = 1\n[model]\ncore = "lstm"\ncore_size = 8\n'
    )
    overrides = ["algorithm.name=ppo", "pace.mode=async", "model.core=none"]
    config = load_config(path, overrides)
    plain = load_config(None, ["env.id=X", *overrides])
    for section in ("algorithm", "pace", "model"):
        assert getattr(config, section) == getattr(plain, section)
    assert load_config(path).pace.lag == 1
    for idle in ("pace.lag=1", "algorithm.kl_coeff=0.5"):
        with pytest.raises(ConfigError, match=rf"^--set .*{idle.partition('=')[0]} .*does nothing"):
            load_config(path, [*overrides, idle])
    path.write_text('[env]\nid = "X"\n[pace]\nlag = 1\n')
    for given in ([], ["algorithm.name=ppo"]):
        with pytest.raises(
            ConfigError, match=r"pace\.lag \(1\) does nothing where pace\.mode is a"
        ):
            load_config(path, given)
    # A whole section on the command line is set there, and a file may leave the environment out.
    for whole in ('pace={mode="async", lag=1}', 'algorithm={name="a2c", clip=0.3}'):
        with pytest.raises(ConfigError, match="does nothing where"):
            load_config(None, ["env.id=X", whole])
    path.write_text('[algorithm]\nname = "a2c"\nclip = 0.3\n')
    with pytest.raises(ConfigError, match=r"clip .* does nothing where"):
        load_config(path, ["env.id=X"])
    assert load_config(path, ["env.id=X", "algorithm.name=ppo"]).algorithm.clip == 0.3
