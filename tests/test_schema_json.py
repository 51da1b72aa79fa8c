"""Schemas that travel, and what is sent in place of one."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.errors import SpacesError
from impala_async.schema import (
    MAX_DIMENSIONS,
    POLICY,
    ActionPart,
    ActionSpec,
    ArraySpec,
    ObsSpec,
    Schema,
    policy_leaf,
)
from tests.test_schema import schemas

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


def test_golden_json():
    assert WIDE.to_json() == JSON
    assert Schema.from_json(JSON) == WIDE
    assert WIDE.digest.hex() == "1ee6428360f8e29cbe0e2b95b429906c"


@settings(deadline=None)
@given(schemas())
def test_there_and_back(schema):
    again = Schema.from_json(schema.to_json())
    assert again == schema
    assert again.digest == schema.digest
    assert again.layout.leaves == schema.layout.leaves
    assert schema.difference(again, "here", "there") == "nothing differs"


@settings(deadline=None)
@given(schemas(), schemas())
def test_digests_tell_schemas_apart(one, other):
    assert (one.digest == other.digest) == (one == other)


def changed(change):
    raw = json.loads(JSON)
    change(raw)
    return json.dumps(raw).encode()


NESTED = b"[" * 100_000 + b"]" * 100_000
HOSTILE = {
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
            lambda raw, value=value: raw["action"]["parts"][0].update(choices=value)
        )
        for value in ([0, 1], [2, -1], [2.0, 5], [True, 5], None, [2**31, 5], [2], [2, 2, 2], [[2]])
    },
    **{
        f"choices {value!r} of categories": changed(
            lambda raw, value=value: raw["obs"]["leaves"][1].update(choices=value)
        )
        for value in ([0, 4], [3], None, 3, "ab")
    },
    "categories that are floats": changed(
        lambda raw: raw["obs"]["leaves"][1].update(dtype="float32")
    ),
    "numbers with choices": changed(lambda raw: raw["action"]["parts"][2].update(choices=[2])),
    **{
        f"shape {value!r} of a part": changed(
            lambda raw, value=value: raw["action"]["parts"][1].update(shape=value)
        )
        for value in ([0], [-1], None, 3, [1] * (MAX_DIMENSIONS + 1))
    },
    **{
        f"legal {value!r}": changed(lambda raw, value=value: raw["action"].update(legal=value))
        for value in ("image", "nothing", "", 5, ["legal"], True)
    },
    "a mask of floats": changed(lambda raw: raw["obs"]["leaves"][2].update(dtype="float32")),
    "a mask for fewer": changed(lambda raw: raw["obs"]["leaves"][2].update(shape=[6])),
    "a mask of numbers": changed(
        lambda raw: raw["action"].update(parts=raw["action"]["parts"][1:])
    ),
    "nothing but a mask": changed(lambda raw: raw["obs"].update(leaves=raw["obs"]["leaves"][2:])),
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
    with pytest.raises(SpacesError, match=r"\S"):
        Schema.from_json(data)


def test_the_largest_number_of_dimensions_has_a_view():
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
    + [("obs", "leaves", 1, "choices"), ("action", "legal")]
    + [("action", "parts", 0, key) for key in ("name", "kind", "choices", "shape")]
)


@settings(deadline=None)
@given(places, json_values)
def test_anything_anywhere_is_a_schema_or_a_value_error(place, value):
    raw = json.loads(JSON)
    inner = raw
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    schema = None
    try:
        schema = Schema.from_json(json.dumps(raw).encode())
    except SpacesError:
        return
    assert Schema.from_json(schema.to_json()) == schema


TEAM = Schema(
    obs=ObsSpec((ArraySpec("sight", (2,), "float32"), policy_leaf(("main", "past")))),
    action=ActionSpec((ActionPart("", "discrete", (3,)),)),
    rows=2,
    policies=("main", "past"),
)


def test_policies_are_in_a_schema_only_where_there_are_several():
    assert b"policies" not in WIDE.to_json()
    assert json.loads(TEAM.to_json())["policies"] == ["main", "past"]
    assert Schema.from_json(TEAM.to_json()) == TEAM
    assert Schema.from_json(TEAM.to_json()).digest == TEAM.digest


def test_who_plays_is_no_input_of_the_network():
    assert [leaf.name for leaf in TEAM.inputs.leaves] == ["sight"]
    # A leaf of that name is one like any other where there is a single policy.
    alone = Schema(TEAM.obs, TEAM.action, TEAM.rows)
    assert [leaf.name for leaf in alone.inputs.leaves] == ["sight", POLICY]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"policies": ["main", "past", "old"]}, "no leaf 'policy' says which of 3"),
        ({"policies": ["main"]}, "the team has too few parts: 1"),
        ({"policies": ["main", "main"]}, "two parts of one name"),
        ({"policies": "main"}, "not a list of names"),
        ({"policies": [1, 2]}, "not a list of names"),
    ],
)
def test_a_schema_whose_leaf_does_not_fit_its_policies_is_refused(change, text):
    raw = json.loads(TEAM.to_json()) | change
    with pytest.raises(SpacesError, match=text):
        Schema.from_json(json.dumps(raw).encode())


def test_a_schema_with_nothing_to_see_but_who_plays_is_refused():
    raw = json.loads(TEAM.to_json())
    raw["obs"]["leaves"] = [leaf for leaf in raw["obs"]["leaves"] if leaf["name"] == POLICY]
    with pytest.raises(SpacesError, match="nothing that a policy could see"):
        Schema.from_json(json.dumps(raw).encode())
