"""Columns are views of their planes, and no fault of theirs reaches the learner."""

from dataclasses import replace

import numpy as np
import pytest

from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema
from impala_async.trajectory import LARGEST, LOG_PROB_SLACK, ColumnChecks, columns_over
from tests import test_schema

NUM_COLUMNS, NUM_ROWS = 3, 4
SCHEMA = Schema(
    obs=ObsSpec(
        (
            ArraySpec("position", (2,), "float32"),
            ArraySpec("far", (), "float64"),
            ArraySpec("near", (3,), "float16"),
            ArraySpec("count", (2,), "int64"),
            ArraySpec("pixels", (2, 2), "uint8"),
            ArraySpec("lamp", (), "bool"),
        )
    ),
    action=ActionSpec((ActionPart("move", "discrete", (4,)), ActionPart("look", "discrete", (1,)))),
    rows=NUM_ROWS,
    state=(ArraySpec("core", (2,), "float32"), ArraySpec("gate", (2,), "bool")),
)
WIDE = replace(
    test_schema.WIDE,
    obs=ObsSpec(
        (
            ArraySpec("lamp", (), "uint8", (3,)),
            ArraySpec("cards", (2, 2), "int64", (4, 4, 4, 4)),
            ArraySpec("dials", (2,), "int16", (5, 9)),
            ArraySpec("image", (4, 3, 5), "uint8", is_stack=True),
            ArraySpec("legal", (7,), "int8"),
        )
    ),
    rows=NUM_ROWS,
)
# A column in the middle of a slot, a row in the middle of the trajectory.
HERE = (1, 2)
FLAGS = "a flag is neither 0 nor 1, or what lies between its arrays is not zero"


class Message:
    """Columns without a fault, in the middle of larger planes."""

    def __init__(self, schema):
        layout = schema.layout
        self.schema = schema
        self.obs = np.zeros((NUM_COLUMNS + 2, layout.obs_bytes), np.uint8)[1:-1]
        self.small = np.zeros((NUM_COLUMNS + 2, layout.small_bytes), np.uint8)[1:-1]
        self.columns = columns_over(schema, self.obs, self.small)
        self.columns.mask_CT[:] = True
        self.columns.log_probs_CT[:] = -0.5
        if schema.action.legal is not None:
            self.columns.obs[schema.action.legal][:] = 1

    def __getitem__(self, name):
        """An array of the columns, as `mask_CT` or `obs/lamp`; flags as the bytes that they are."""
        group, _, leaf = name.partition("/")
        array = getattr(self.columns, group)
        array = array[leaf] if "/" in name else array
        return array.view(np.uint8) if array.dtype == np.bool_ else array

    @property
    def fault(self):
        return ColumnChecks(self.schema).find_fault(self.obs, self.small)

    @property
    def reason(self):
        return None if self.fault is None else self.fault[0]


@pytest.fixture
def plain():
    return Message(SCHEMA)


@pytest.fixture
def wide():
    return Message(WIDE)


def test_leaves_are_views_of_the_planes_by_group_and_shape(plain, wide):
    columns = plain.columns
    C, S, T = NUM_COLUMNS, NUM_ROWS + 1, NUM_ROWS
    groups = (columns.obs, columns.actions, columns.state, wide.columns.windows)
    position = {"position": (C, S, 2), "far": (C, S), "near": (C, S, 3), "count": (C, S, 2)}
    assert [{name: array.shape for name, array in group.items()} for group in groups] == [
        {**position, "pixels": (C, S, 2, 2), "lamp": (C, S)},
        {"move": (C, T), "look": (C, T)},
        {"core": (C, 2), "gate": (C, 2)},
        {"image": (C, S, 4)},
    ]
    views = SCHEMA.layout.views(plain.obs, plain.small)
    for array, name in (
        (columns.obs["far"], "obs/far"),
        (columns.state["gate"], "state/gate"),
        (columns.actions["move"], "action/move"),
        (columns.rewards_CT, "reward"),
        (columns.log_probs_CT, "log_prob"),
        (columns.terminated_CT, "terminated"),
        (columns.truncated_CT, "truncated"),
        (columns.mask_CT, "mask"),
    ):
        assert array.dtype == views[name].dtype
        assert np.shares_memory(array, views[name])


def test_good_columns_have_no_fault(plain, wide):
    assert plain.fault is wide.fault is None
    plain["actions/move"][:] = 3
    plain["rewards_CT"][:], plain["obs/far"][:] = -LARGEST, LARGEST
    plain["obs/near"][:], plain["obs/pixels"][:] = np.finfo(np.float16).max, 255
    plain["obs/count"][:] = [10**15, -(10**15)]
    plain["log_probs_CT"][:] = [-1e30, -0.0, 0.0, LOG_PROB_SLACK]
    for flag in ("obs/lamp", "state/gate"):
        plain[flag][:] = 1
    # Numbers beyond the space are fine: they are clipped later.
    wide["actions/push"][:] = 1e12
    assert plain.fault is wide.fault is None


BEYOND = [*("rewards_CT", "obs/position", "obs/far", "state/core")]
NAMES = {
    **{"rewards_CT": "a reward", "log_probs_CT": "the log-probability of an action"},
    **{f"obs/{name}": f"the observation '{name}'" for name in ("position", "far", "near", "count")},
    **{f"actions/{name}": f"the action '{name}'" for name in ("push", "turn")},
    "state/core": "the state 'core'",
}
ONE_VALUE = [
    *((name, value, f"{NAMES[name]} is not finite")
      for name in [*BEYOND, "log_probs_CT", "obs/near", "actions/push", "actions/turn"]
      for value in (np.nan, np.inf, -np.inf)),
    *((name, value, f"{NAMES[name]} is beyond 1e+15")
      for name in [*BEYOND, "actions/push", "actions/turn"] for value in (1e38, -1.1e15)),
    *(("obs/count", value, f"{NAMES['obs/count']} is beyond 1e+15")
      for value in (10**15 + 1, 2**63 - 1, -(2**63))),
    ("obs/far", np.finfo(np.float64).max, "the observation 'far' is beyond 1e+15"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "what"), ONE_VALUE)
def test_a_number_that_nothing_is_learned_from(name, value, what):
    message = Message(WIDE if name.startswith("actions") else SCHEMA)
    places = [HERE if message[name].ndim == 2 and "state" not in name else (*HERE, 0)]
    if "state" in name:
        places = [(1, 1)]
    elif name.startswith("obs"):
        places += [(-1, -1), (0, 0)]
    for place in places:
        before = message[name][place].copy()
        message[name][place] = value
        assert message.fault == ("nonfinite", what), place
        message[name][place] = before


@pytest.mark.parametrize("plane", ["obs", "small"])
def test_flags_are_zero_or_one_and_what_lies_between_arrays_is_zero(plain, plane):
    """Flags at other offsets than ours fall between ours."""
    for name in ("mask_CT", "terminated_CT", "truncated_CT", "obs/lamp", "state/gate"):
        before = int(plain[name][1, 1])
        for value in (2, 3, 128, 255):
            plain[name][1, 1] = value
            assert plain.fault == ("invalid", FLAGS)
        plain[name][1, 1] = before
    bytes_of = getattr(plain, plane)
    is_gap = np.ones(bytes_of.shape[1], np.bool_)
    for leaf in SCHEMA.layout.leaves.values():
        is_gap[leaf.stretch] &= leaf.plane != plane
    assert is_gap.sum() > 8
    for at in np.flatnonzero(is_gap):
        bytes_of[1, at] = 1
        assert plain.fault == ("invalid", FLAGS)
        bytes_of[1, at] = 0
    assert plain.fault is None


@pytest.mark.parametrize("flag", ["terminated_CT", "truncated_CT"])
def test_the_row_after_the_end_of_an_episode_is_masked_and_ends_none(plain, flag):
    column, row = HERE
    plain[flag][HERE] = 1
    assert plain.fault == ("invalid", "the row after the end of an episode is not masked")
    plain["mask_CT"][column, row + 1] = 0
    # The row after the last one is the first of the next trajectory.
    plain[flag][0, -1] = 1
    assert plain.fault is None
    plain[flag][column, row + 1] = 1
    assert plain.fault == ("invalid", "an episode ends in a masked row")


def test_rewards_and_log_probabilities_of_masked_rows_are_not_looked_at():
    for name, value, is_looked_at in (
        *(("rewards_CT", value, False) for value in (np.nan, np.inf, 1e38)),
        *(("log_probs_CT", value, False) for value in (np.nan, -np.inf, 5.0)),
        *(
            ("obs/position", np.nan, True),
            ("actions/move", 4, True),
            ("actions/push", np.nan, True),
        ),
    ):
        message = Message(WIDE if name == "actions/push" else SCHEMA)
        message[name][HERE] = value
        assert message.fault is not None, (name, value)
        message["mask_CT"][HERE] = 0
        assert (message.fault is not None) == is_looked_at, (name, value)
        message["mask_CT"][:] = 0
        assert (message.fault is not None) == is_looked_at, "no valid row at all"
        message["mask_CT"][HERE], message["mask_CT"][0, 1] = 1, 0
        assert message.fault is not None, (name, value)


@pytest.mark.parametrize("kind", ["discrete", "continuous", "squashed"])
def test_only_a_density_may_be_above_one(kind):
    parts = (
        ActionPart("move", "discrete", (2,)),
        ActionPart("more", kind, (2,) if kind == "discrete" else ()),
    )
    message = Message(Schema(SCHEMA.obs, ActionSpec(parts), NUM_ROWS))
    for value in (25.0, LOG_PROB_SLACK * 1.01):
        message["log_probs_CT"][HERE] = value
        what = "the log-probability of an action is above 0"
        assert message.fault == (("invalid", what) if kind == "discrete" else None)
    message["log_probs_CT"][HERE] = np.inf
    assert message.reason == "nonfinite"


def test_each_category_has_its_own_range(wide):
    for name, place, num_choices, what in (
        ("obs/lamp", (), 3, "the observation 'lamp'"),
        *(("obs/cards", (i, j), 4, "the observation 'cards'") for i in (0, 1) for j in (0, 1)),
        ("obs/dials", (0,), 5, "the observation 'dials'"),
        ("obs/dials", (1,), 9, "the observation 'dials'"),
        ("windows/image", (2,), 9, "the window of the observation 'image'"),
        ("actions/move", (0,), 2, "the action 'move'"),
        ("actions/move", (1,), 5, "the action 'move'"),
    ):
        array = wide[name]
        limits = np.iinfo(array.dtype)
        for row in (0, HERE[1], array.shape[1] - 1):
            at = (HERE[0], row, *place)
            for value in (num_choices - 1, 1, 0):
                array[at] = value
                assert wide.fault is None, (name, at, value)
            for value in {num_choices, limits.max, limits.min} - {0}:
                array[at] = value
                assert wide.fault == ("invalid", f"{what} is none of its choices"), at
            array[at] = 0


def test_each_part_has_its_own_range_and_an_array_alone_has_no_name(plain):
    plain["actions/look"][HERE] = 1
    assert plain.fault == ("invalid", "the action 'look' is none of its choices")
    obs, action = ObsSpec((ArraySpec("", (2,), "float32"),)), ActionPart("", "discrete", (2,))
    message = Message(Schema(obs, ActionSpec((action,)), NUM_ROWS))
    message["actions/"][HERE] = -1
    assert message.fault == ("invalid", "the action is none of its choices")
    message["actions/"][HERE], message["obs/"][HERE] = 1, np.nan
    assert message.fault == ("nonfinite", "the observation is not finite")


FORBIDDEN = ("invalid", "an action is chosen that 'legal' forbids, or where none is legal")


def test_a_choice_is_legal_in_every_valid_row():
    for legal, chosen, fault in (
        ([1, 1, 1, 1, 1, 1, 1], (1, 4), None),
        ([0, 1, 0, 0, 1, 0, 0], (1, 2), None),
        # Any number but 0 is a flag that is set.
        ([0, 2, 0, 0, -1, 0, 0], (1, 2), None),
        ([1, 0, 1, 1, 1, 1, 1], (1, 4), FORBIDDEN),
        ([1, 1, 1, 1, 1, 1, 0], (1, 4), FORBIDDEN),
        ([0, 1, 0, 1, 1, 1, 1], (0, 0), FORBIDDEN),
        # One of the two items has none.
        ([0, 0, 1, 1, 1, 1, 1], (0, 0), FORBIDDEN),
        ([1, 1, 0, 0, 0, 0, 0], (0, 0), FORBIDDEN),
        ([0, 0, 0, 0, 0, 0, 0], (0, 0), FORBIDDEN),
    ):
        wide = Message(WIDE)
        wide["obs/legal"][HERE] = legal
        wide["actions/move"][HERE] = chosen
        # Where nothing is chosen nothing need be legal, and it must not be taken for the cause.
        wide["obs/legal"][0, 1], wide["mask_CT"][0, 1] = 0, 0
        wide["obs/legal"][:, -1] = 0
        assert wide.fault == fault, (legal, chosen)
        wide["mask_CT"][HERE] = 0
        assert wide.fault is None, (legal, chosen)
