"""The `[report]` section: sinks by name, with or without arguments."""

import json

import pytest

from impala_async.config.load import load_config, validate_config
from impala_async.config.report import SINKS
from impala_async.errors import ConfigError


def test_there_are_none_by_default() -> None:
    assert load_config(None, ["env.id=CartPole-v1"]).report.sinks == ()


def test_names_and_tables_are_echoed_and_read_again() -> None:
    typed = 'report.sinks=["tensorboard", {name = "wandb", kwargs = {project = "mine"}}, "a.b:C"]'
    config = load_config(None, ["env.id=CartPole-v1", typed])
    assert [sink.name for sink in config.report.sinks] == ["tensorboard", "wandb", "a.b:C"]
    assert config.report.sinks[1].kwargs == {"project": "mine"}
    echo = json.loads(json.dumps(config.model_dump(mode="json", by_alias=True)))
    assert validate_config(echo) == config


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("wandb", 'report.sinks: wants a list, for example ["tensorboard"] or'),
        ("[1]", "report.sinks: wants a list"),
        ('[{name = "wandb", project = "mine"}]', "report.sinks: wants a list"),
        ('["wandbb"]', f"sinks must be {', '.join(SINKS)}, or package.module:Name of your own"),
        ('["my/sinks:Own"]', "got 'my/sinks:Own'"),
    ],
)
def test_what_names_no_sink_is_refused(typed: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["env.id=CartPole-v1", f"report.sinks={typed}"])
    assert says in str(caught.value)
