"""The quick checks say what the thorough ones say."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async import trajectory
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema
from impala_async.trajectory import ColumnChecks, columns_over, find_fault, find_padding_fault

FLOATS = ArraySpec("", (4,), "float32")
PLAIN = Schema(ObsSpec((FLOATS,)), ActionSpec((ActionPart("", "discrete", (2,)),)), rows=5)
RICH = Schema(
    ObsSpec((
        ArraySpec("far", (2,), "float64"),
        ArraySpec("pixels", (3, 2, 2), "uint8", is_stack=True),
        ArraySpec("near", (), "float16"),
        ArraySpec("count", (2,), "int64"),
    )),
    ActionSpec((
        ActionPart("push", "continuous", (), (2,)),
        ActionPart("keys", "discrete", (3, 3), (2,)),
        ActionPart("go", "discrete", (4,)),
    )),
    rows=3,
    state=(ArraySpec("hidden", (3,), "float32"),),
)  # fmt: skip
UNEVEN = replace(PLAIN, action=ActionSpec((ActionPart("", "discrete", (2, 5), (2,)),)))
CATEGORY = replace(PLAIN, obs=ObsSpec((FLOATS, ArraySpec("kind", (), "int32", (3,)))))
LAMP = replace(PLAIN, obs=ObsSpec((FLOATS, ArraySpec("lamp", (), "bool"))))
MASKED = replace(
    PLAIN,
    obs=ObsSpec((FLOATS, ArraySpec("legal", (2,), "int8"))),
    action=replace(PLAIN.action, legal="legal"),
)
SCHEMAS = {
    "plain": PLAIN, "rich": RICH, "uneven": UNEVEN, "category": CATEGORY, "lamp": LAMP,
    "masked": MASKED,
}  # fmt: skip
NUM_COLUMNS = 3
# NaN, minus infinity, -1, and flags.
WORDS = [b"\0\0\xc0\x7f", b"\0\0\x80\xff", b"\xff\xff\xff\xff", b"\1\1\1\1"]


def sound(schema: Schema, seed: int) -> tuple[Any, Any]:
    """Planes of columns that have no fault, some rows of them masked."""
    rng = np.random.default_rng(seed)
    obs = np.zeros((NUM_COLUMNS, schema.layout.obs_bytes), np.uint8)
    small = np.zeros((NUM_COLUMNS, schema.layout.small_bytes), np.uint8)
    columns = columns_over(schema, obs, small)
    for leaf in columns.obs.values():
        leaf[...] = 1
    for part in schema.action.parts:
        array = columns.actions[part.name]
        array[...] = rng.integers(0, min(part.choices or (5,)), array.shape)
    columns.rewards_CT[...] = rng.normal(size=columns.rewards_CT.shape)
    columns.log_probs_CT[...] = -rng.uniform(0.1, 2, columns.log_probs_CT.shape)
    mask = columns.mask_CT
    mask[...] = rng.random(mask.shape) < 0.8
    columns.terminated_CT[:, :-1] = mask[:, :-1] & ~mask[:, 1:]
    columns.truncated_CT[:, -1] = mask[:, -1]
    return obs, small


@pytest.mark.parametrize("name", SCHEMAS)
@settings(max_examples=80)
@given(data=st.data())
def test_a_verdict_is_the_one_of_the_thorough_checks(name: str, data: st.DataObject) -> None:
    schema = SCHEMAS[name]
    planes = sound(schema, data.draw(st.integers(0, 99)))
    for _ in range(data.draw(st.integers(0, 3))):
        plane = planes[data.draw(st.integers(0, 1))]
        column = data.draw(st.integers(0, NUM_COLUMNS - 1))
        start = data.draw(st.integers(0, plane.shape[1] // 4 - 1)) * 4
        plane[column, start : start + 4] = np.frombuffer(
            data.draw(
                st.sampled_from(
                    [b"\0\0\xc0\x7f", b"\0\0\x80\xff", b"\xff\xff\xff\xff", b"\1\1\1\1"]
                )
                | st.binary(min_size=4, max_size=4)
            ),
            np.uint8,
        )
    thorough = find_fault(schema, columns_over(schema, *planes))
    if data.draw(st.booleans()):
        # Most of the words above spoil an array; a flag in another place may look like any flag.
        column = data.draw(st.integers(0, NUM_COLUMNS - 1))
        flags = columns_over(schema, *planes).truncated_CT
        row = data.draw(st.integers(0, schema.rows - 1))
        flags[column, row] ^= 1 if flags.view(np.uint8)[column, row] < 2 else 0
        thorough = find_fault(schema, columns_over(schema, *planes))
    thorough = find_padding_fault(schema, *planes) or thorough
    assert ColumnChecks(schema).find_fault(*planes) == thorough


def test_what_is_sound_is_not_looked_at_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    screens = {name: ColumnChecks(schema) for name, schema in SCHEMAS.items()}
    monkeypatch.setattr(trajectory, "find_fault", lambda *args: "close")
    found = {name: screens[name].find_fault(*sound(SCHEMAS[name], 0)) for name in screens}
    assert [name for name in found if found[name] is None] == ["plain", "rich"]


@pytest.mark.parametrize(("value", "is_fine"), [(1e15, True), (-3e38, False), (np.nan, False)])
def test_an_observation_of_any_moderate_size_is_fine(value: float, is_fine: bool) -> None:
    obs, small = sound(PLAIN, 0)
    columns_over(PLAIN, obs, small).obs[""][...] = np.float32(value)
    assert (ColumnChecks(PLAIN).find_fault(obs, small) is None) == is_fine


@pytest.mark.parametrize(
    ("value", "is_fine"),
    [(10**15, True), (-(10**15), True), (10**15 + 1, False), (2**63 - 1, False), (-(2**63), False)],
)
def test_an_integer_is_as_large_as_a_float_may_be(value: int, is_fine: bool) -> None:
    """The least of them has no absolute value that they could hold."""
    obs, small = sound(RICH, 0)
    columns_over(RICH, obs, small).obs["count"][1, 2, 0] = value
    fault = ColumnChecks(RICH).find_fault(obs, small)
    assert fault == find_fault(RICH, columns_over(RICH, obs, small))
    assert fault == (None if is_fine else ("nonfinite", "the observation 'count' is beyond 1e+15"))


def test_valid_rows_are_counted() -> None:
    obs, small = sound(RICH, 4)
    mask = columns_over(RICH, obs, small).mask_CT
    counted = ColumnChecks(RICH).count_valid(small)
    assert counted.dtype == np.int64
    assert counted.tolist() == mask.sum(1).tolist()
