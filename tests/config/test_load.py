"""From a file and `--set` to a config, and every mistake told with its source."""

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.config.load import load_config, merge_overrides, validate_config
from impala_async.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# They learn more from their passes than they lose by the lag of these; or are there to lag.
REUSING = {"simple_spread.toml", "cartpole_lagged.toml"}


@pytest.fixture
def toml(tmp_path):
    """A file with a few settings."""
    path = tmp_path / "run.toml"
    path.write_text(
        "seed = 3\n[env]\nid = 'FromFile'\nkwargs = {size = 5}\n[learner]\nnum_passes = 2\n"
    )
    return path


def mistakes(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).splitlines()


def mistake(*overrides):
    """The only line about these overrides beside a good env.id."""
    (line,) = mistakes(None, "env.id=X", *overrides)
    return line


# -------------------- files


def test_there_are_configs():
    assert (CONFIGS / "cartpole.toml").is_file()


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.toml")), ids=lambda path: path.name)
def test_every_config_loads(path):
    config = load_config(path)
    written = tomllib.loads(path.read_text(encoding="utf-8"))
    stored = config.model_dump(by_alias=True)
    for section, keys in written.items():
        if isinstance(keys, dict):
            for key, value in keys.items():
                got = stored[section][key]
                assert (list(got) if isinstance(got, tuple) else got) == value
    assert bool(config.warnings()) == (path.name in REUSING)


def test_file_then_overrides_then_defaults(toml):
    config = load_config(toml, ["seed=4", "env.kwargs.speed=1.5", "learner.num_passes=3"])
    assert config.seed == 4
    assert config.env.id == "FromFile"
    assert config.env.kwargs == {"size": 5, "speed": 1.5}
    assert config.learner.num_passes == 3
    assert config.learner.queue_size == 2
    assert load_config(toml).env.kwargs == {"size": 5}


def test_a_file_that_is_not_there(tmp_path):
    path = tmp_path / "missing.toml"
    (line,) = mistakes(path)
    assert line == f"{path}: cannot read this config file: No such file or directory"
    (line,) = mistakes(tmp_path)
    assert line == f"{tmp_path}: cannot read this config file: Is a directory"


@pytest.mark.parametrize("content", [b"[env", b"seed = 1e", b"env = {\n", b"\xff\xfe", b"a=1\na=2"])
def test_a_file_that_is_not_toml(tmp_path, content):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    (line,) = mistakes(path)
    assert line.startswith(f"{path}: not a valid TOML file: ")


def test_a_byte_order_mark_is_passed_over(tmp_path):
    toml, whole = tmp_path / "marked.toml", tmp_path / "config.json"
    toml.write_text('env.id = "Some-v1"\n', encoding="utf-8-sig")
    whole.write_text('{"config": {"env": {"id": "Some-v1"}}}', encoding="utf-8-sig")
    assert load_config(toml).env.id == load_config(whole).env.id == "Some-v1"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_file_in_another_encoding_is_told_which(tmp_path, encoding):
    path = tmp_path / "wide.toml"
    path.write_text('env.id = "Some-v1"\n', encoding=encoding)
    (line,) = mistakes(path)
    assert line.endswith(f"it seems to be in {encoding[:6].upper()}, and has to be in UTF-8")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "id = CartPole-v1",
            'line 2, column 6): id = CartPole-v1; text wants quotes: "CartPole-v1"',
        ),
        ("  kwargs = {a = [x, 1]} # y\r", '  kwargs = {a = [x, 1]} # y; text wants quotes: "x"'),
        ("kwargs.is_it = True", "kwargs.is_it = True; TOML has true"),
        ("kwargs.a = None", "TOML has no such value: leave the key out, or use --set"),
        ("kwargs.a = 1x", "line 2, column 13): kwargs.a = 1x"),
    ],
)
def test_the_line_that_toml_does_not_read_is_shown(toml, text, says):
    toml.write_text(f"[env]\n{text}\n", newline="")
    (line,) = mistakes(toml)
    assert line.endswith(says.strip())


# -------------------- --set


VALUES = [
    ("7", 7),
    ("-7", -7),
    ("1_000", 1000),
    ("0x10", 16),
    ("1e-3", 1e-3),
    ("0.5", 0.5),
    ("true", True),
    ("false", False),
    ("none", None),
    ("null", None),
    ('"none"', "none"),
    ("'none'", "none"),
    ("CartPole-v1", "CartPole-v1"),
    ("my.envs:Maze", "my.envs:Maze"),
    ('"7"', "7"),
    ("'true'", "true"),
    ('"with space"', "with space"),
    ("with space", "with space"),
    ("", ""),
    ("''", ""),
    ("[]", []),
    ("[64, 32]", [64, 32]),
    ("[1, 'a', 2.5]", [1, "a", 2.5]),
    ("{a = 1, b = [2]}", {"a": 1, "b": [2]}),
    ("a=b", "a=b"),
    ("a\nb = 2", "a\nb = 2"),
    ("1\nb = 2", "1\nb = 2"),
    ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
    ("  7  ", 7),
]


def test_values_are_read_as_toml_or_are_text():
    for text, value in VALUES:
        settings, _, mistakes = merge_overrides({}, [f"env.kwargs.x={text}"])
        assert mistakes == []
        assert settings == {"env": {"kwargs": {"x": value}}}
        assert type(settings["env"]["kwargs"]["x"]) is type(value)


@pytest.mark.parametrize(
    ("override", "wants"),
    [
        ("env.kwargs.x=True", "true, as TOML has it"),
        ("env.kwargs.x=False", "false, as TOML has it"),
        ("env.kwargs.x=FALSE", "false, as TOML has it"),
        ("env.kwargs.x=None", "none, got"),
        ("env.kwargs.x.y= False ", "false, as TOML has it"),
        ("env.kwargs.x=-.5", "-0.5, as TOML has it"),
        ("env.kwargs.x=[1, True]", "a list or table as TOML has it"),
        ('env.kwargs.x={"a": 1}', "a list or table as TOML has it"),
        ("env.kwargs.x=" + "[" * 5000, "a list or table as TOML has it"),
        ("env.kwargs={x = None}", "a list or table as TOML has it"),
        ("env.wrappers=[{name='a:b', kwargs={x=True}}]", "a list or table as TOML has it"),
    ],
)
def test_what_python_has_otherwise_than_toml_is_no_text(override, wants):
    line = mistake(override)
    assert line.startswith(f"--set: {override.partition('=')[0]}: wants {wants}")
    assert "if it is meant as text, put double quotes within single ones" in line


def test_a_date_is_no_argument_of_foreign_code(toml):
    """It would reach other processes as text."""
    for override in (
        "env.kwargs.when=2024-01-02",
        "env.kwargs.when=[1, 2024-01-02]",
        "env.kwargs={when = 2024-01-02}",
        "env.wrappers=[{name='a:b', kwargs={when=2024-01-02}}]",
    ):
        line = mistake(override)
        assert line.startswith("--set: env."), override
        assert "wants no date or time of TOML, got 2024-01-02: put it in double quotes" in line
    toml.write_text("[env]\nid = 'X'\nkwargs = {at = 07:32:00, when = '2024-01-02'}\n")
    (line,) = mistakes(toml)
    assert line.startswith(f"{toml}: env.kwargs.at: wants no date or time of TOML, got 07:32:00")


def test_where_keys_have_types_text_is_as_before():
    assert load_config(None, ["env.id=X", "stop.mean_return=None"]).stop.mean_return is None
    assert mistake("model.shared_torso=True").endswith('wants true or false, got "True"')


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_text_is_some_value(text):
    settings, sources, _ = merge_overrides({}, [f"a.b={text}"])
    assert list(settings["a"]) == ["b"]
    assert sources == {"a.b": "--set"}


def test_spaces_around_a_key_do_not_matter():
    assert merge_overrides({}, [" seed = 5"]) == ({"seed": 5}, {"seed": "--set"}, [])


def test_the_last_override_wins():
    assert merge_overrides({}, ["seed=1", "seed=2"]).settings == {"seed": 2}


def test_overriding_changes_nothing_that_was_given():
    given_settings = {"env": {"id": "X", "kwargs": {"a": [1]}}}
    merged, *_ = merge_overrides(given_settings, ["env.kwargs.b=2", "env.id=Y"])
    assert given_settings == {"env": {"id": "X", "kwargs": {"a": [1]}}}
    assert merged == {"env": {"id": "Y", "kwargs": {"a": [1], "b": 2}}}


def test_whole_sections_and_typed_values_arrive():
    config = load_config(
        None,
        [
            *("env={id='X', kwargs={n=3}}", "model.hidden_sizes=[32, 16]"),
            *("algorithm.lambda=0.9", "algorithm.rho_bar=none", "stop.env_steps=1e6"),
            "model.shared_torso=true",
        ],
    )
    assert (config.env.id, config.env.kwargs) == ("X", {"n": 3})
    assert config.model.hidden_sizes == (32, 16)
    assert (config.algorithm.lambda_, config.algorithm.rho_bar) == (0.9, None)
    assert config.stop.env_steps == 1_000_000
    assert config.model.shared_torso is True


@pytest.mark.parametrize("override", ["seed", "", "=5", "a..b=1", ".a=1", "a.=1", "--seed 5"])
def test_an_override_without_key_or_value(override):
    assert mistake(override) == (
        f"--set: {override!r} is not of the form section.key=value, "
        "for example learner.num_passes=2"
    )


def test_a_value_has_no_keys():
    assert mistake("env.id.x=1") == "--set: env.id.x: id is a value, without keys"
    assert mistake("seed=1", "seed.x=1") == "--set: seed.x: seed is a value, without keys"


# -------------------- mistakes


def test_an_environment_is_required_and_the_hint_says_how(toml):
    hint = "env.id: required (for example --set env.id=CartPole-v1, or --config FILE)"
    assert mistakes(None) == [f"config: {hint}"]
    assert mistakes(None, "env.kwargs={}") == [f"config: {hint}"]
    for text in ("[env]\nkwargs = {}\n", "", "seed = 1\n"):
        toml.write_text(text)
        assert mistakes(toml) == [
            f"{toml}: env.id: required (for example --set env.id=CartPole-v1, "
            'or id = "CartPole-v1" in its section [env])'
        ]


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("learner.num_pases=2", "learner.num_passes"),
        ("algorithm.gama=1", "algorithm.gamma"),
        ("algorithm.lambda_=1", "algorithm.lambda"),
        ("learner.num_envs=4", "actor.num_envs"),
        ("actor.batch_columns=4", "learner.batch_columns"),
        ("num_passes=2", "learner.num_passes"),
        ("lerner.num_passes=2", "learner"),
        ("stop.walls=5", "stop.wall_s"),
        ("learner.batch_rows=5", "learner.batch_columns"),
        ("num_env=5", "actor.num_envs"),
        ("num_actor=5", "train.num_actors"),
        ("leaner.thread=5", "learner"),
        ("learning_rate=1", "algorithm.lr"),
        ("algorithm.learning_rate=1", "algorithm.lr"),
        ("total-timesteps=1", "stop.env_steps"),
        ("device=cpu", "learner.device"),
        ("actor.devic=cpu", "actor.device"),
        ("env.name=CartPole-v1", "env.id"),
        ("algorithm.epochs=2", "learner.num_passes"),
        ("algorithm.Lr=1", "algorithm.lr"),
        ("SEED=1", "seed"),
        ("bptt_horizon=32", "trajectory.rows"),
        ("trajectory.bptt_horizon=32", "trajectory.rows"),
    ],
)
def test_unknown_keys_are_refused_with_a_suggestion(override, meant):
    key = override.partition("=")[0]
    unknown = key.partition(".")[0] if key.startswith("le") and meant == "learner" else key
    assert mistake(override) == f"--set: {unknown}: unknown key; did you mean {meant}?"


def test_a_name_in_an_unknown_section_is_a_hint_too():
    assert mistake("ppo.clip_range=1") == "--set: ppo: unknown key; did you mean algorithm.clip?"


@pytest.mark.parametrize(
    ("override", "meant"),
    [("env=CartPole-v1", "env.id=CartPole-v1"), ("algorithm=ppo", "algorithm.name=ppo")],
)
def test_a_value_for_a_section_is_one_for_its_name(override, meant):
    (line,) = mistakes(None, override, *([] if override.startswith("env") else ["env.id=X"]))
    assert line.endswith(f"; did you mean {meant}?")


def test_a_key_like_no_other_gets_no_suggestion():
    for key in ("xyzzy", "foo", "algorithm.foo"):
        assert mistake(f"{key}=1") == f"--set: {key}: unknown key"
    assert mistake("foo.bar=1") == "--set: foo: unknown key"


def test_all_mistakes_are_told_at_once(toml):
    toml.write_text("sede = 1\n[env]\nid = ''\n[learner]\nmax_lag = 0\n")
    lines = mistakes(toml, "actor.sampler=best", "algorithm.lr=-1")
    assert sorted(lines) == sorted(
        [
            f"{toml}: sede: unknown key; did you mean seed?",
            f'{toml}: env.id: wants text that is not empty, got ""',
            f"{toml}: learner.max_lag: wants a whole number from 1 to 10000, got 0",
            '--set: actor.sampler: wants auto, serial, vector or parallel, got "best"',
            "--set: algorithm.lr: wants a number over 0, got -1",
        ]
    )


def test_overrides_that_make_no_sense_hide_no_other_mistake(toml):
    toml.write_text("sede = 1\n[env]\nid = 'X'\n")
    lines = mistakes(toml, "nonsense", "env.id.x=1", "seed=-1", "xyzzy=", "seed", "seed=-2")
    assert lines[:3] == [
        "--set: 'nonsense' is not of the form section.key=value, for example learner.num_passes=2",
        "--set: env.id.x: id is a value, without keys",
        "--set: 'seed' is not of the form section.key=value, for example learner.num_passes=2",
    ]
    assert sorted(lines[3:]) == sorted(
        [
            "--set: seed: wants a whole number from 0 to 2147483647, got -2",
            f"{toml}: sede: unknown key; did you mean seed?",
            "--set: xyzzy: unknown key",
        ]
    )


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.hidden_sizes=64", "wants a list, for example [64, 64], or none, got 64"),
        ("model.hidden_sizes=[]", "wants a list, for example [64, 64], or none, got []"),
        ("model.hidden_sizes=[true, 64]", "wants numbers, got [true, 64]"),
        ("learner.threads=1.5", "wants a whole number from 1 to 1024, got 1.5"),
        ("learner.threads=x", 'wants a whole number from 1 to 1024, got "x"'),
        ("learner.threads=true", "wants a number, got true"),
        ("learner.threads=none", "wants a whole number from 1 to 1024, got none"),
        ("learner.num_passes=x", 'wants a whole number from 1 up, got "x"'),
        ("trajectory.rows=70000", "wants a whole number from 1 to 65535, got 70000"),
        ("stop.env_steps=x", 'wants a whole number over 0, or none, got "x"'),
        ("algorithm.gamma=2", "wants a number from 0 to 1, got 2"),
        ("algorithm.lr=nan", "wants a number over 0, got NaN"),
        ("algorithm.reward_scale=false", "wants a number, got false"),
        ("stop.mean_return=true", "wants a number, got true"),
        ("model.shared_torso=7", "wants true or false, got 7"),
        ("model.activation=gelu", 'wants tanh or relu, or none, got "gelu"'),
        ("algorithm.optimizer=sgd", 'wants adam, adamw, rmsprop or rmsprop_tf, got "sgd"'),
        ("learner.device=5", "wants text, got 5"),
        ("env.kwargs=5", "wants a table, for example {size = 5}, got 5"),
        ("learner=5", "wants keys of its own, not a value, got 5"),
    ],
)
def test_what_is_wanted_is_told_in_a_users_words(override, says):
    assert mistake(override) == f"--set: {override.partition('=')[0]}: {says}"


def test_true_is_no_number_in_a_file_either(toml):
    toml.write_text("seed = true\n[env]\nid = 'X'\nkwargs = {fast = true}\n")
    assert mistakes(toml) == [f"{toml}: seed: wants a number, got true"]


def test_a_mistake_between_keys_names_all_its_sources(toml):
    agree = "init_num_passes (5) must not exceed num_passes (2)"
    assert mistakes(toml, "learner.init_num_passes=5") == [f"--set and {toml}: learner: {agree}"]
    toml.write_text("[env]\nid = 'X'\n[learner]\nnum_passes = 2\ninit_num_passes = 5\n")
    assert mistakes(toml, "seed=1") == [f"{toml}: learner: {agree}"]
    assert mistake("learner.num_passes=2", "learner.init_num_passes=5") == (
        f"--set: learner: {agree}"
    )
    assert mistake("learner.batch_columns=4").startswith("--set: learner.batch_columns (4) must")


def test_all_broken_rules_are_told_each_in_its_line():
    overrides = ("init_num_passes=5", "stuck_dump_s=90", "num_passes=2")
    learner = [f"learner.{override}" for override in overrides]
    lines = mistakes(None, "env.id=X", *learner, "pace.lag=1")
    assert [line.partition(" (")[0] for line in lines] == [
        "--set: learner: init_num_passes",
        "--set: learner: stuck_dump_s",
        "--set: pace: lag does nothing in mode async: drop it, or set mode lockstep",
    ]
    overrides = ("pace.mode=lockstep", "learner.batch_columns=4", "learner.publish_every_updates=2")
    lines = mistakes(None, "env.id=X", *overrides)
    assert [line.partition(" (")[0] for line in lines] == [
        "--set: pace.mode lockstep: learner.batch_columns",
        "--set: pace.mode lockstep: learner.publish_every_updates",
    ]


def test_a_rate_of_0_before_the_end_is_refused_where_both_are_set_in_one_place(toml):
    flat = ("algorithm.lr_end=0", "algorithm.schedule_env_steps=400", "stop.env_steps=500")
    says = (
        "--set: algorithm.schedule_env_steps (400) ends at a rate of 0 (algorithm.lr_end), before"
    )
    assert mistake(*flat).startswith(f"{says} stop.env_steps (500): nothing would be learned")
    for fix in ("algorithm.lr_end=1e-4", "algorithm.schedule_env_steps=500", "stop.env_steps=none"):
        load_config(None, ["env.id=X", *flat, fix])
    toml.write_text("[env]\nid = 'X'\n[algorithm]\nlr_end = 0.0\nschedule_env_steps = 400\n")
    # A preset that is gone beyond runs, and says so.
    config = load_config(toml, ["stop.env_steps=500"])
    assert len(config.warnings()) == 1
    toml.write_text(toml.read_text() + "[stop]\nenv_steps = 500\n")
    assert mistakes(toml)[0].startswith(f"{toml}: algorithm.schedule_env_steps (400) ends at")
    # And one that was run so before can still be read.
    validate_config(config.model_dump(mode="json", by_alias=True))


IDLE = pytest.mark.parametrize("override", ["learner.max_lag=100", "learner.queue_size=1"])


@IDLE
def test_what_does_nothing_in_lockstep_is_refused_on_the_command_line(toml, override):
    key = override.partition("=")[0]
    line = f"--set: {key}: does nothing with pace.mode lockstep: drop it"
    assert mistake("pace.mode=lockstep", override) == line
    assert mistake("pace={mode='lockstep'}", f"learner={{{override[8:]}}}") == line
    toml.write_text("[env]\nid = 'X'\n[pace]\nmode = 'lockstep'\n")
    assert mistakes(toml, override) == [line]
    load_config(toml, [override, "pace.mode=async"])


@IDLE
def test_what_does_nothing_in_lockstep_is_refused_beside_it_and_not_in_a_preset(toml, override):
    key = override.partition("=")[0]
    preset = f"{override}\nenv.id = 'X'\nlearner.num_passes = 2\n"
    toml.write_text(preset)
    load_config(toml, ["pace.mode=lockstep"])
    toml.write_text(f"{preset}pace.mode = 'lockstep'\n")
    assert mistakes(toml) == [f"{toml}: {key}: does nothing with pace.mode lockstep: drop it"]


def test_one_item_of_a_list_is_named():
    assert mistake("model.hidden_sizes=[64, 'x']") == (
        '--set: model.hidden_sizes[1]: wants a whole number, got "x"'
    )


def test_a_long_value_is_cut_short():
    line = mistake(f"env.kwargs='{'x' * 5000}'")
    assert line.startswith('--set: env.kwargs: wants a table, for example {size = 5}, got "xxx')
    assert line.endswith("x...")
    assert len(line) < 300


def test_without_sources_a_mistake_is_the_configs():
    with pytest.raises(ConfigError, match=r"^config: seed: wants .* got -1$"):
        validate_config({"env": {"id": "X"}, "seed": -1})


# -------------------- the config.json of a run


def test_a_run_s_own_config_is_a_config(tmp_path):
    for overrides in (["pace.mode=lockstep"], ["algorithm.lambda=0.9", "env.kwargs={a=[1, 2]}"]):
        config = load_config(None, ["env.id=X", *overrides])
        path = tmp_path / "config.json"
        content = {"run_id": "7", "config": config.model_dump(mode="json", by_alias=True)}
        path.write_text(json.dumps(content))
        assert load_config(path) == config
        assert load_config(path, ["seed=3"]) == config.model_copy(update={"seed": 3})


def test_what_is_wrong_in_it_is_told_by_its_name(tmp_path):
    path = tmp_path / "config.json"
    config = load_config(None, ["env.id=X"]).model_dump(mode="json", by_alias=True)
    config["learner"] |= {"num_pases": 3, "queue_size": 0}
    path.write_text(json.dumps({"run_id": "7", "config": config}))
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["learner.max_lag=0"])
    assert sorted(str(caught.value).splitlines()) == [
        "--set: learner.max_lag: wants a whole number from 1 to 10000, got 0",
        f"{path}: learner.num_pases: unknown key; did you mean learner.num_passes?",
        f"{path}: learner.queue_size: wants a whole number from 1 up, got 0",
    ]


def test_what_does_not_go_together_may_be_of_either(tmp_path):
    path = tmp_path / "config.json"
    config = load_config(None, ["env.id=X"]).model_dump(mode="json", by_alias=True)
    path.write_text(json.dumps({"run_id": "7", "config": config}))
    overrides = ["learner.compile=cuda_graph", "algorithm.optimizer=rmsprop"]
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert str(caught.value).startswith(f"--set and {path}: learner.compile (cuda_graph)")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"config": 3}', "env.id = 'X'"])
def test_another_json_file_is_no_config(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json: is not the config\.json of a run"):
        load_config(path)
    with pytest.raises(ConfigError, match="cannot read this config file"):
        load_config(tmp_path / "none.json")


DEEP, VERY_DEEP, LONG = "[" * 300 + "]" * 300, "[" * 5000, "9" * 5000


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"env.kwargs.x = {DEEP}", "env.kwargs.x: is nested more than 50 deep"),
        (f"env.kwargs{'.a' * 300} = 1", "env.kwargs.a: is nested more than 50 deep"),
        (f"seed = {VERY_DEEP}", "not a valid TOML file: it is nested too deeply"),
        (f"seed = {LONG}", "not a valid TOML file: a number in it is too long"),
        (f"seed = 0x{LONG}", "seed: a number in it is too long"),
    ],
    ids=["list", "tables", "very deep", "number", "hexadecimal"],
)
def test_what_python_gives_up_at_is_one_line_that_names_the_file(tmp_path, text, told):
    path = tmp_path / "my.toml"
    path.write_text(f'env.id = "X"\n{text}\n')
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == f"{path}: {told}"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (f"env.kwargs.x={DEEP}", "env.kwargs: is nested more than 50 deep"),
        (f"env.kwargs{'.a' * 300}=1", f"{json.dumps('env.kwargs' + '.a' * 300)[:200]}..."),
        (f"env.kwargs.x={VERY_DEEP}", "env.kwargs.x: wants a list or table as"),
        (f"env.kwargs.x=0x{LONG}", "env.kwargs: a number in it is too long"),
        (f"seed={LONG}", 'seed: wants a whole number from 0 to 2147483647, got "999'),
        ("env.id=\udcff", "env.id: wants text in UTF-8"),
    ],
    ids=["list", "tables", "very deep", "hexadecimal", "number", "bytes"],
)
def test_what_python_gives_up_at_is_one_line_that_names_the_key(override, told):
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=["env.id=X", override])
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"--set: {told}")
    assert len(line) < 500


def test_what_python_gives_up_at_in_a_run_s_own_config_is_told_too(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(f'{{"config": {{"env": {{"id": "X", "kwargs": {{"x": {DEEP}}}}}}}}}')
    with pytest.raises(ConfigError, match=r"config\.json: env\.kwargs\.x: is nested more than 50"):
        load_config(path)
