"""Column layouts byte by byte, and how two schemas differ."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async import spec
from impala_async.layout import Leaf
from impala_async.spec import (
    DTYPES,
    ActionPart,
    ActionSpec,
    ArraySpec,
    ObsSpec,
    Schema,
)

SCHEMA = Schema(
    obs=ObsSpec((ArraySpec("image", (3, 5), "uint8"), ArraySpec("speed", (), "float32"))),
    action=ActionSpec((ActionPart("move", "discrete", (4,)), ActionPart("look", "discrete", (2,)))),
    rows=3,
    state=(ArraySpec("core", (2,), "float64"),),
)


# -------------------- layout


def test_golden_layout() -> None:
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


names = st.text(max_size=3).filter(str.isprintable)
array_specs = st.builds(
    ArraySpec,
    names,
    st.lists(st.integers(1, 4), max_size=3).map(tuple),
    st.sampled_from(sorted(DTYPES)),
)
distinct_arrays = st.lists(array_specs, max_size=4, unique_by=lambda array: array.name)
parts = st.builds(ActionPart, names, st.just("discrete"), st.integers(1, 9))
schemas = st.builds(
    Schema,
    obs=distinct_arrays.filter(len).map(tuple).map(ObsSpec),
    action=st.lists(parts, min_size=1, max_size=3, unique_by=lambda part: part.name)
    .map(tuple)
    .map(ActionSpec),
    rows=st.integers(1, 9),
    state=distinct_arrays.map(tuple),
)


@settings(deadline=None)
@given(schemas, st.integers(1, 4))
def test_leaves_neither_overlap_nor_leave_their_column(schema: Schema, num_columns: int) -> None:
    layout = schema.layout
    obs = np.zeros((num_columns, layout.obs_bytes), np.uint8)
    small = np.zeros((num_columns, layout.small_bytes), np.uint8)
    assert layout.obs_bytes % 64 == layout.small_bytes % 64 == 0
    for number, (name, view) in enumerate(layout.views(obs, small).items(), start=1):
        leaf = layout.leaves[name]
        assert leaf.offset % 8 == 0
        assert view.shape == (num_columns, *leaf.shape)
        assert view.dtype == leaf.dtype
        assert view.flags.aligned
        plane = obs if leaf.plane == "obs" else small
        before = plane.copy()
        assert np.shares_memory(view, plane)
        touched = view.view(np.uint8) if view.ndim > 1 else view[..., None].view(np.uint8)
        assert not touched.any(), "somebody wrote here before"
        touched[...] = number
        changed = (plane != before).sum(axis=1)
        assert changed.tolist() == [view[0].nbytes] * num_columns


def test_views_of_some_columns_of_a_slot() -> None:
    layout = SCHEMA.layout
    obs = np.zeros((6, layout.obs_bytes), np.uint8)
    small = np.zeros((6, layout.small_bytes), np.uint8)
    layout.views(obs[2:4], small[2:4])["reward"][1] = (1.0, 2.0, 3.0)
    assert layout.views(obs, small)["reward"][3].tolist() == [1.0, 2.0, 3.0]
    assert not small[[0, 1, 2, 4, 5]].any()


def test_an_array_is_counted() -> None:
    array = ArraySpec("x", (3, 4), "float16")
    assert (array.num_items, array.num_bytes, array.is_float) == (12, 24, True)
    assert ArraySpec("x", (), "bool").num_bytes == 1
    assert not ArraySpec("x", (), "bool").is_float
    assert ActionPart("move", "discrete", (4,)).array == ArraySpec("move", (), "int32")


@pytest.mark.parametrize("dtype", ["float128", "complex64", "object", "<f4", "str", "uint32", ""])
def test_other_dtypes_are_unsupported(dtype: str) -> None:
    with pytest.raises(ValueError, match=f"speed: unsupported dtype {dtype}"):
        ArraySpec("speed", (), dtype)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (-1,)])
def test_arrays_without_items_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"speed: empty shape \("):
        ArraySpec("speed", shape, "float32")


def one_leaf(size: int, rows: int) -> Schema:
    obs = ObsSpec((ArraySpec("", (size,), "uint8"),))
    return Schema(obs, ActionSpec((ActionPart("", "discrete", (2,)),)), rows)


def test_a_column_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = one_leaf(100, 9)
    assert spec.MAX_COLUMN_BYTES == 1 << 30
    monkeypatch.setattr(spec, "MAX_COLUMN_BYTES", fitting.layout.column_bytes)
    assert one_leaf(100, 9).layout.column_bytes == fitting.layout.column_bytes
    with pytest.raises(ValueError, match=r"a column of 10 rows takes \d+ bytes.*trajectory\.rows"):
        _ = one_leaf(100, 10).layout
    with pytest.raises(ValueError, match="lower trajectory"):
        Schema.from_json(one_leaf(100, 10).to_json())


# -------------------- differences


def replaced(**changes: Any) -> Schema:
    fields = {key: getattr(SCHEMA, key) for key in ("obs", "action", "rows", "state")}
    return Schema(**{**fields, **changes})


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (replaced(), "nothing differs"),
        (replaced(rows=5), "rows: 3 here, 5 there"),
        (
            replaced(state=()),
            "state: absent here, () there; state.core.dtype: float64 here, absent there; "
            "state.core.name: core here, absent there",
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
def test_a_difference_names_field_and_both_values(other: Schema, text: str) -> None:
    assert SCHEMA.difference(other) == text
