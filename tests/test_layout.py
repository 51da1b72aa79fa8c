"""Leaves lie where the layout says, and nowhere else."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.layout import ColumnLayout, Leaf

dtypes = st.sampled_from(["bool", "uint8", "int16", "float16", "int32", "float32", "float64"])
shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@st.composite
def layouts(draw):
    names = draw(st.lists(st.text(max_size=3), min_size=1, max_size=9, unique=True))
    places = [(name, draw(shapes), draw(dtypes)) for name in names]
    cut = draw(st.integers(0, len(places)))
    return ColumnLayout(places[:cut], places[cut:])


def test_places_follow_each_other_aligned():
    layout = ColumnLayout([("a", (3, 5), "uint8"), ("b", (), "float64")], [("c", (9,), "int32")])
    assert layout.leaves == {
        "a": Leaf("obs", 0, (3, 5), "uint8"),
        "b": Leaf("obs", 16, (), "float64"),
        "c": Leaf("small", 0, (9,), "int32"),
    }
    assert (layout.obs_bytes, layout.small_bytes, layout.column_bytes) == (64, 64, 128)


@settings(deadline=None)
@given(layouts(), st.integers(1, 4))
def test_leaves_neither_overlap_nor_leave_their_column(layout, num_columns):
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


def test_views_of_some_columns_of_a_slot():
    layout = ColumnLayout([("obs", (4,), "float32")], [("reward", (3,), "float32")])
    obs = np.zeros((6, layout.obs_bytes), np.uint8)
    small = np.zeros((6, layout.small_bytes), np.uint8)
    layout.views(obs[2:4], small[2:4])["reward"][1] = (1.0, 2.0, 3.0)
    assert layout.views(obs, small)["reward"][3].tolist() == [1.0, 2.0, 3.0]
    assert not small[[0, 1, 2, 4, 5]].any()
