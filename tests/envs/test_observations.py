from typing import Any

import numpy as np
import pytest
from gymnasium import Space
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    Graph,
    MultiBinary,
    MultiDiscrete,
    OneOf,
    Sequence,
    Text,
    Tuple,
)
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from impala_async.envs.observations import ObsRows, obs_leaves
from impala_async.errors import EnvError
from impala_async.schema import ArraySpec

BOX = Box(-1, 1, (4,), np.float32)
NESTED = Dict(
    {
        "z": Box(0, 255, (2, 3), np.uint8),
        "a": Dict({"y": Box(-1, 1, (), np.float64), "b": Box(0, 9, (5,), np.int16)}),
    }
)
# Every kind, twice nested.
ALL = Dict(
    {
        "box": BOX,
        "bits": MultiBinary((2, 2)),
        "both": Tuple((Discrete(3, start=-1), Dict({"many": MultiDiscrete([[2, 3], [4, 5]])}))),
    }
)
PLAIN: list[tuple[Space[Any], ArraySpec]] = [
    (Box(0, 1, (4,), np.float32), ArraySpec("", (4,), "float32")),
    (Box(0, 255, (84, 84, 4), np.uint8), ArraySpec("", (84, 84, 4), "uint8")),
    (Box(0, 1, (), np.float64), ArraySpec("", (), "float64")),
    (Box(0, 1, (2, 1, 3, 1), np.float16), ArraySpec("", (2, 1, 3, 1), "float16")),
    (Box(-5, 5, (1,), np.int64), ArraySpec("", (1,), "int64")),
    (Box(0, 1, (2, 2), np.bool_), ArraySpec("", (2, 2), "bool")),
    (Discrete(16), ArraySpec("", (), "int64", (16,))),
    (Discrete(3, start=-7), ArraySpec("", (), "int64", (3,))),
    (Discrete(3, start=5, dtype=np.int8), ArraySpec("", (), "int8", (3,))),
    (MultiDiscrete([2, 3]), ArraySpec("", (2,), "int64", (2, 3))),
    (MultiDiscrete([2, 3], start=[-1, 9]), ArraySpec("", (2,), "int64", (2, 3))),
    (MultiDiscrete([[2, 3], [4, 5]], np.int16), ArraySpec("", (2, 2), "int16", (2, 3, 4, 5))),
    (MultiBinary(3), ArraySpec("", (3,), "int8")),
    (MultiBinary((2, 3)), ArraySpec("", (2, 3), "int8")),
]


def spec_of(space: Space[Any]) -> list[ArraySpec]:
    return [leaf.spec for leaf in obs_leaves(space)]


def check_obs(leaves: Any, obs: Any, num_rows: int | None = None) -> None:
    if num_rows is None:
        ObsRows(leaves, 1).write(0, obs)
    else:
        ObsRows(leaves, num_rows).read(obs)


def flatten_obs(leaves: Any, obs: Any, num_rows: int = 2) -> dict[str, Any]:
    return ObsRows(leaves, num_rows).read(obs)


def batched(space: Space[Any], samples: list[Any]) -> Any:
    """As a vector environment of gymnasium shows them."""
    out = create_empty_array(space, len(samples), fn=np.zeros)
    return concatenate(space, samples, out)


# -------------------------------------------------------------------------------------- leaves


@pytest.mark.parametrize(("space", "spec"), PLAIN, ids=lambda value: str(value)[:40])
def test_a_plain_space_is_one_leaf_without_a_name(space: Space[Any], spec: ArraySpec) -> None:
    assert spec_of(space) == [spec]


def test_a_nested_space_is_its_leaves_in_the_order_of_gymnasium() -> None:
    assert spec_of(NESTED) == [
        ArraySpec("a/b", (5,), "int16"),
        ArraySpec("a/y", (), "float64"),
        ArraySpec("z", (2, 3), "uint8"),
    ]
    assert spec_of(ALL) == [
        ArraySpec("bits", (2, 2), "int8"),
        ArraySpec("both/0", (), "int64", (3,)),
        ArraySpec("both/1/many", (2, 2), "int64", (2, 3, 4, 5)),
        ArraySpec("box", (4,), "float32"),
    ]
    assert [leaf.name for leaf in spec_of(Tuple((BOX, Tuple((BOX, BOX)))))] == ["0", "1/0", "1/1"]


def test_a_dict_that_keeps_its_own_order_keeps_it_here() -> None:
    assert [leaf.name for leaf in spec_of(Dict([("b", BOX), ("a", BOX)]))] == ["b", "a"]


@pytest.mark.parametrize(
    ("space", "named"),
    [
        (Text(5), "Text"),
        (Graph(BOX, None), "Graph"),
        (Sequence(BOX), "Sequence"),
        (OneOf((BOX, Discrete(2))), "OneOf"),
        (Dict(a=Dict(b=Text(3))), "at 'a/b'"),
        (Tuple((BOX, Sequence(Discrete(2)))), "at '1'"),
        (Dict(), "empty"),
        (Tuple(()), "empty"),
        (Box(0, 1, (3,), np.uint32), "uint32"),
        (Box(0, 1, (3, 0), np.float32), "(3, 0)"),
        (Dict([("a", Dict(b=BOX)), ("a/b", BOX)]), "'a/b'"),
        (Dict([("a", Tuple((BOX,))), ("a/0", BOX)]), "'a/0'"),
    ],
    ids=str,
)
def test_other_spaces_are_refused_by_name(space: Space[Any], named: str) -> None:
    with pytest.raises(EnvError) as caught:
        obs_leaves(space)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_refused_part_of_a_dict_can_be_left_out_and_the_error_says_how() -> None:
    with pytest.raises(EnvError, match=r"env\.wrappers\), as gymnasium\.wrappers:Filter"):
        obs_leaves(Dict(image=BOX, mission=Text(5)))


def test_a_long_space_is_cut_to_one_line() -> None:
    many_bounds = Box(np.arange(200.0), np.arange(200.0) + 1, dtype=np.float64)
    with pytest.raises(EnvError) as caught:
        obs_leaves(Sequence(many_bounds))
    assert len(str(caught.value)) < 280
    assert "\n" not in str(caught.value)


# -------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("space", [space for space, _ in PLAIN] + [NESTED, ALL], ids=str)
def test_samples_pass_the_check_and_come_out_in_the_specs_shapes_and_dtypes(
    space: Space[Any],
) -> None:
    space.seed(3)
    leaves = obs_leaves(space)
    samples = [space.sample() for _ in range(5)]
    for sample in samples:
        check_obs(leaves, sample)
    batch = batched(space, samples)
    check_obs(leaves, batch, 5)
    flat = flatten_obs(leaves, batch, 5)
    assert list(flat) == [leaf.spec.name for leaf in leaves]
    for leaf in leaves:
        array = flat[leaf.spec.name]
        assert array.shape == (5, *leaf.spec.shape)
        assert array.dtype == leaf.spec.dtype
        assert array.flags.writeable
        for row, sample in zip(array, samples, strict=True):
            np.testing.assert_array_equal(row, leaf.of(sample))
        if leaf.spec.choices:
            assert (array >= 0).all()
            assert (array < np.reshape(leaf.spec.choices, leaf.spec.shape)).all()


def test_categories_count_from_0() -> None:
    (leaf,) = obs_leaves(Discrete(3, start=-7))
    assert [int(leaf.of(value)) for value in (-7, np.int64(-6), -5)] == [0, 1, 2]
    (leaf,) = obs_leaves(MultiDiscrete([2, 3], start=[-1, 9]))
    assert leaf.of(np.array([[-1, 9], [0, 11]])).tolist() == [[0, 0], [1, 2]]


def test_a_batched_observation_is_flattened_without_copying() -> None:
    batch = batch_space(NESTED, 3).sample()
    flat = flatten_obs(obs_leaves(NESTED), batch, 3)
    assert flat["a/b"] is batch["a"]["b"]
    assert flat["z"] is batch["z"]


def test_flattened_observations_have_the_dtype_of_the_space_and_can_be_written() -> None:
    values = np.arange(8.0).reshape(2, 4)
    assert flatten_obs(obs_leaves(BOX), values)[""].dtype == np.float32
    frozen = values.astype(np.float32)
    frozen.flags.writeable = False
    flat = flatten_obs(obs_leaves(BOX), frozen)[""]
    assert flat.flags.writeable
    np.testing.assert_array_equal(flat, frozen)


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
        (Discrete(3), 0.5, "int64, it is float64"),
        (Box(-9, 9, (2,), np.int8), np.array([3, -300]), "promises int8, it has -300"),
        (Box(-9, 9, (2,), np.int8), [300, 3], "promises int8, it has 300"),
        (MultiDiscrete([2, 3], np.int8), np.array([257, 256]), "promises int8, it has 257"),
        (Discrete(3, start=1), None, "not there"),
        (Discrete(3, start=1), "ab", "not there"),
        (MultiDiscrete([2, 3]), [0], r"shape \(2,\), it has \(1,\)"),
        (Tuple((Discrete(2), BOX)), (1,), "1: .* not there"),
        (Tuple((Discrete(2), BOX)), 1, "0: .* not there"),
    ],
)
def test_what_a_space_does_not_describe_is_refused(
    space: Space[Any], obs: object, text: str
) -> None:
    with pytest.raises(EnvError, match=text):
        check_obs(obs_leaves(space), obs)


def test_the_check_of_a_batch_counts_its_columns() -> None:
    with pytest.raises(EnvError, match=r"shape \(2, 4\)"):
        check_obs(obs_leaves(BOX), np.zeros((3, 4), np.float32), 2)
    check_obs(obs_leaves(BOX), [0, 0.5, 1, 0])


def test_numbers_of_a_larger_dtype_are_looked_at_in_every_row():
    leaves = obs_leaves(Box(-9, 9, (2,), np.int8))
    rows = ObsRows(leaves, 1)
    for fitting in (np.array([3, -4]), np.array([127, -128], np.int16)):
        rows.write(0, fitting)
        assert rows.arrays[""].tolist() == [fitting.tolist()]
        with pytest.raises(EnvError, match="promises int8, it has 200"):
            rows.write(0, np.array([1, 200], fitting.dtype))
    single = ObsRows(obs_leaves(Discrete(3, dtype=np.int8)), 1)
    single.write(0, np.int64(2))
    with pytest.raises(EnvError, match="promises int8, it has 257"):
        single.write(0, np.int64(257))
