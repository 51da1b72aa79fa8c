import numpy as np
import pytest
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

from impala_async.envs.batch import ObsRows
from impala_async.envs.spaces import obs_leaves
from impala_async.errors import EnvError
from impala_async.schema import ArraySpec

BOX = Box(-1, 1, (4,), np.float32)
# Every kind, twice nested.
ALL = Dict(
    {
        "box": BOX,
        "bits": MultiBinary((2, 2)),
        "both": Tuple((Discrete(3, start=-1), Dict({"many": MultiDiscrete([[2, 3], [4, 5]])}))),
    }
)
PLAIN = [
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


def leaves_of(space):
    return [leaf.spec for leaf in obs_leaves(space)]


def test_a_space_is_its_leaves_in_the_order_of_gymnasium():
    for space, spec in PLAIN:
        assert leaves_of(space) == [spec], space
    assert leaves_of(ALL) == [
        ArraySpec("bits", (2, 2), "int8"),
        ArraySpec("both/0", (), "int64", (3,)),
        ArraySpec("both/1/many", (2, 2), "int64", (2, 3, 4, 5)),
        ArraySpec("box", (4,), "float32"),
    ]
    own_order = Dict([("b", BOX), ("a", Tuple((BOX, Tuple((BOX, BOX)))))])
    assert [leaf.name for leaf in leaves_of(own_order)] == ["b", "a/0", "a/1/0", "a/1/1"]


@pytest.mark.parametrize(
    ("space", "named"),
    [
        (Text(5), "Text"),
        (Graph(BOX, None), "Graph"),
        (OneOf((BOX, Discrete(2))), "OneOf"),
        (Sequence(Box(np.arange(200.0), np.arange(200.0) + 1, dtype=np.float64)), "Sequence"),
        (Dict(a=Dict(b=Text(3))), "at 'a/b'"),
        (Tuple((BOX, Sequence(Discrete(2)))), "at '1'"),
        (Dict(image=BOX, mission=Text(5)), "(env.wrappers), as gymnasium.wrappers:Filter"),
        (Dict(), "empty"),
        (Tuple(()), "empty"),
        (Box(0, 1, (3,), np.uint32), "uint32"),
        (Box(0, 1, (3, 0), np.float32), "(3, 0)"),
        (Dict([("a", Dict(b=BOX)), ("a/b", BOX)]), "two parts called 'a/b'"),
        (Dict([("a", Tuple((BOX,))), ("a/0", BOX)]), "two parts called 'a/0'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_other_spaces_are_refused_on_one_line(space, named):
    with pytest.raises(EnvError) as caught:
        obs_leaves(space)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 350


@pytest.mark.parametrize("space", [space for space, _ in PLAIN] + [ALL], ids=str)
def test_samples_come_out_in_the_shapes_and_dtypes_of_the_spec(space):
    space.seed(3)
    leaves = obs_leaves(space)
    samples = [space.sample() for _ in range(5)]
    rows = ObsRows(leaves, 5)
    for row, sample in enumerate(samples):
        rows.write(row, sample)
    empty = create_empty_array(space, 5, fn=np.zeros)
    flat = ObsRows(leaves, 5).read(concatenate(space, samples, empty))
    assert list(flat) == [leaf.spec.name for leaf in leaves]
    for leaf in leaves:
        array = flat[leaf.spec.name]
        assert (array.shape, array.dtype) == ((5, *leaf.spec.shape), leaf.spec.dtype)
        assert array.flags.writeable
        np.testing.assert_array_equal(array, rows.arrays[leaf.spec.name])
        if leaf.spec.choices:
            assert (array >= 0).all()
            assert (array < np.reshape(leaf.spec.choices, leaf.spec.shape)).all()


def test_categories_count_from_0():
    (leaf,) = obs_leaves(Discrete(3, start=-7))
    assert [int(leaf.of(value)) for value in (-7, np.int64(-6), -5)] == [0, 1, 2]
    (leaf,) = obs_leaves(MultiDiscrete([2, 3], start=[-1, 9]))
    assert leaf.of(np.array([[-1, 9], [0, 11]])).tolist() == [[0, 0], [1, 2]]


def test_a_batched_observation_is_copied_only_for_its_dtype_and_to_be_written():
    batch = batch_space(ALL, 3).sample()
    flat = ObsRows(obs_leaves(ALL), 3).read(batch)
    assert flat["box"] is batch["box"]
    assert flat["both/1/many"] is batch["both"][1]["many"]
    rows = ObsRows(obs_leaves(BOX), 2)
    values = np.arange(8.0).reshape(2, 4)
    assert rows.read(values)[""].dtype == np.float32
    frozen = values.astype(np.float32)
    frozen.flags.writeable = False
    assert rows.read(frozen)[""].flags.writeable
    np.testing.assert_array_equal(rows.read(frozen)[""], frozen)


@pytest.mark.parametrize(
    ("space", "obs", "text"),
    [
        (BOX, np.zeros(3, np.float32), r"shape \(4,\), it has \(3,\)"),
        (BOX, 0.5, r"it has \(\)"),
        (BOX, np.zeros((1, 4), np.float32), r"it has \(1, 4\)"),
        (BOX, [[0], [1, 2]], "not there"),
        (Box(0, 255, (4,), np.uint8), np.zeros(4, np.float32), "uint8, it is float32"),
        (ALL, {"box": np.zeros(4)}, "bits: .* not there"),
        (ALL, np.zeros(4), "not there"),
        (Discrete(3), 0.5, "int64, it is float64"),
        (Discrete(3, start=1), None, "not there"),
        (Discrete(3, start=1), "ab", "not there"),
        (Box(-9, 9, (2,), np.int8), np.array([3, -300]), "promises int8, it has -300"),
        (Box(-9, 9, (2,), np.int8), [300, 3], "promises int8, it has 300"),
        (MultiDiscrete([2, 3], np.int8), np.array([257, 256]), "promises int8, it has 257"),
        (MultiDiscrete([2, 3]), [0], r"shape \(2,\), it has \(1,\)"),
        (Tuple((Discrete(2), BOX)), (1,), "1: .* not there"),
        (Tuple((Discrete(2), BOX)), 1, "0: .* not there"),
    ],
)
def test_what_a_space_does_not_describe_is_refused(space, obs, text):
    with pytest.raises(EnvError, match=text):
        ObsRows(obs_leaves(space), 1).write(0, obs)


def test_a_batch_has_as_many_rows_as_were_asked_for_and_a_row_may_be_a_list():
    rows = ObsRows(obs_leaves(BOX), 2)
    with pytest.raises(EnvError, match=r"shape \(2, 4\)"):
        rows.read(np.zeros((3, 4), np.float32))
    rows.write(1, [0, 0.5, 1, 0])
    assert rows.arrays[""].tolist() == [[0, 0, 0, 0], [0, 0.5, 1, 0]]


def test_numbers_of_a_larger_dtype_are_looked_at_in_every_row():
    rows = ObsRows(obs_leaves(Box(-9, 9, (2,), np.int8)), 1)
    for fitting in (np.array([3, -4]), np.array([127, -128], np.int16)):
        rows.write(0, fitting)
        assert rows.arrays[""].tolist() == [fitting.tolist()]
        with pytest.raises(EnvError, match="promises int8, it has 200"):
            rows.write(0, np.array([1, 200], fitting.dtype))
    single = ObsRows(obs_leaves(Discrete(3, dtype=np.int8)), 1)
    for kind in (np.int64, int):
        single.write(0, kind(2))
        with pytest.raises(EnvError, match="promises int8, it has 257"):
            single.write(0, kind(257))
