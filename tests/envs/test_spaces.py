import numpy as np
import pytest
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from gymnasium.vector.utils import batch_space

from impala_async.envs.spaces import (
    ActionAdapter,
    check_obs,
    describe_action,
    describe_spaces,
    flatten_obs,
    obs_leaves,
)
from impala_async.errors import EnvError
from impala_async.spec import ActionPart, ActionSpec, ArraySpec, ObsSpec

BOX = Box(-1, 1, (4,), np.float32)
NESTED = Dict(
    {
        "z": Box(0, 255, (2, 3), np.uint8),
        "a": Dict({"y": Box(-1, 1, (), np.float64), "b": Box(0, 9, (5,), np.int16)}),
    }
)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4,), "float32"), ((84, 84, 4), "uint8"), ((), "float64"), ((1,), "int64"), ((2, 2), "bool")],
)
def test_a_box_is_one_leaf_without_a_name(shape: tuple[int, ...], dtype: str) -> None:
    box = Box(0, 1, shape, np.dtype(dtype).type)
    obs, action = describe_spaces(box, Discrete(3))
    assert obs == ObsSpec((ArraySpec("", shape, dtype),))
    assert action == ActionSpec((ActionPart("", "discrete", (3,)),))


def test_a_dict_is_its_boxes_in_the_order_of_gymnasium() -> None:
    obs, _ = describe_spaces(NESTED, Discrete(2))
    assert obs == ObsSpec(
        (
            ArraySpec("a/b", (5,), "int16"),
            ArraySpec("a/y", (), "float64"),
            ArraySpec("z", (2, 3), "uint8"),
        )
    )


def test_a_dict_that_keeps_its_own_order_keeps_it_here() -> None:
    obs, _ = describe_spaces(Dict([("b", BOX), ("a", BOX)]), Discrete(2))
    assert [leaf.name for leaf in obs.leaves] == ["b", "a"]


def test_the_start_of_a_discrete_is_not_in_the_spec() -> None:
    assert describe_action(Discrete(3, start=-1)) == describe_action(Discrete(3))


@pytest.mark.parametrize(
    ("space", "named"),
    [
        (Discrete(16), "Discrete(16)"),
        (MultiBinary(3), "MultiBinary(3)"),
        (Text(5), "Text"),
        (Tuple((BOX, BOX)), "Tuple"),
        (Dict(a=Dict(b=Discrete(2))), "at 'a/b'"),
        (Dict(), "empty"),
        (Box(0, 1, (3,), np.uint32), "uint32"),
        (Box(0, 1, (3, 0), np.float32), "(3, 0)"),
        (Dict([("a", Dict(b=BOX)), ("a/b", BOX)]), "'a/b'"),
    ],
)
def test_other_observation_spaces_are_refused_by_name(space: Space, named: str) -> None:
    with pytest.raises(EnvError) as caught:
        describe_spaces(space, Discrete(2))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "space", [Box(-1, 1, (2,)), MultiDiscrete([2, 3]), MultiBinary(2), Tuple((Discrete(2),))]
)
def test_other_action_spaces_are_refused_by_name(space: Space) -> None:
    with pytest.raises(EnvError, match=type(space).__name__) as caught:
        describe_spaces(BOX, space)
    assert "supported now is Discrete" in str(caught.value)


def test_a_long_space_is_cut_to_one_line() -> None:
    many_bounds = Box(np.arange(200.0), np.arange(200.0) + 1, dtype=np.float64)
    with pytest.raises(EnvError) as caught:
        describe_spaces(BOX, many_bounds)
    assert len(str(caught.value)) < 250
    assert "\n" not in str(caught.value)


def test_a_batched_observation_is_flattened_without_copying() -> None:
    leaves = obs_leaves(NESTED)
    batch = batch_space(NESTED, 3).sample()
    flat = flatten_obs(leaves, batch)
    assert list(flat) == ["a/b", "a/y", "z"]
    assert flat["a/b"] is batch["a"]["b"]
    assert flat["a/y"].shape == (3,)
    np.testing.assert_array_equal(flat["z"], batch["z"])
    assert flatten_obs(obs_leaves(BOX), batch["z"].astype(np.float32))[""].shape == (3, 2, 3)


def test_flattened_observations_have_the_dtype_of_the_space_and_can_be_written() -> None:
    values = np.arange(8.0).reshape(2, 4)
    assert flatten_obs(obs_leaves(BOX), values)[""].dtype == np.float32
    frozen = values.astype(np.float32)
    frozen.flags.writeable = False
    flat = flatten_obs(obs_leaves(BOX), frozen)[""]
    assert flat.flags.writeable
    np.testing.assert_array_equal(flat, frozen)


def test_what_a_space_describes_passes_the_check() -> None:
    check_obs(obs_leaves(NESTED), NESTED.sample())
    check_obs(obs_leaves(NESTED), batch_space(NESTED, 3).sample(), 3)
    check_obs(obs_leaves(BOX), [0, 0.5, 1, 0])


@pytest.mark.parametrize(
    ("space", "obs", "text"),
    [
        (BOX, np.zeros(3, np.float32), r"shape \(4,\), it has \(3,\)"),
        (BOX, 0.5, r"it has \(\)"),
        (BOX, np.zeros((1, 4), np.float32), r"it has \(1, 4\)"),
        (Box(0, 255, (4,), np.uint8), np.zeros(4, np.float32), "uint8, it is float32"),
        (BOX, [[0], [1, 2]], "not there"),
        (NESTED, {"z": np.zeros((2, 3), np.uint8)}, "a/b: .* not there"),
        (NESTED, np.zeros(4), "not there"),
    ],
)
def test_what_a_space_does_not_describe_is_refused(space: Space, obs: object, text: str) -> None:
    with pytest.raises(EnvError, match=text):
        check_obs(obs_leaves(space), obs)


def test_the_check_of_a_batch_counts_its_columns() -> None:
    with pytest.raises(EnvError, match=r"shape \(2, 4\)"):
        check_obs(obs_leaves(BOX), np.zeros((3, 4), np.float32), 2)


@pytest.mark.parametrize("dtype", [np.int64, np.int8])
def test_actions_are_moved_to_the_start_in_the_dtype_of_the_space(dtype: type) -> None:
    space = Discrete(3, start=-1, dtype=dtype)
    adapt = ActionAdapter(space, 3)
    actions = adapt({"": np.array([0, 1, 2], np.int32)})
    assert actions.tolist() == [-1, 0, 1]
    assert batch_space(space, 3).contains(actions)
    assert all(space.contains(action) for action in actions)
