"""Configs of dotted keys, and what is told of those that are refused."""

import pytest

from impala_async.config.load import load_config, validate_config
from impala_async.errors import ConfigError

LOCKSTEP = {"pace__mode": "lockstep"}


def nested(settings):
    tree = {}
    for key, value in settings.items():
        *sections, leaf = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[leaf] = value
    return tree


def config_of(**settings):
    """Dotted keys, with two underscores for the dot."""
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    return validate_config(nested({"env.id": "X", **dotted}))


def complaint(**settings):
    with pytest.raises(ConfigError) as caught:
        config_of(**settings)
    return str(caught.value)


def mistakes(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).splitlines()


def mistake(*overrides):
    """The only line about these overrides beside a good env.id."""
    (line,) = mistakes(None, "env.id=X", *overrides)
    return line
