"""Spaces come back from JSON as they were, keys in their order; what is none is refused."""

import json

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, Tuple

from impala_async.config.env import EnvSection
from impala_async.envs.saved_spaces import load_space, load_spaces, save_space, save_spaces
from impala_async.envs.spaces import Spaces
from impala_async.errors import SpacesError

LOW = np.array([[-1.5, -np.inf], [0.1, 3]], np.float32)
SPACES = [
    Box(-1, 1, (3,)),
    Box(LOW, np.abs(LOW) + 7, dtype=np.float32),
    Box(-np.inf, np.inf, (2, 2), np.float64),
    Box(np.float64(0.1), np.float64(0.3), (), np.float64),
    Box(0, 255, (4, 84, 84), np.uint8),
    Box(np.array([-5, 0]), np.array([2**40, 9]), dtype=np.int64),
    Discrete(4),
    Discrete(3, start=-7),
    Discrete(3, dtype=np.int32),
    MultiDiscrete([2, 5], start=[1, -1]),
    MultiDiscrete(np.array([[2, 3], [4, 5]]), np.int32),
    MultiBinary(5),
    MultiBinary([2, 3]),
    Tuple([Discrete(2), Tuple([Box(-1, 1, (2,))])]),
    Dict([("b", Discrete(2)), ("a", Dict({"x": MultiBinary(2), "w": Box(0, 1, (1,))}))]),
    Dict([(3, Discrete(2)), ("three", Discrete(3))]),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_space_comes_back_as_it_was(space):
    text = json.dumps(save_space(space), allow_nan=False)
    again = load_space(json.loads(text))
    assert again == space
    assert again.dtype == space.dtype
    if isinstance(space, Dict):
        assert list(again.spaces) == list(space.spaces)
    space.seed(0)
    assert all(again.contains(space.sample()) for _ in range(5))


def test_equal_bounds_are_written_once():
    assert len(json.dumps(save_space(Box(0, 255, (4, 84, 84), np.uint8)))) < 120


def test_a_key_that_json_does_not_have_is_text():
    saved = json.loads(json.dumps(save_space(Dict([(("a", 1), Discrete(2))]))))
    assert list(load_space(saved).spaces) == ["('a', 1)"]


def test_what_is_no_space_is_refused_and_says_which():
    box = save_space(Box(-1, 1, (2,)))
    for saved in (
        None,
        [],
        {},
        save_space(Graph(Box(-1, 1, (3,)), None)),
        {**box, "shape": [3], "low": [0.0, 1.0]},
        {**box, "dtype": "no_such"},
        {**box, "dtype": 5000 * "9"},
        {**box, "high": []},
        {**save_space(Discrete(2)), "n": -1},
        {"kind": "Dict", "parts": [["a", {"kind": "Box"}]]},
    ):
        with pytest.raises(SpacesError, match="describes no space") as caught:
            load_space(saved)
        assert "\n" not in str(caught.value)
    with pytest.raises(SpacesError, match=r"^action: describes no space"):
        load_spaces({"observation": box})


def test_no_memory_is_taken_for_more_numbers_than_a_row_has():
    large = {**save_space(Box(0, 1, (2,))), "shape": [1 << 25]}
    bits = {"kind": "MultiBinary", "dtype": "int8", "shape": [1 << 40, 1 << 40]}
    texts = {**save_space(MultiDiscrete([2, 3])), "dtype": "S1000000000"}
    odd = {**large, "shape": [1 << 28], "parts": [save_space(Discrete(2))]}
    in_all = {"kind": "Dict", "parts": [[key, large] for key in "abcde"]}
    for saved in (bits, texts, odd, in_all):
        with pytest.raises(SpacesError, match=r"takes \d+ bytes, more than 536870912"):
            load_space(saved)
    with pytest.raises(SpacesError, match="more than"):
        load_space({"kind": "Tuple", "parts": [{"kind": "Tuple", "parts": [large] * 5}]})


def test_both_of_an_environment_are_saved():
    spaces = Spaces(SPACES[0], SPACES[6], EnvSection(id="any"))
    assert load_spaces(save_spaces(spaces)) == (SPACES[0], SPACES[6])
