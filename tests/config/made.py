"""Configs of dotted keys, and what is told of those that are refused."""

import pytest

from impala_async.config.load import load_config, validate_config
from impala_async.errors import ConfigError


def nested(settings):
    tree = {}
    for key, value in settings.items():
        *sections, leaf = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[leaf] = value
    return tree


def config_of(text="", **sections):
    """Settings as on the command line, parted by blanks; or whole sections."""
    if sections:
        return validate_config({"env": {"id": "X"}, **sections})
    return load_config(None, ["env.id=X", *text.split()])


def complaint(text="", **sections):
    with pytest.raises(ConfigError) as caught:
        config_of(text, **sections)
    return str(caught.value)


def mistakes(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).splitlines()


def mistake(*overrides):
    """The only line about these overrides beside a good env.id."""
    (line,) = mistakes(None, "env.id=X", *overrides)
    return line
