"""The spaces of an environment, and how a column of it is laid out.

A learner and an actor agree on a `Schema` once per session. From it both compute the same
`ColumnLayout`, so sizes and dtypes never travel with the data. The arrays of a column lie in two
planes, each one contiguous block: `obs` (large; received in place) and `small` (everything else).
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import FailFast, Field, TypeAdapter, ValidationError

from impala_async.errors import SpacesError

DTYPES = frozenset(
    {"bool", "uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64"}
)
Count = Annotated[int, Field(gt=0, lt=2**31)]
Item = TypeVar("Item")
# A peer is told one fault: to list those that 64 KiB may have takes a sixth of a second.
Many = Annotated[tuple[Item, ...], FailFast()]
# numpy has 32 dimensions, and columns and rows come before an array's own.
Shape = Annotated[Many[Count], Field(max_length=30)]
MAX_COLUMN_BYTES = 1 << 30
# A learner refuses a longer one: it reads that of every newcomer.
MAX_SCHEMA_BYTES = 1 << 16
POLICY = "policy"
"""The observation leaf that says which policy plays a column, where there are several."""
LEAF_ALIGNMENT = 8
COLUMN_ALIGNMENT = 64
Bytes2D = NDArray[np.uint8]
Plane = Literal["obs", "small"]


class Leaf(NamedTuple):
    """Where one array of a column lives: a stretch of bytes of its plane."""

    plane: Plane
    stretch: slice
    shape: tuple[int, ...]
    """It includes the leading S or T."""
    dtype: str


class ColumnLayout:
    """The arrays of a column, which follow each other in their plane, aligned."""

    def __init__(self, schema: "Schema") -> None:
        self.leaves: dict[str, Leaf] = {}
        self._ends = {"obs": 0, "small": 0}
        rows, obs_rows = (schema.rows,), (schema.rows + 1,)
        for leaf in schema.obs.leaves:
            if leaf.is_stack:
                frames = (num_frames(leaf, schema.rows), *leaf.shape[1:])
                self._place("obs", f"obs/{leaf.name}", frames, leaf.dtype)
                self._place("obs", f"window/{leaf.name}", (*obs_rows, leaf.shape[0]), "int32")
            else:
                self._place("obs", f"obs/{leaf.name}", (*obs_rows, *leaf.shape), leaf.dtype)
        for leaf in schema.state:
            self._place("small", f"state/{leaf.name}", leaf.shape, leaf.dtype)
        for name in ("log_prob", "reward"):
            self._place("small", name, rows, "float32")
        for part in schema.action.parts:
            self._place("small", f"action/{part.name}", (*rows, *part.shape), part.array.dtype)
        for flag in ("terminated", "truncated", "mask"):
            self._place("small", flag, rows, "bool")
        self.obs_bytes, self.small_bytes = (
            aligned(end, COLUMN_ALIGNMENT) for end in self._ends.values()
        )
        self.column_bytes = self.obs_bytes + self.small_bytes

    def views(
        self, obs: Any, small: Any, *, dtype_of: Callable[[str], Any] = np.dtype
    ) -> dict[str, Any]:
        """Typed `[columns, S or T, ...]` views over `[columns, bytes]` planes, of any library."""
        views = {}
        for name, leaf in self.leaves.items():
            array = (obs if leaf.plane == "obs" else small)[:, leaf.stretch]
            views[name] = array.view(dtype_of(leaf.dtype)).reshape(len(obs), *leaf.shape)
        return views

    def _place(self, plane: Plane, name: str, shape: tuple[int, ...], dtype: str) -> None:
        start = aligned(self._ends[plane], LEAF_ALIGNMENT)
        self._ends[plane] = start + math.prod(shape) * np.dtype(dtype).itemsize
        self.leaves[name] = Leaf(plane, slice(start, self._ends[plane]), shape, dtype)


def aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


@dataclass(frozen=True)
class ArraySpec:
    """One array; its shape is that of one row.

    Where its items are categories, `choices` has for each how many there are; it is empty where
    they are numbers. `is_stack` says that its first axis is a window over frames, which slides by
    one from row to row: a column then holds each frame once.
    """

    name: str
    shape: Shape
    dtype: str
    choices: Many[Count] = ()
    is_stack: bool = False

    def __post_init__(self) -> None:
        why = ""
        if self.dtype not in DTYPES:
            why = f"unsupported dtype {self.dtype}: {', '.join(sorted(DTYPES))} are supported"
        elif any(size < 1 for size in self.shape):
            why = f"empty shape {self.shape}"
        elif len(self.choices) not in (0, self.num_items):
            why = f"{len(self.choices)} numbers of choices for shape {self.shape}"
        elif self.choices and (self.is_float or self.dtype == "bool"):
            why = f"categories of dtype {self.dtype}"
        elif self.is_stack and (self.dtype != "uint8" or len(self.shape) < 2 or self.choices):
            why = "no stack of frames of bytes"
        if why:
            raise SpacesError(f"{self.name or 'array'}: {why}")

    @property
    def num_items(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_items * np.dtype(self.dtype).itemsize

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith("float")

    @property
    def may_be_large(self) -> bool:
        """Whether it holds numbers that may be beyond all that is learned from, or none."""
        return self.is_float or (self.dtype == "int64" and not self.choices)


@dataclass(frozen=True)
class ObsSpec:
    """The observation as flat leaves; a plain array is one leaf whose name is empty."""

    leaves: Many[ArraySpec]


@dataclass(frozen=True)
class ActionPart:
    """`discrete`: each item is an index below its entry of `choices`. `continuous`: numbers, which
    the environment clips to its bounds. `squashed`: numbers that a tanh brings into them."""

    name: str
    kind: Literal["discrete", "continuous", "squashed"]
    choices: Many[Count] = ()
    shape: Shape = ()

    def __post_init__(self) -> None:
        if (self.kind == "discrete") != bool(self.choices):
            what = f"{len(self.choices)} numbers of choices for a {self.kind} one"
            raise SpacesError(f"action part {self.name!r}: {what}")
        # It has choices, a shape and a dtype that an array can have.
        _ = self.array

    @property
    def num_parameters(self) -> int:
        """Outputs of a policy head that describe it: logits, or means and log-deviations."""
        return sum(self.choices) if self.kind == "discrete" else 2 * self.array.num_items

    @property
    def is_one_choice(self) -> bool:
        return len(self.choices) == 1 and self.shape == ()

    @cached_property
    def array(self) -> ArraySpec:
        """The array that holds it on our side, whatever the environment's own dtype."""
        dtype = "int32" if self.kind == "discrete" else "float32"
        return ArraySpec(self.name, self.shape, dtype, self.choices)


@dataclass(frozen=True)
class ActionSpec:
    """The action as flat parts; a plain action is one part whose name is empty."""

    parts: Many[ActionPart]
    legal: str | None = None
    """The observation leaf that says which choices of all discrete parts, in order, are legal."""

    @property
    def num_choices(self) -> int:
        return sum(sum(part.choices) for part in self.parts)


@dataclass(frozen=True)
class Schema:
    """Both sides must agree on this before the first trajectory."""

    obs: ObsSpec
    action: ActionSpec
    rows: Count
    state: Many[ArraySpec] = ()
    policies: Many[str] = ()
    """Names of those that the leaf `policy` has the numbers of; empty where there is one."""

    @property
    def inputs(self) -> ObsSpec:
        """The leaves that a network sees: neither the mask of legal actions nor its own number."""
        hidden = {self.action.legal, POLICY if self.policies else None}
        return ObsSpec(tuple(leaf for leaf in self.obs.leaves if leaf.name not in hidden))

    def to_json(self) -> bytes:
        fields = asdict(self)
        if not self.policies:
            del fields["policies"]
        for leaf in (*fields["obs"]["leaves"], *fields["state"]):
            if not leaf["is_stack"]:
                del leaf["is_stack"]
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    @staticmethod
    def from_json(data: bytes) -> "Schema":
        """Rebuild a schema; raises SpacesError for anything that is not one."""
        try:
            schema = _reader().validate_json(data, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise SpacesError(f"not a schema: {place}: {first['msg']}") from None
        for fault in _faults(schema):
            raise SpacesError(fault)
        # A column that nobody could hold is refused here.
        _ = schema.layout
        return schema

    @cached_property
    def digest(self) -> bytes:
        return digest_of(self.to_json())

    @cached_property
    def layout(self) -> ColumnLayout:
        """Raises SpacesError for columns that are larger than any could be, or take too long to
        describe."""
        layout = ColumnLayout(self)
        if layout.column_bytes > MAX_COLUMN_BYTES:
            takes = f"takes {layout.column_bytes} bytes, more than {MAX_COLUMN_BYTES}"
            raise SpacesError(f"a column of {self.rows} rows {takes}: lower trajectory.rows")
        if (size := len(self.to_json())) > MAX_SCHEMA_BYTES:
            num_parts = len(self.obs.leaves) + len(self.action.parts)
            raise SpacesError(
                f"the names, shapes and choices of {num_parts} parts of observation and action "
                f"take {size} bytes, more than {MAX_SCHEMA_BYTES}: have fewer or shorter ones, as "
                "by a wrapper (env.wrappers) that joins parts into arrays"
            )
        return layout

    def difference(self, other: "Schema", here: str, there: str) -> str:
        """Name the first fields in which another schema differs, with both values and places."""
        mine, theirs = dict(_flat(asdict(self))), dict(_flat(asdict(other)))
        differing = [
            f"{key}: {mine.get(key, 'absent')} {here}, {theirs.get(key, 'absent')} {there}"
            for key in sorted(mine.keys() | theirs.keys())
            if mine.get(key) != theirs.get(key)
        ]
        return "; ".join(differing[:3]) or "nothing differs"


def digest_of(text: bytes) -> bytes:
    """16 bytes by which a schema or a layout is known, as it was written."""
    return hashlib.sha256(text).digest()[:16]


def recurrent_state(core: str | None, size: int) -> tuple[ArraySpec, ...]:
    """The arrays that a recurrent core carries from row to row; its output comes first."""
    names = {None: (), "gru": ("hidden",), "lstm": ("hidden", "cell")}[core]
    return tuple(ArraySpec(name, (size,), "float32") for name in names)


def policy_leaf(policies: tuple[str, ...]) -> ArraySpec:
    return ArraySpec(POLICY, (), "uint8", (len(policies),))


def num_frames(leaf: ArraySpec, rows: int) -> int:
    """How many frames a column has of a stack: an empty one, the first window, one per row."""
    return 1 + leaf.shape[0] + rows


@cache
def _reader() -> TypeAdapter[Schema]:
    return TypeAdapter(Schema)


def _faults(schema: Schema) -> Iterator[str]:
    leaves, legal, num_actions = schema.obs.leaves, schema.action.legal, schema.action.num_choices
    for what, names, smallest in (
        ("observation", [leaf.name for leaf in leaves], 1),
        ("action", [part.name for part in schema.action.parts], 1),
        ("state", [leaf.name for leaf in schema.state], 0),
        ("team", schema.policies, 2 if schema.policies else 0),
    ):
        # Leaves are found by name, and names come into logs and replies.
        if len(names) < smallest:
            yield f"the {what} has too few parts: {len(names)}"
        if len(set(names)) < len(names):
            yield f"the {what} has two parts of one name"
        if not all(name.isprintable() for name in names):
            yield f"the {what} has a part with an unprintable name"
    flags = [leaf for leaf in leaves if not leaf.is_float and not leaf.is_stack]
    masks = [leaf for leaf in flags if leaf.num_items == num_actions]
    if legal is not None and legal not in [leaf.name for leaf in masks]:
        yield f"{legal!r} is no mask of {num_actions} actions"
    if schema.policies and policy_leaf(schema.policies) not in leaves:
        yield f"no leaf {POLICY!r} says which of {len(schema.policies)} policies plays"
    if not schema.inputs.leaves:
        yield "the observation has nothing that a policy could see"


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, tuple) and tree and isinstance(tree[0], dict):
        tree = {item["name"] or number: item for number, item in enumerate(tree)}
    if not isinstance(tree, dict):
        yield prefix.rstrip("."), tree
        return
    for key, value in tree.items():
        yield from _flat(value, f"{prefix}{key}.")
