"""Environments by name, for the length of a test."""

import sys
from types import ModuleType

import gymnasium as gym
import pytest
from gymnasium.envs.registration import registry


@pytest.fixture
def module():
    """A module that can be imported by name, with whatever a test puts into it."""
    made = ModuleType("a_module_of_a_test")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


@pytest.fixture
def register():
    ids = []

    def register(env_id, **arguments):
        gym.register(env_id, **arguments)
        ids.append(env_id)
        return env_id

    yield register
    for env_id in ids:
        registry.pop(env_id, None)
