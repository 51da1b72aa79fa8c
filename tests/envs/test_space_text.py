"""Spaces survive being written down, whatever they hold."""

import json

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from impala_async.envs.space_text import as_json, from_json
from impala_async.errors import EnvError

SPACES = (
    Box(0, 255, (84, 84, 4), np.uint8),
    Box(np.array([-1.5, -np.inf], np.float32), np.array([np.inf, 0.1], np.float32)),
    Box(-1, 1, (), np.float64),
    Box(0, 1, (0,), np.float32),
    Discrete(5, start=-3),
    Discrete(3, dtype=np.int32),
    MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]]),
    MultiBinary((2, 3)),
    MultiBinary(4),
    Dict([("z", Discrete(2)), ("a", Tuple((Box(0, 1, (2,)), Dict({"b": MultiBinary(2)}))))]),
    Dict({1: Discrete(2), 2: Discrete(3)}),
    gym.make("CartPole-v1").observation_space,
)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_space_is_the_same_when_it_is_read(space):
    text = json.loads(json.dumps(as_json(space)))
    found = from_json(text)
    assert (found, found.dtype, found.shape) == (space, space.dtype, space.shape)
    if isinstance(space, Dict):
        assert list(found.spaces) == list(space.spaces)


def test_other_spaces_and_other_text_are_refused():
    with pytest.raises(EnvError, match="Text is no space that can be written down"):
        as_json(Text(3))
    with pytest.raises(EnvError, match="'Sphere' is no space"):
        from_json({"kind": "Sphere"})
    for text in ({}, {"kind": "Box", "dtype": "float32"}):
        with pytest.raises(KeyError):
            from_json(text)
