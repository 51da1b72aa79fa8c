"""Column layouts byte by byte, how two schemas differ, and what is sent in place of one."""

import contextlib
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from impala_async import schema
from impala_async.errors import SpacesError
from impala_async.schema import (
    POLICY,
    ActionPart,
    ActionSpec,
    ArraySpec,
    Leaf,
    ObsSpec,
    Schema,
    policy_leaf,
    recurrent_state,
)
from tests.columns import Planes

SCHEMA = Schema(
    obs=ObsSpec((ArraySpec("image", (3, 5), "uint8"), ArraySpec("speed", (), "float32"))),
    action=ActionSpec((ActionPart("move", "discrete", (4,)), ActionPart("look", "discrete", (2,)))),
    rows=3,
    state=(ArraySpec("core", (2,), "float64"),),
)
STACK = ArraySpec("image", (4, 3, 5), "uint8", is_stack=True)
STACKED = replace(SCHEMA, obs=ObsSpec((STACK, *SCHEMA.obs.leaves[1:])))
WIDE = Schema(
    obs=ObsSpec(
        (
            ArraySpec("image", (3, 5), "uint8"),
            ArraySpec("lamp", (2,), "int64", (3, 4)),
            ArraySpec("legal", (7,), "int8"),
        )
    ),
    action=ActionSpec(
        (
            ActionPart("move", "discrete", (2, 5), (2,)),
            ActionPart("push", "continuous", (), (2, 2)),
            ActionPart("turn", "squashed"),
        ),
        legal="legal",
    ),
    rows=3,
    state=(ArraySpec("core", (2,), "float64"),),
)
TEAM = Schema(
    obs=ObsSpec((ArraySpec("sight", (2,), "float32"), policy_leaf(("main", "past")))),
    action=ActionSpec((ActionPart("", "discrete", (3,)),)),
    rows=2,
    policies=("main", "past"),
)
JSON = (
    b'{"action":{"legal":"legal","parts":['
    b'{"choices":[2,5],"kind":"discrete","name":"move","shape":[2]},'
    b'{"choices":[],"kind":"continuous","name":"push","shape":[2,2]},'
    b'{"choices":[],"kind":"squashed","name":"turn","shape":[]}]},'
    b'"obs":{"leaves":[{"choices":[],"dtype":"uint8","name":"image","shape":[3,5]},'
    b'{"choices":[3,4],"dtype":"int64","name":"lamp","shape":[2]},'
    b'{"choices":[],"dtype":"int8","name":"legal","shape":[7]}]},'
    b'"rows":3,"state":[{"choices":[],"dtype":"float64","name":"core","shape":[2]}]}'
)

ODD = Schema(
    obs=ObsSpec((ArraySpec("", (), "bool"), ArraySpec("ä", (3, 1), "float16"))),
    action=ActionSpec((ActionPart("", "squashed", (), (5,)),)),
    rows=1,
    state=(ArraySpec("one", (), "int8"), ArraySpec("two", (3,), "uint16")),
)
SCHEMAS = (SCHEMA, STACKED, WIDE, TEAM, ODD)


# -------------------- layout


def test_golden_layout():
    layout = SCHEMA.layout
    assert layout.leaves == {
        # S = 4 rows of 15 bytes, aligned to 8; then 4 floats.
        "obs/image": Leaf("obs", slice(0, 60), (4, 3, 5), "uint8"),
        "obs/speed": Leaf("obs", slice(64, 80), (4,), "float32"),
        # State once per column; then T = 3 rows each.
        "state/core": Leaf("small", slice(0, 16), (2,), "float64"),
        "log_prob": Leaf("small", slice(16, 28), (3,), "float32"),
        "reward": Leaf("small", slice(32, 44), (3,), "float32"),
        "action/move": Leaf("small", slice(48, 60), (3,), "int32"),
        "action/look": Leaf("small", slice(64, 76), (3,), "int32"),
        "terminated": Leaf("small", slice(80, 83), (3,), "bool"),
        "truncated": Leaf("small", slice(88, 91), (3,), "bool"),
        "mask": Leaf("small", slice(96, 99), (3,), "bool"),
    }
    assert (layout.obs_bytes, layout.small_bytes, layout.column_bytes) == (128, 128, 256)
    stacked = STACKED.layout.leaves
    # An empty frame, the four of row 0, and one for each of three rows.
    assert stacked["obs/image"] == Leaf("obs", slice(0, 120), (8, 3, 5), "uint8")
    assert stacked["window/image"] == Leaf("obs", slice(120, 184), (4, 4), "int32")
    assert stacked["obs/speed"] == Leaf("obs", slice(184, 200), (4,), "float32")


@pytest.mark.parametrize("num_columns", [1, 4])
@pytest.mark.parametrize("schema", SCHEMAS)
def test_leaves_neither_overlap_nor_leave_their_column(schema, num_columns):
    layout = schema.layout
    planes = Planes(schema, num_columns)
    assert layout.obs_bytes % 64 == layout.small_bytes % 64 == 0
    for number, (name, view) in enumerate(layout.views(planes.obs, planes.small).items(), start=1):
        leaf = layout.leaves[name]
        assert leaf.stretch.start % 8 == 0
        assert (view.shape, view.dtype) == ((num_columns, *leaf.shape), leaf.dtype)
        assert view.flags.aligned
        plane = getattr(planes, leaf.plane)
        before = plane.copy()
        assert np.shares_memory(view, plane)
        touched = view.view(np.uint8) if view.ndim > 1 else view[..., None].view(np.uint8)
        assert not touched.any(), "somebody wrote here before"
        touched[...] = number
        assert (plane != before).sum(axis=1).tolist() == [view[0].nbytes] * num_columns


def test_a_column_has_a_largest_size(monkeypatch):
    def one_leaf(rows):
        return replace(TEAM, obs=ObsSpec((ArraySpec("", (100,), "uint8"),)), rows=rows, policies=())

    assert schema.MAX_COLUMN_BYTES == 1 << 30
    monkeypatch.setattr(schema, "MAX_COLUMN_BYTES", one_leaf(9).layout.column_bytes)
    assert one_leaf(9).layout.obs_bytes > 1000
    with pytest.raises(SpacesError, match=r"a column of 10 rows takes \d+ bytes.*trajectory\.rows"):
        _ = one_leaf(10).layout
    with pytest.raises(SpacesError, match="lower trajectory"):
        Schema.from_json(one_leaf(10).to_json())


def test_what_no_learner_takes_as_it_is_too_long_is_refused_where_it_is_made():
    leaves = [ArraySpec(f"leaf {number}", (), "float32") for number in range(2000)]
    with pytest.raises(SpacesError, match=r"2001 parts of .* take .* more than 65536: have few"):
        _ = replace(TEAM, obs=ObsSpec(tuple(leaves)), policies=()).layout


# -------------------- arrays and parts


def test_arrays_and_parts_are_counted():
    array, flag = ArraySpec("x", (3, 4), "float16"), ArraySpec("x", (), "bool")
    assert (array.num_items, array.num_bytes, array.is_float) == (12, 24, True)
    assert (flag.num_bytes, flag.is_float) == (1, False)
    for part, num_parameters, dtype in (
        (ActionPart("move", "discrete", (4,)), 4, "int32"),
        (ActionPart("move", "discrete", (4, 2, 3), (3,)), 9, "int32"),
        (ActionPart("move", "continuous", (), (2, 3)), 12, "float32"),
        (ActionPart("move", "squashed"), 2, "float32"),
    ):
        assert part.num_parameters == num_parameters
        assert part.array == ArraySpec("move", part.shape, dtype, part.choices)
    assert (WIDE.action.num_choices, SCHEMA.action.num_choices) == (7, 6)


def test_neither_the_mask_nor_who_plays_is_an_input():
    assert [leaf.name for leaf in WIDE.inputs.leaves] == ["image", "lamp"]
    assert [leaf.name for leaf in TEAM.inputs.leaves] == ["sight"]
    # A leaf of that name is one like any other where there is a single policy.
    assert [leaf.name for leaf in replace(TEAM, policies=()).inputs.leaves] == ["sight", POLICY]
    assert SCHEMA.inputs == SCHEMA.obs
    hidden, cell = (ArraySpec(name, (7,), "float32") for name in ("hidden", "cell"))
    cores = [recurrent_state(core, 7) for core in (None, "gru", "lstm")]
    assert cores == [(), (hidden,), (hidden, cell)]


NO_ARRAYS = [
    *((lambda d=d: ArraySpec("x", (), d), f"x: unsupported dtype {d}")
      for d in ("float128", "complex64", "object", "<f4", "str", "uint32", "")),
    *((lambda s=s: ArraySpec("x", s, "float32"), "x: empty shape") for s in ((0,), (3, 0), (-1,))),
    (lambda: ActionPart("x", "continuous", (), (3, 0)), "x: empty shape"),
    *((lambda s=s, n=n, make=make: make(s, n), f"x: {len(n)} numbers of choices for shape")
      for s, n in (((), (2, 3)), ((2,), (2,)), ((2, 2), (2, 3)))
      for make in (lambda s, n: ArraySpec("x", s, "int8", n),
                   lambda s, n: ActionPart("x", "discrete", n, s))),
    *((lambda d=d: ArraySpec("x", (), d, (2,)), f"x: categories of dtype {d}")
      for d in ("float32", "bool")),
    (lambda: ActionPart("x", "squashed", (2,)), "'x': 1 numbers of choices for a squashed one"),
    (lambda: ActionPart("x", "discrete"), "'x': 0 numbers of choices for a discrete one"),
    *((lambda spec=spec: ArraySpec("x", *spec, is_stack=True), "x: no stack of frames of bytes")
      for spec in (((4, 3, 5), "float32"), ((4,), "uint8"), ((2, 2), "uint8", (3, 3, 3, 3)))),
]  # fmt: skip


@pytest.mark.parametrize(("make", "says"), NO_ARRAYS)
def test_an_array_that_nobody_could_hold(make, says):
    with pytest.raises(SpacesError, match=says):
        make()


# -------------------- JSON, and differences


def test_golden_json_and_there_and_back():
    assert WIDE.to_json() == JSON
    assert Schema.from_json(JSON) == WIDE
    assert WIDE.digest.hex() == "1ee6428360f8e29cbe0e2b95b429906c"
    assert Schema.from_json(changed("obs.leaves.0.is_stack", True)).obs.leaves[0].is_stack
    whole = replace(STACKED, obs=ObsSpec((replace(STACK, is_stack=False), SCHEMA.obs.leaves[1])))
    assert STACKED.digest != whole.digest
    assert json.loads(TEAM.to_json())["policies"] == ["main", "past"]
    assert len({schema.digest for schema in SCHEMAS}) == len(SCHEMAS)
    for one in SCHEMAS:
        again = Schema.from_json(one.to_json())
        assert (again, again.digest, again.layout.leaves) == (one, one.digest, one.layout.leaves)
        assert one.difference(again, "here", "there") == "nothing differs"


DIFFERENCES = {
    "nothing differs": {},
    "rows: 3 here, 5 there": {"rows": 5},
    "state: absent here, () there; state.core.choices: () here, absent there; "
    "state.core.dtype: float64 here, absent there": {"state": ()},
    "obs.leaves.image.shape: (3, 5) here, (3, 6) there": {
        "obs": ObsSpec((ArraySpec("image", (3, 6), "uint8"), SCHEMA.obs.leaves[1]))
    },
    "action.parts.move.choices: (4,) here, (9,) there": {
        "action": ActionSpec((ActionPart("move", "discrete", (9,)), SCHEMA.action.parts[1]))
    },
}


def test_a_difference_names_field_and_both_values():
    for text, changes in DIFFERENCES.items():
        assert SCHEMA.difference(replace(SCHEMA, **changes), "here", "there") == text


def changed(path, value, of=JSON):
    """A schema with another value at a path, such as `obs.leaves.0.name`."""
    whole = json.loads(of)
    *folders, last = (int(key) if key.isdigit() else key for key in path.split("."))
    inner = whole
    for key in folders:
        inner = inner[key]
    inner[last] = value
    return json.dumps(whole).encode()


TEAM_LEAVES = json.loads(TEAM.to_json())["obs"]["leaves"]
PARTS, LEAVES, STATE = (json.loads(JSON)[key] for key in ("action", "obs", "state"))
WRONG_VALUES = {
    "rows": [0, -1, 1.0, True, "3", None, 2**31, [3], float("nan"), 2_000_000_000],
    "state.0.shape": [[0], [1.5], [True], ["2"], [[2]], None, 5, [2**31], [2**30] * 30],
    "state.0.dtype": ["object", "O", "float128", None, 5, ["float32"], {}],
    "state.0.name": [None, 5, ["x"], "a\nb", "\ud800", "\x1b[2J", "\0"],
    "state": [None, 5, [*STATE, *STATE]],
    "obs": [None, 5, []],
    "obs.leaves": [[], "abc", [None], LEAVES["leaves"][2:]],
    "obs.leaves.0.shape": [[1] * 31],
    "obs.leaves.0.is_stack": [1, "yes"],
    "obs.leaves.1.choices": [[0, 4], [3], None, 3, "ab"],
    "obs.leaves.1.dtype": ["float32"],
    "obs.leaves.1.name": ["image"],
    "obs.leaves.2.dtype": ["float32"],
    "obs.leaves.2.shape": [[6]],
    "action.parts": [[], None, PARTS["parts"][1:]],
    "action.parts.0.kind": ["box", None],
    "action.parts.0.name": ["a\rb", "push"],
    "action.parts.0.choices": [[0, 1], [2, -1], [2.0, 5], [True, 5], None, [2**31, 5], [2], [[2]]],
    "action.parts.1.shape": [[0], [-1], None, 3, [1] * 31],
    "action.parts.2.choices": [[2]],
    "action.legal": ["image", "nothing", "", 5, ["legal"], True],
    "policies": [["main", "past"], 5, [1, 2], None],
}  # fmt: skip
HOSTILE = [
    *(b"", b"{", b'{"rows": "\xff"}', b"[]", b"null", b"7", b"{}", b"[" * 100_000 + b"]" * 100_000),
    b'{"rows": ' + b"9" * 5000 + b"}",
    *(changed(path, value) for path, values in WRONG_VALUES.items() for value in values),
]


def test_what_is_no_schema_is_refused_in_a_line():
    for data in HOSTILE:
        with pytest.raises(SpacesError) as error:
            Schema.from_json(data)
        assert str(error.value).isprintable(), data[:200]
        assert 5 < len(str(error.value)) < 500, data[:200]


def test_a_schema_that_is_refused_is_told_why():
    for path, value, of, says in (
        ("obs", 5, JSON, "not a schema: obs: Input should be"),
        ("action.parts.0.choices", [2.5, 5], JSON, "action.parts.0.choices.0: Input should be"),
        ("policies", ["main", "past", "old"], JSON, "no leaf 'policy' says which of 3"),
        ("policies", ["main"], JSON, "the team has too few parts: 1"),
        ("policies", ["main", "main"], JSON, "two parts of one name"),
        ("obs.leaves", TEAM_LEAVES[1:], TEAM.to_json(), "nothing that a policy could see"),
    ):
        with pytest.raises(SpacesError, match=says):
            Schema.from_json(changed(path, value, of))


def test_a_mask_is_no_stack_of_frames():
    """Its rows are looked up by the numbers of rows, and a stack's frames are fewer or more."""
    leaves = ArraySpec("x", (), "float32"), ArraySpec("mask", (2, 2, 2), "uint8", is_stack=True)
    action = ActionSpec((ActionPart("", "discrete", (8,)),), "mask")
    with pytest.raises(SpacesError, match="'mask' is no mask of 8 actions"):
        Schema.from_json(Schema(ObsSpec(leaves), action, 3).to_json())


def test_a_schema_of_many_faults_is_left_at_the_first():
    for path in ("obs.leaves", "action.parts", "action.parts.0.choices", "state", "policies"):
        with pytest.raises(SpacesError, match=path) as error:
            Schema.from_json(changed(path, [{}] * 1000))
        assert error.value.__context__.error_count() < 5


def test_the_largest_number_of_dimensions_has_a_view():
    planes = Planes(Schema.from_json(changed("obs.leaves.0.shape", [1] * 30)), 2)
    assert planes.columns.obs["image"].ndim == 32


@pytest.mark.parametrize("path", WRONG_VALUES)
def test_anything_anywhere_is_a_schema_or_refused(path):
    for value in (*itertools.chain(*WRONG_VALUES.values()), {"": [{}]}, [[], {"a": 1}], 1e300):
        with contextlib.suppress(SpacesError):
            found = Schema.from_json(changed(path, value))
            assert Schema.from_json(found.to_json()) == found
