"""What run folders and recordings of earlier releases hold is read; nobody else may set it."""

import json

import pytest

from impala_async.config.former import FORMER_KEYS, MOVED_KEYS, up_to_date
from impala_async.config.load import load_config
from impala_async.errors import ConfigError


def of_an_earlier_run(path, **sections):
    settings = {"env": {"id": "X"}, "ingest": {"process": "child"}, **sections}
    path.write_text(json.dumps({"run_id": "0" * 32, "config": settings}))
    return path


def mistake(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    (line,) = str(caught.value).splitlines()
    return line


def test_keys_that_a_run_has_written_down_are_passed_over(tmp_path):
    path = of_an_earlier_run(tmp_path / "config.json", seed=5)
    assert load_config(path) == load_config(None, ["env.id=X", "seed=5"])


def test_keys_that_have_moved_are_read_where_they_were(tmp_path):
    former = {"name": "ppo", "optimizer": "rmsprop", "optimizer_eps": 0.1, "rms_decay": 0.9}
    former |= {"momentum": 0.5, "weight_decay": 0.01}
    path = of_an_earlier_run(tmp_path / "config.json", algorithm=former)
    options = {"eps": 0.1, "decay": 0.9, "momentum": 0.5, "weight_decay": 0.01}
    assert load_config(path).algorithm.optimizer_options.model_dump() == options
    for key, today in MOVED_KEYS.items():
        assert mistake(path, f"{key}=1") == f"--set: {key}: unknown key; did you mean {today}?"


def test_the_sampler_of_an_old_run_has_its_name_of_today(tmp_path):
    sections = {"actor": {"sampler": "central", "device": "cuda"}}
    path = of_an_earlier_run(tmp_path / "config.json", **sections)
    found = load_config(path).actor
    assert (found.sampler, found.device) == ("parallel", "cuda")
    assert "in actor.device, got" in mistake(path, "actor.sampler=central")


@pytest.mark.parametrize(
    "held",
    [
        {},
        {"seed": 1, "ingest": {"other": 2}},
        {"ingest": "child", "actor": "central"},
        {"actor": {"sampler": ["a"]}},
    ],
)
def test_everything_else_stays_as_it_is(held):
    assert up_to_date(held) == held


def test_what_was_read_is_not_changed():
    settings = {"ingest": {"process": "auto", "other": 2}, "actor": {"sampler": "central"}}
    today = up_to_date(settings)
    assert today == {"ingest": {"other": 2}, "actor": {"sampler": "parallel"}}
    assert settings == {"ingest": {"process": "auto", "other": 2}, "actor": {"sampler": "central"}}


@pytest.mark.parametrize("key", FORMER_KEYS)
def test_who_sets_a_former_key_is_told_why_it_is_gone(key, tmp_path):
    says = f"{key}: there is no such key any more, as {FORMER_KEYS[key]}: drop it"
    assert mistake(None, "env.id=X", f"{key}=1") == f"--set: {says}"
    section, _, name = key.partition(".")
    toml = tmp_path / "run.toml"
    toml.write_text(f"[env]\nid = 'X'\n[{section}]\n{name} = 'auto'\n")
    assert mistake(toml) == f"{toml}: {says}"
    path = of_an_earlier_run(tmp_path / "config.json")
    assert mistake(path, f"{key}=auto") == f"--set: {says}"
