"""Column layouts byte by byte, and how two schemas differ."""

import math
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async import schema
from impala_async.errors import SpacesError
from impala_async.layout import Leaf
from impala_async.schema import (
    DTYPES,
    ActionKind,
    ActionPart,
    ActionSpec,
    ArraySpec,
    ObsSpec,
    Schema,
    recurrent_state,
)

SCHEMA = Schema(
    obs=ObsSpec((ArraySpec("image", (3, 5), "uint8"), ArraySpec("speed", (), "float32"))),
    action=ActionSpec((ActionPart("move", "discrete", (4,)), ActionPart("look", "discrete", (2,)))),
    rows=3,
    state=(ArraySpec("core", (2,), "float64"),),
)


# -------------------- layout


def test_golden_layout():
    layout = SCHEMA.layout
    assert layout.leaves == {
        # S = 4 rows of 15 bytes, aligned to 8; then 4 floats.
        "obs/image": Leaf("obs", 0, (4, 3, 5), "uint8"),
        "obs/speed": Leaf("obs", 64, (4,), "float32"),
        # State once per column; then T = 3 rows each.
        "state/core": Leaf("small", 0, (2,), "float64"),
        "log_prob": Leaf("small", 16, (3,), "float32"),
        "reward": Leaf("small", 32, (3,), "float32"),
        "action/move": Leaf("small", 48, (3,), "int32"),
        "action/look": Leaf("small", 64, (3,), "int32"),
        "terminated": Leaf("small", 80, (3,), "bool"),
        "truncated": Leaf("small", 88, (3,), "bool"),
        "mask": Leaf("small", 96, (3,), "bool"),
    }
    assert (layout.obs_bytes, layout.small_bytes, layout.column_bytes) == (128, 128, 256)


def test_golden_layout_of_a_stack():
    image = ArraySpec("image", (4, 3, 5), "uint8", is_stack=True)
    layout = replace(SCHEMA, obs=ObsSpec((image, *SCHEMA.obs.leaves[1:]))).layout
    # An empty frame, the four of row 0, and one for each of three rows.
    assert layout.leaves["obs/image"] == Leaf("obs", 0, (8, 3, 5), "uint8")
    assert layout.leaves["window/image"] == Leaf("obs", 120, (4, 4), "int32")
    assert layout.leaves["obs/speed"] == Leaf("obs", 184, (4,), "float32")


def test_only_a_schema_with_a_stack_says_so():
    image = ArraySpec("image", (4, 3, 5), "uint8", is_stack=True)
    stacked = replace(SCHEMA, obs=ObsSpec((image,)))
    assert b"is_stack" not in SCHEMA.to_json()
    assert Schema.from_json(stacked.to_json()) == stacked
    assert stacked.digest != replace(stacked, obs=ObsSpec((replace(image, is_stack=False),))).digest
    with pytest.raises(SpacesError, match="is_stack must be true or false"):
        Schema.from_json(stacked.to_json().replace(b'"is_stack":true', b'"is_stack":1'))


@pytest.mark.parametrize(
    "spec",
    [
        ("a", (4, 3, 5), "float32"),
        ("a", (4,), "uint8"),
        ("a", (2, 2), "uint8", (3, 3, 3, 3)),
    ],
)
def test_what_is_no_stack_of_frames(spec):
    ArraySpec(*spec)
    with pytest.raises(SpacesError, match="a: no stack of frames of bytes"):
        replace(ArraySpec(*spec), is_stack=True)


names = st.text(max_size=3).filter(str.isprintable)
shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)


@st.composite
def choices(draw, shape):
    """A number of choices for each item."""
    num_items = math.prod(shape)
    return tuple(draw(st.lists(st.integers(1, 9), min_size=num_items, max_size=num_items)))


@st.composite
def array_specs(draw):
    name, shape, dtype = draw(names), draw(shapes), draw(st.sampled_from(sorted(DTYPES)))
    is_category = not dtype.startswith("float") and draw(st.booleans())
    return ArraySpec(name, shape, dtype, draw(choices(shape)) if is_category else ())


@st.composite
def action_parts(draw):
    name, kind, shape = draw(names), draw(st.sampled_from(get_args(ActionKind))), draw(shapes)
    return ActionPart(name, kind, draw(choices(shape)) if kind == "discrete" else (), shape)


@st.composite
def schemas(draw):
    arrays = st.lists(array_specs(), max_size=4, unique_by=lambda array: array.name)
    leaves = draw(arrays.filter(len))
    parts = tuple(
        draw(st.lists(action_parts(), min_size=1, max_size=3, unique_by=lambda part: part.name))
    )
    action = ActionSpec(parts)
    if action.num_choices and draw(st.booleans()):
        action = ActionSpec(parts, "a mask")
        leaves.append(ArraySpec("a mask", (action.num_choices,), "int8"))
    return Schema(ObsSpec(tuple(leaves)), action, draw(st.integers(1, 9)), tuple(draw(arrays)))


@settings(deadline=None)
@given(schemas())
def test_every_leaf_has_its_rows_and_a_place(schema):
    rows, leaves = schema.rows, schema.layout.leaves
    for leaf in schema.obs.leaves:
        placed = leaves[f"obs/{leaf.name}"]
        assert placed[0] == "obs"
        assert placed[2:] == ((rows + 1, *leaf.shape), leaf.dtype)
    for part in schema.action.parts:
        dtype = "int32" if part.kind == "discrete" else "float32"
        placed = leaves[f"action/{part.name}"]
        assert placed[0] == "small"
        assert placed[2:] == ((rows, *part.shape), dtype)
    for array in schema.state:
        assert leaves[f"state/{array.name}"][2:] == (array.shape, array.dtype)
    num_leaves = len(schema.obs.leaves) + len(schema.action.parts) + len(schema.state)
    # Log-probability, reward and three flags are always there.
    assert len(leaves) == num_leaves + 5


# -------------------- arrays and parts


def test_an_array_is_counted():
    array = ArraySpec("x", (3, 4), "float16")
    assert (array.num_items, array.num_bytes, array.is_float) == (12, 24, True)
    assert ArraySpec("x", (), "bool").num_bytes == 1
    assert not ArraySpec("x", (), "bool").is_float


@pytest.mark.parametrize(
    ("part", "num_parameters", "dtype"),
    [
        (ActionPart("move", "discrete", (4,)), 4, "int32"),
        (ActionPart("move", "discrete", (4, 2, 3), (3,)), 9, "int32"),
        (ActionPart("move", "continuous", (), (2, 3)), 12, "float32"),
        (ActionPart("move", "squashed"), 2, "float32"),
    ],
)
def test_a_part_is_counted(part, num_parameters, dtype):
    assert part.num_parameters == num_parameters
    assert part.array == ArraySpec("move", part.shape, dtype)


def test_the_choices_of_an_action_are_those_of_its_discrete_parts():
    parts = (
        ActionPart("move", "discrete", (4,)),
        ActionPart("turn", "continuous", (), (2,)),
        ActionPart("look", "discrete", (2, 3), (2,)),
    )
    assert ActionSpec(parts).num_choices == 9


def test_the_mask_of_legal_actions_is_no_input():
    mask = ArraySpec("mask", (6,), "int8")
    obs = ObsSpec((SCHEMA.obs.leaves[0], mask, SCHEMA.obs.leaves[1]))
    schema = replace(SCHEMA, obs=obs, action=replace(SCHEMA.action, legal="mask"))
    assert schema.inputs == SCHEMA.obs
    assert SCHEMA.inputs == SCHEMA.obs


@pytest.mark.parametrize(
    ("core", "state"),
    [
        (None, ()),
        ("gru", (ArraySpec("hidden", (7,), "float32"),)),
        ("lstm", (ArraySpec("hidden", (7,), "float32"), ArraySpec("cell", (7,), "float32"))),
    ],
)
def test_the_state_of_a_core(core, state):
    assert recurrent_state(core, 7) == state


@pytest.mark.parametrize(("shape", "counts"), [((), (2, 3)), ((2,), (2,)), ((2, 2), (2, 3))])
def test_each_item_has_its_number_of_choices(
    shape: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    with pytest.raises(SpacesError, match=rf"lamp: {len(counts)} numbers of choices for shape"):
        ArraySpec("lamp", shape, "int8", counts)
    with pytest.raises(SpacesError, match=rf"lamp: {len(counts)} numbers of choices for shape"):
        ActionPart("lamp", "discrete", counts, shape)


def test_categories_are_no_floats_and_numbers_have_no_choices() -> None:
    with pytest.raises(SpacesError, match="lamp: categories of dtype float32"):
        ArraySpec("lamp", (), "float32", (2,))
    with pytest.raises(SpacesError, match="'lamp': a squashed one has no choices"):
        ActionPart("lamp", "squashed", (2,))
    with pytest.raises(SpacesError, match="lamp: 0 numbers of choices"):
        ActionPart("lamp", "discrete")


@pytest.mark.parametrize("dtype", ["float128", "complex64", "object", "<f4", "str", "uint32", ""])
def test_other_dtypes_are_unsupported(dtype: str) -> None:
    with pytest.raises(SpacesError, match=f"speed: unsupported dtype {dtype}"):
        ArraySpec("speed", (), dtype)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (-1,)])
def test_arrays_without_items_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SpacesError, match=r"speed: empty shape \("):
        ArraySpec("speed", shape, "float32")
    with pytest.raises(SpacesError, match=r"speed: empty shape \("):
        ActionPart("speed", "continuous", (), shape)


def one_leaf(size, rows):
    obs = ObsSpec((ArraySpec("", (size,), "uint8"),))
    return Schema(obs, ActionSpec((ActionPart("", "discrete", (2,)),)), rows)


def test_a_column_has_a_largest_size(monkeypatch):
    fitting = one_leaf(100, 9)
    assert schema.MAX_COLUMN_BYTES == 1 << 30
    monkeypatch.setattr(schema, "MAX_COLUMN_BYTES", fitting.layout.column_bytes)
    assert one_leaf(100, 9).layout.column_bytes == fitting.layout.column_bytes
    with pytest.raises(SpacesError, match=r"a column of 10 rows takes \d+ bytes.*trajectory\.rows"):
        _ = one_leaf(100, 10).layout
    with pytest.raises(SpacesError, match="lower trajectory"):
        Schema.from_json(one_leaf(100, 10).to_json())


# -------------------- differences


def replaced(**changes):
    fields = {key: getattr(SCHEMA, key) for key in ("obs", "action", "rows", "state")}
    return Schema(**{**fields, **changes})


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (replaced(), "nothing differs"),
        (replaced(rows=5), "rows: 3 here, 5 there"),
        (
            replaced(state=()),
            "state: absent here, () there; state.core.choices: () here, absent there; "
            "state.core.dtype: float64 here, absent there",
        ),
        (
            replaced(obs=ObsSpec((ArraySpec("image", (3, 6), "uint8"), SCHEMA.obs.leaves[1]))),
            "obs.leaves.image.shape: (3, 5) here, (3, 6) there",
        ),
        (
            replaced(
                action=ActionSpec((ActionPart("move", "discrete", (9,)), SCHEMA.action.parts[1]))
            ),
            "action.parts.move.choices: (4,) here, (9,) there",
        ),
    ],
)
def test_a_difference_names_field_and_both_values(other, text):
    assert SCHEMA.difference(other, "here", "there") == text


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"[" * 60_000, "not a schema: it is nested too deeply"),
        (b"9" * 5000, "not a schema: a number in it is too long"),
        (b"{}", "not a schema: it lacks 'obs'"),
    ],
)
def test_what_is_no_schema_is_told_without_a_word_about_python(data: bytes, says: str) -> None:
    with pytest.raises(SpacesError, match=f"^{says}$"):
        Schema.from_json(data)
