"""Schemas that travel, and what is sent in place of one."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.spec import MAX_DIMENSIONS, Schema
from tests.test_spec import SCHEMA, schemas

JSON = (
    b'{"action":{"parts":[{"kind":"discrete","name":"move","num_choices":4},'
    b'{"kind":"discrete","name":"look","num_choices":2}]},'
    b'"obs":{"leaves":[{"dtype":"uint8","name":"image","shape":[3,5]},'
    b'{"dtype":"float32","name":"speed","shape":[]}]},'
    b'"rows":3,"state":[{"dtype":"float64","name":"core","shape":[2]}]}'
)


def test_golden_json() -> None:
    assert SCHEMA.to_json() == JSON
    assert Schema.from_json(JSON) == SCHEMA
    assert SCHEMA.digest.hex() == "1644341702ab20399d2d441be0456354"


@settings(deadline=None)
@given(schemas)
def test_there_and_back(schema: Schema) -> None:
    again = Schema.from_json(schema.to_json())
    assert again == schema
    assert again.digest == schema.digest
    assert again.layout.leaves == schema.layout.leaves
    assert schema.difference(again) == "nothing differs"


@settings(deadline=None)
@given(schemas, schemas)
def test_digests_tell_schemas_apart(one: Schema, other: Schema) -> None:
    assert (one.digest == other.digest) == (one == other)


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    raw = json.loads(JSON)
    change(raw)
    return json.dumps(raw).encode()


NESTED = b"[" * 100_000 + b"]" * 100_000
HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"{",
    "not UTF-8": b'{"rows": "\xff"}',
    "a list": b"[]",
    "null": b"null",
    "a number": b"7",
    "nested": NESTED,
    "a huge number": b'{"rows": ' + b"9" * 5000 + b"}",
    **{
        f"without {key}": changed(lambda raw, key=key: raw.pop(key))
        for key in ("obs", "action", "rows", "state")
    },
    **{
        f"rows {value!r}": changed(lambda raw, value=value: raw.update(rows=value))
        for value in (0, -1, 1.0, True, "3", None, 2**31, [3], float("nan"), 2_000_000_000)
    },
    **{
        f"shape {value!r}": changed(lambda raw, value=value: raw["state"][0].update(shape=value))
        for value in ([0], [-1], [1.5], [True], ["2"], [[2]], None, 5, [2**31], [2**30] * 30)
    },
    "too many dimensions": changed(
        lambda raw: raw["obs"]["leaves"][0].update(shape=[1] * (MAX_DIMENSIONS + 1))
    ),
    **{
        f"dtype {value!r}": changed(lambda raw, value=value: raw["state"][0].update(dtype=value))
        for value in ("object", "O", "float128", None, 5, ["float32"], {})
    },
    **{
        f"name {value!r}": changed(lambda raw, value=value: raw["state"][0].update(name=value))
        for value in (None, 5, ["x"], "a\nb", "\ud800", "\x1b[2J", "\0")
    },
    **{
        f"choices {value!r}": changed(
            lambda raw, value=value: raw["action"]["parts"][0].update(num_choices=value)
        )
        for value in (0, -1, 2.0, True, None, 2**31)
    },
    "another kind": changed(lambda raw: raw["action"]["parts"][0].update(kind="box")),
    "a part with an unprintable name": changed(
        lambda raw: raw["action"]["parts"][0].update(name="a\rb")
    ),
    "no observation": changed(lambda raw: raw["obs"].update(leaves=[])),
    "no action": changed(lambda raw: raw["action"].update(parts=[])),
    "leaves of text": changed(lambda raw: raw["obs"].update(leaves="abc")),
    "leaves of null": changed(lambda raw: raw["obs"].update(leaves=[None])),
    "two leaves of one name": changed(lambda raw: raw["obs"]["leaves"][1].update(name="image")),
    "two parts of one name": changed(lambda raw: raw["action"]["parts"][1].update(name="move")),
    "two states of one name": changed(lambda raw: raw["state"].append(raw["state"][0])),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_no_schema_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        Schema.from_json(data)


def test_the_largest_number_of_dimensions_has_a_view() -> None:
    shape = [1] * MAX_DIMENSIONS
    schema = Schema.from_json(changed(lambda raw: raw["obs"]["leaves"][0].update(shape=shape)))
    layout = schema.layout
    views = layout.views(
        np.zeros((2, layout.obs_bytes), np.uint8), np.zeros((2, layout.small_bytes), np.uint8)
    )
    assert views["obs/image"].ndim == MAX_DIMENSIONS + 2


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
places = st.sampled_from(
    [("rows",), ("obs",), ("obs", "leaves"), ("state",), ("action", "parts")]
    + [("obs", "leaves", 0, key) for key in ("name", "shape", "dtype")]
    + [("action", "parts", 1, key) for key in ("name", "kind", "num_choices")]
)


@settings(deadline=None)
@given(places, json_values)
def test_anything_anywhere_is_a_schema_or_a_value_error(place: tuple[Any, ...], value: Any) -> None:
    raw = json.loads(JSON)
    inner = raw
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    schema = None
    try:
        schema = Schema.from_json(json.dumps(raw).encode())
    except ValueError:
        return
    assert Schema.from_json(schema.to_json()) == schema
