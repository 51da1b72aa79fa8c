"""Columns are views, and no fault of theirs reaches the learner."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema
from impala_async.trajectory import (
    LARGEST,
    LOG_PROB_SLACK,
    Columns,
    Fault,
    columns_over,
    find_fault,
    find_padding_fault,
)

NUM_COLUMNS, NUM_ROWS = 3, 4
SCHEMA = Schema(
    obs=ObsSpec(
        (
            ArraySpec("position", (2,), "float32"),
            ArraySpec("far", (), "float64"),
            ArraySpec("near", (3,), "float16"),
            ArraySpec("pixels", (2, 2), "uint8"),
            ArraySpec("lamp", (), "bool"),
        )
    ),
    action=ActionSpec((ActionPart("move", "discrete", (4,)), ActionPart("look", "discrete", (1,)))),
    rows=NUM_ROWS,
    state=(ArraySpec("core", (2,), "float32"), ArraySpec("gate", (2,), "bool")),
)
# A column in the middle of a slot, a row in the middle of the trajectory.
HERE = (1, 2)
PLANES = ("obs", "small")


@pytest.fixture
def columns() -> Columns:
    """Without a fault, in the middle of larger planes."""
    layout = SCHEMA.layout
    obs = np.zeros((NUM_COLUMNS + 2, layout.obs_bytes), np.uint8)
    small = np.zeros((NUM_COLUMNS + 2, layout.small_bytes), np.uint8)
    columns = columns_over(SCHEMA, obs[1:-1], small[1:-1])
    columns.mask_CT[:] = True
    columns.log_probs_CT[:] = -0.5
    columns.actions["move"][:] = 3
    columns.obs["position"][:] = 1.5
    return columns


def test_leaves_by_group_and_shape(columns: Columns) -> None:
    C, S, T = NUM_COLUMNS, NUM_ROWS + 1, NUM_ROWS
    assert {name: array.shape for name, array in columns.obs.items()} == {
        "position": (C, S, 2),
        "far": (C, S),
        "near": (C, S, 3),
        "pixels": (C, S, 2, 2),
        "lamp": (C, S),
    }
    assert {name: array.shape for name, array in columns.actions.items()} == {
        "move": (C, T),
        "look": (C, T),
    }
    assert {name: array.shape for name, array in columns.state.items()} == {
        "core": (C, 2),
        "gate": (C, 2),
    }
    for array, dtype in (
        (columns.rewards_CT, np.float32),
        (columns.log_probs_CT, np.float32),
        (columns.terminated_CT, np.bool_),
        (columns.truncated_CT, np.bool_),
        (columns.mask_CT, np.bool_),
        (columns.actions["move"], np.int32),
        (columns.obs["near"], np.float16),
    ):
        assert array.dtype == dtype
        assert len(array) == C


def test_leaves_are_views_of_the_planes() -> None:
    layout = SCHEMA.layout
    obs = np.zeros((NUM_COLUMNS, layout.obs_bytes), np.uint8)
    small = np.zeros((NUM_COLUMNS, layout.small_bytes), np.uint8)
    columns = columns_over(SCHEMA, obs, small)
    assert all(np.shares_memory(array, obs) for array in columns.obs.values())
    for array in (*columns.actions.values(), *columns.state.values(), columns.mask_CT):
        assert np.shares_memory(array, small)
    columns.rewards_CT[1] = 1.0
    assert small[1].any()
    assert not small[[0, 2]].any()


def reason_of(fault: Fault | None) -> str | None:
    return None if fault is None else fault.reason


def test_good_columns_have_no_fault(columns: Columns) -> None:
    assert find_fault(SCHEMA, columns) is None


def spoil(name: str, value: Any) -> Callable[[Columns], None]:
    """Write one bad value; bytes for what the dtype does not let through."""

    def write(columns: Columns) -> None:
        group, _, leaf = name.partition("/")
        array = getattr(columns, group)[leaf] if leaf else getattr(columns, group)
        if array.dtype == np.bool_:
            array = array.view(np.uint8)
        place = HERE if array.ndim > 1 and array.shape[1] > HERE[1] else (HERE[0], 1)
        array[place] = value

    return write


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name",
    ["obs/position", "obs/far", "obs/near", "state/core", "rewards_CT", "log_probs_CT"],
)
def test_nonfinite(columns: Columns, name: str, value: float) -> None:
    spoil(name, value)(columns)
    assert reason_of(find_fault(SCHEMA, columns)) == "nonfinite"


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("rewards_CT", np.nan, "a reward is not finite"),
        ("rewards_CT", 1e38, "a reward is beyond 1e+15"),
        ("rewards_CT", -1e16, "a reward is beyond 1e+15"),
        ("log_probs_CT", 1.0, "the log-probability of an action is above 0"),
        ("obs/far", np.inf, "the observation 'far' is not finite"),
        ("state/core", np.nan, "the state 'core' is not finite"),
        ("actions/move", -1, "the action 'move' is none of its choices"),
        ("mask_CT", 2, "mask has a flag that is neither 0 nor 1"),
    ],
)
def test_a_fault_says_what_was_found(columns: Columns, name: str, value: float, what: str) -> None:
    spoil(name, value)(columns)
    fault = find_fault(SCHEMA, columns)
    assert fault is not None
    assert fault.what == what


@pytest.mark.parametrize("name", ["position", "far", "near"])
def test_nonfinite_bootstrap_row(columns: Columns, name: str) -> None:
    columns.obs[name][-1, -1] = np.nan
    assert reason_of(find_fault(SCHEMA, columns)) == "nonfinite"


@pytest.mark.parametrize("value", [4, 5, 2**31 - 1, -1, -(2**31)])
def test_action_out_of_range(columns: Columns, value: int) -> None:
    spoil("actions/move", value)(columns)
    assert reason_of(find_fault(SCHEMA, columns)) == "invalid"


@pytest.mark.parametrize("value", [0, 1, 2, 3])
def test_action_in_range(columns: Columns, value: int) -> None:
    columns.actions["move"][:] = value
    assert find_fault(SCHEMA, columns) is None


def test_each_part_of_an_action_has_its_own_range(columns: Columns) -> None:
    spoil("actions/look", 1)(columns)
    assert reason_of(find_fault(SCHEMA, columns)) == "invalid"


def test_a_masked_row_must_hold_a_legal_action(columns: Columns) -> None:
    columns.mask_CT[HERE] = False
    columns.actions["move"][HERE] = 4
    assert reason_of(find_fault(SCHEMA, columns)) == "invalid"


@pytest.mark.parametrize("value", [2, 3, 128, 255])
@pytest.mark.parametrize(
    "name", ["mask_CT", "terminated_CT", "truncated_CT", "obs/lamp", "state/gate"]
)
def test_flags_that_are_neither_zero_nor_one(columns: Columns, name: str, value: int) -> None:
    spoil(name, value)(columns)
    assert reason_of(find_fault(SCHEMA, columns)) == "invalid"


@pytest.mark.parametrize("name", ["mask_CT", "terminated_CT", "truncated_CT", "obs/lamp"])
@pytest.mark.parametrize("value", [0, 1])
def test_flags_that_are(columns: Columns, name: str, value: int) -> None:
    columns.mask_CT[:, HERE[1] + 1] = False
    spoil(name, value)(columns)
    assert find_fault(SCHEMA, columns) is None


@pytest.mark.parametrize("flag", ["terminated_CT", "truncated_CT"])
def test_the_row_after_the_end_of_an_episode_is_masked(columns: Columns, flag: str) -> None:
    ends = getattr(columns, flag)
    ends[HERE] = True
    fault = find_fault(SCHEMA, columns)
    assert fault == ("invalid", "the row after the end of an episode is not masked")
    columns.mask_CT[HERE[0], HERE[1] + 1] = False
    assert find_fault(SCHEMA, columns) is None
    # That of the last row is the first of the next trajectory.
    ends[0, -1] = True
    assert find_fault(SCHEMA, columns) is None


@pytest.mark.parametrize("flag", ["terminated_CT", "truncated_CT"])
def test_no_episode_ends_in_a_masked_row(columns: Columns, flag: str) -> None:
    columns.mask_CT[HERE] = False
    assert find_fault(SCHEMA, columns) is None
    getattr(columns, flag)[HERE] = True
    assert find_fault(SCHEMA, columns) == ("invalid", "an episode ends in a masked row")


@pytest.mark.parametrize("plane", ["obs", "small"])
def test_what_lies_between_arrays_is_zero(plane: Any) -> None:
    """Flags at other offsets than ours fall between ours."""
    layout = SCHEMA.layout
    planes = {name: np.zeros((2, getattr(layout, f"{name}_bytes")), np.uint8) for name in PLANES}
    gaps = layout.gaps(plane)
    assert len(gaps) > 2
    for leaf in columns_over(SCHEMA, **planes).obs.values():
        leaf.view(np.uint8).fill(0xFF)
    assert find_padding_fault(SCHEMA, **planes) is None
    for at in (at for gap in gaps for at in (gap.start, gap.stop - 1)):
        planes[plane][1, at] = 1
        assert reason_of(find_padding_fault(SCHEMA, **planes)) == "invalid"
        planes[plane][1, at] = 0


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (0.0, None),
        (-0.0, None),
        (-1e30, None),
        (LOG_PROB_SLACK, None),
        (LOG_PROB_SLACK * 1.01, "invalid"),
        (0.1, "invalid"),
    ],
)
def test_log_probability_may_exceed_zero_by_rounding_only(
    columns: Columns, value: float, fault: str | None
) -> None:
    columns.log_probs_CT[HERE] = value
    assert reason_of(find_fault(SCHEMA, columns)) == fault


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 5.0])
@pytest.mark.parametrize("name", ["rewards_CT", "log_probs_CT"])
def test_masked_rows_are_not_looked_at(columns: Columns, name: str, value: float) -> None:
    columns.mask_CT[HERE] = False
    spoil(name, value)(columns)
    assert find_fault(SCHEMA, columns) is None
    # The neighbours are.
    columns.mask_CT[HERE] = True
    columns.mask_CT[:, HERE[1] + 1] = False
    expected = None if name == "rewards_CT" and value == 5.0 else "a fault"
    assert (find_fault(SCHEMA, columns) and "a fault") == expected


def test_observations_of_masked_rows_are(columns: Columns) -> None:
    columns.mask_CT[HERE] = False
    columns.obs["position"][HERE] = np.nan
    assert reason_of(find_fault(SCHEMA, columns)) == "nonfinite"


def test_columns_without_a_valid_row_have_no_fault(columns: Columns) -> None:
    columns.mask_CT[:] = False
    columns.rewards_CT[:] = np.nan
    columns.log_probs_CT[:] = np.inf
    assert find_fault(SCHEMA, columns) is None


def test_large_but_finite_numbers_pass(columns: Columns) -> None:
    columns.rewards_CT[:] = -LARGEST
    columns.obs["far"][:] = LARGEST
    columns.obs["pixels"][:] = 255
    assert find_fault(SCHEMA, columns) is None


def test_an_observation_that_float32_cannot_square_is_none(columns: Columns) -> None:
    columns.obs["far"][HERE] = np.finfo(np.float64).max
    fault = find_fault(SCHEMA, columns)
    assert fault == ("nonfinite", "the observation 'far' is beyond 1e+15")


def test_any_garbage_has_a_verdict() -> None:
    layout = SCHEMA.layout
    rng = np.random.default_rng(0)
    verdicts = set()
    for _ in range(200):
        obs = rng.integers(0, 256, (2, layout.obs_bytes), np.uint8)
        small = rng.integers(0, 256, (2, layout.small_bytes), np.uint8)
        verdicts.add(reason_of(find_fault(SCHEMA, columns_over(SCHEMA, obs, small))))
    assert verdicts == {"invalid"}


# -------------------- categories, numbers, and masks of legal actions

WIDE = Schema(
    obs=ObsSpec(
        (
            ArraySpec("lamp", (), "uint8", (3,)),
            ArraySpec("cards", (2, 2), "int64", (4, 4, 4, 4)),
            ArraySpec("dials", (2,), "int16", (5, 9)),
            ArraySpec("legal", (7,), "int8"),
        )
    ),
    action=ActionSpec(
        (
            ActionPart("move", "discrete", (2, 5), (2,)),
            ActionPart("push", "continuous", (), (2,)),
            ActionPart("turn", "squashed"),
        ),
        legal="legal",
    ),
    rows=NUM_ROWS,
    state=(ArraySpec("hidden", (2,), "float32"),),
)


def columns_of(schema: Schema) -> Columns:
    """Zeros throughout, which is within every range, and everything legal."""
    layout = schema.layout
    obs = np.zeros((NUM_COLUMNS, layout.obs_bytes), np.uint8)
    small = np.zeros((NUM_COLUMNS, layout.small_bytes), np.uint8)
    columns = columns_over(schema, obs, small)
    columns.mask_CT[:] = True
    if schema.action.legal is not None:
        columns.obs[schema.action.legal][:] = 1
    return columns


@pytest.fixture
def wide() -> Columns:
    return columns_of(WIDE)


@pytest.mark.parametrize(
    ("name", "place", "num_choices"),
    [
        ("obs/lamp", (), 3),
        *[("obs/cards", (i, j), 4) for i in (0, 1) for j in (0, 1)],
        ("obs/dials", (0,), 5),
        ("obs/dials", (1,), 9),
        ("actions/move", (0,), 2),
        ("actions/move", (1,), 5),
    ],
)
def test_each_category_has_its_own_range(
    wide: Columns, name: str, place: tuple[int, ...], num_choices: int
) -> None:
    group, _, leaf = name.partition("/")
    array = getattr(wide, group)[leaf]
    for row in (0, HERE[1], array.shape[1] - 1):
        array[(HERE[0], row, *place)] = num_choices - 1
        assert find_fault(WIDE, wide) is None
        for value in (num_choices, np.iinfo(array.dtype).max, np.iinfo(array.dtype).min):
            if 0 <= value < num_choices:
                continue
            array[(HERE[0], row, *place)] = value
            assert reason_of(find_fault(WIDE, wide)) == "invalid", value
        array[(HERE[0], row, *place)] = 0


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(["lamp", "cards", "dials"]),
    st.integers(0, NUM_COLUMNS - 1),
    st.integers(0, NUM_ROWS),
    st.integers(0, 3),
    st.integers(-130, 130),
)
def test_a_category_is_an_index_or_it_is_invalid(
    name: str, column: int, row: int, item: int, value: int
) -> None:
    columns = columns_of(WIDE)
    leaf = next(leaf for leaf in WIDE.obs.leaves if leaf.name == name)
    item %= leaf.num_items
    items = columns.obs[name][column, row : row + 1].reshape(-1)
    assert np.shares_memory(items, columns.obs[name])
    items[item] = np.array(value).astype(leaf.dtype)
    is_index = 0 <= int(items[item]) < leaf.choices[item]
    assert reason_of(find_fault(WIDE, columns)) == (None if is_index else "invalid")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["push", "turn"])
def test_numbers_of_an_action_are_finite(wide: Columns, part: str, value: float) -> None:
    wide.actions[part][HERE] = value
    assert reason_of(find_fault(WIDE, wide)) == "nonfinite"
    wide.actions[part][HERE] = 1e12
    assert find_fault(WIDE, wide) is None, "beyond the space is fine: they are clipped later"
    wide.actions[part][HERE] = -1e30
    assert find_fault(WIDE, wide) == Fault("nonfinite", f"the action {part!r} is beyond 1e+15")


@pytest.mark.parametrize("part", ["push", "turn"])
def test_in_masked_rows_too(wide: Columns, part: str) -> None:
    wide.mask_CT[HERE] = False
    wide.actions[part][HERE] = np.nan
    assert reason_of(find_fault(WIDE, wide)) == "nonfinite"


@pytest.mark.parametrize("kind", ["discrete", "continuous", "squashed"])
def test_only_a_density_may_be_above_one(kind: Any) -> None:
    parts = (
        ActionPart("move", "discrete", (2,)),
        ActionPart("more", kind, (2,) if kind == "discrete" else ()),
    )
    schema = Schema(ObsSpec((ArraySpec("", (), "float32"),)), ActionSpec(parts), NUM_ROWS)
    columns = columns_of(schema)
    columns.log_probs_CT[HERE] = 25.0
    assert reason_of(find_fault(schema, columns)) == ("invalid" if kind == "discrete" else None)
    columns.log_probs_CT[HERE] = np.inf
    assert reason_of(find_fault(schema, columns)) == "nonfinite"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_states_are_finite(wide: Columns, value: float) -> None:
    wide.state["hidden"][1, 1] = value
    assert reason_of(find_fault(WIDE, wide)) == "nonfinite"


@pytest.mark.parametrize(
    ("legal", "chosen", "is_fine"),
    [
        ([1, 1, 1, 1, 1, 1, 1], (1, 4), True),
        ([0, 1, 0, 0, 1, 0, 0], (1, 2), True),
        # Any number but 0 is a flag that is set.
        ([0, 2, 0, 0, -1, 0, 0], (1, 2), True),
        ([1, 0, 1, 1, 1, 1, 1], (1, 4), False),
        ([1, 1, 1, 1, 1, 1, 0], (1, 4), False),
        ([0, 0, 1, 1, 1, 1, 1], (0, 0), False),
        ([1, 1, 0, 0, 0, 0, 0], (0, 0), False),
        ([0, 0, 0, 0, 0, 0, 0], (0, 0), False),
    ],
)
def test_what_was_chosen_must_be_legal_where_it_counts(
    wide: Columns, legal: list[int], chosen: tuple[int, int], is_fine: bool
) -> None:
    wide.obs["legal"][HERE] = legal
    wide.actions["move"][HERE] = chosen
    assert reason_of(find_fault(WIDE, wide)) == (None if is_fine else "invalid")
    wide.mask_CT[HERE] = False
    assert find_fault(WIDE, wide) is None


@pytest.mark.parametrize(
    ("legal", "says"),
    [
        ([0, 0, 0, 0, 0, 0, 0], "'legal' has a row where an action is chosen and none is legal"),
        # One of the two items has none.
        ([0, 0, 1, 1, 1, 1, 1], "'legal' has a row where an action is chosen and none is legal"),
        ([1, 1, 0, 0, 0, 0, 0], "'legal' has a row where an action is chosen and none is legal"),
        ([0, 1, 0, 1, 1, 1, 1], "an action is chosen that 'legal' forbids"),
    ],
)
def test_a_mask_without_a_legal_action_is_told_from_a_forbidden_choice(
    wide: Columns, legal: list[int], says: str
) -> None:
    wide.obs["legal"][HERE] = legal
    wide.actions["move"][HERE] = (0, 0)
    # Where nothing is chosen nothing need be legal, and it must not be taken for the cause.
    wide.obs["legal"][0, 1], wide.mask_CT[0, 1] = 0, False
    assert find_fault(WIDE, wide) == ("invalid", says)


def test_nothing_need_be_legal_in_the_bootstrap_row(wide: Columns) -> None:
    wide.obs["legal"][:, -1] = 0
    assert find_fault(WIDE, wide) is None


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_random_masks_are_judged_row_by_row(seed: int) -> None:
    columns, rng = columns_of(WIDE), np.random.default_rng(seed)
    legal = rng.random(columns.obs["legal"].shape) < 0.8
    columns.obs["legal"][:] = legal
    move = columns.actions["move"]
    move[:] = rng.integers(0, (2, 5), size=move.shape)
    columns.mask_CT[:] = rng.random(columns.mask_CT.shape) < 0.3
    is_fine = all(
        legal[c, t, move[c, t, 0]] and legal[c, t, 2 + move[c, t, 1]]
        for c, t in zip(*np.nonzero(columns.mask_CT), strict=True)
    )
    assert reason_of(find_fault(WIDE, columns)) == (None if is_fine else "invalid")


@pytest.mark.parametrize("value", [-1, 8, 2**31 - 1])
def test_a_window_shows_frames_that_are_there(value: int) -> None:
    image = ArraySpec("image", (4, 3, 5), "uint8", is_stack=True)
    schema = Schema(ObsSpec((image,)), ActionSpec((ActionPart("", "discrete", (2,)),)), rows=3)
    planes = (np.zeros((2, schema.layout.obs_bytes), np.uint8),
              np.zeros((2, schema.layout.small_bytes), np.uint8))  # fmt: skip
    columns = columns_over(schema, *planes)
    columns.windows["image"][1, 3, 2] = 7
    assert find_fault(schema, columns) is None
    columns.windows["image"][1, 3, 2] = value
    fault = find_fault(schema, columns)
    assert fault == ("invalid", "the window of observation 'image' shows no frame of it")
