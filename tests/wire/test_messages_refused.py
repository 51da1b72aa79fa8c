"""Whatever is no message is a ProtocolError, with one of two reasons, and nothing else ever."""

from dataclasses import dataclass
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.errors import ProtocolError
from impala_async.wire.messages import MAX_WHY, NO_NUMBER, NO_SEQ, pack, unpack
from tests.wire.test_messages import GOLDEN

FRAMES = [bytes.fromhex(frame) for _, frame in GOLDEN]
IDS = [type(message).__name__ for message, _ in GOLDEN]
NESTED: Any = []
for _ in range(200):
    NESTED = [NESTED]


@dataclass(frozen=True)
class Field:
    """What a field takes at its limits, and what is beyond them."""

    good: tuple[Any, ...]
    bad: tuple[Any, ...]


def uint(largest: int, smallest: int = 0) -> Field:
    odd = (True, False, 1.0, "1", b"1", None, [1], {}, NESTED)
    return Field((smallest, largest), (smallest - 1, largest + 1, -(2**63), 2**64 - 1, *odd))


def text(longest: int) -> Field:
    too_long = ("x" * (longest + 1), "x" * 4000)
    return Field(("", "x" * longest), (*too_long, b"x", 1, None, True, ["x"], {"x": 1}, NESTED))


NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
NUMBER = Field(
    (0, -1, 0.0, -999e9, 999e9), (*NOT_FINITE, 1e12, -(10**12), True, "1", b"", None, [1.0], NESTED)
)
SPAN = Field((1e-6, 1, 999e9), (*NUMBER.bad, 0, -1, 0.0, -2.5))
ID = Field((bytes(16),), (bytes(15), bytes(17), b"", "x" * 16, 1, None, [*range(16)], NESTED))
COUNT = uint(2**62)
EPOCH = uint(2**31)
COLUMNS = uint(4096, 1)
PATH = text(255)
BODY = Field(
    (None, b"", bytes(8192)), (bytes(8193), bytes(12000), "x", 0, False, [], {}, [b""], NESTED)
)
VERDICTS = Field(
    ([], [[0, 0]], [[2**62, 5]] * 64),
    (
        *([[0, 0]] * 65, [[0, 6]], [[-1, 0]], [[2**62 + 1, 0]], [[0, -1]], [[True, 0]]),
        *([[0, True]], [[0]], [[0, 0, 0]], [0, 0], [[0, 0.0]], [None], [{0: 0}], [[0, 0], 1]),
        *(None, {}, b"", "", 0, NESTED, [NESTED], [[NESTED, 0]]),
    ),
)
TIMERS = Field(
    ({}, {"x" * 32: 1}, {str(i): 0.5 for i in range(16)}),
    (
        *({str(i): 0.5 for i in range(17)}, {"x" * 33: 1}, {b"x": 1}, {1: 1}, {"x": "1"}),
        *({"x": True}, {"x": None}, {"x": {}}, {"x": NESTED}, [], None, 0, NESTED),
        *({"x": value} for value in (*NOT_FINITE, 1e12)),
    ),
)

FIELDS: dict[str, list[Field]] = {
    "Hello": [uint(255), ID, text(64), ID, EPOCH, uint(2**61), uint(4096, NO_NUMBER)],
    "Welcome": [
        *(ID, EPOCH, ID, uint(2**31), uint(65535, 1), PATH, PATH, PATH, ID),
        *(SPAN, SPAN, COLUMNS),
    ],
    "Spec": [ID, ID, ID, COLUMNS, COLUMNS, uint(1)],
    "Grant": [ID, COUNT, COUNT, EPOCH, COUNT, VERDICTS, uint(2**62, NO_SEQ)],
    "Reject": [uint(255), text(2000), NUMBER],
    "Data": [ID, COUNT, EPOCH, COUNT, uint(65535, 1), COLUMNS, uint(1), uint(2**28), BODY],
    "Get": [ID, EPOCH, COUNT],
    "WeightsReply": [EPOCH, COUNT, ID, ID],
    "NotModified": [EPOCH, COUNT],
    "Heartbeat": [ID, TIMERS],
    "Bye": [ID, uint(2), text(MAX_WHY)],
    "ByeOk": [ID],
}
EXAMPLES = {type(message).__name__: message for message, _ in GOLDEN}
EACH_FIELD = [(name, i) for name, fields in FIELDS.items() for i in range(len(fields))]


def refusal(frame: bytes) -> str:
    """The reason for which this is no message."""
    with pytest.raises(ProtocolError) as caught:
        unpack(frame)
    # It is quoted in a reply and in a log line.
    assert len(str(caught.value)) < 300
    return caught.value.reason


def with_field(name: str, index: int, value: Any) -> bytes:
    kind = FRAMES[IDS.index(name)][1]
    fields = list(EXAMPLES[name])
    fields[index] = value
    frame: bytes = msgpack.packb([kind, *fields])
    return frame


def test_every_field_is_here() -> None:
    assert {name: len(fields) for name, fields in FIELDS.items()} == {
        name: len(message) for name, message in EXAMPLES.items()
    }


@pytest.mark.parametrize(("name", "index"), EACH_FIELD)
def test_each_field_has_its_range(name: str, index: int) -> None:
    field = FIELDS[name][index]
    for value in field.good:
        assert unpack(with_field(name, index, value))[index] == value
    for value in field.bad:
        assert refusal(with_field(name, index, value)) == "malformed_header", value


@pytest.mark.parametrize(("name", "index"), EACH_FIELD)
@pytest.mark.parametrize(
    "extension", [msgpack.ExtType(5, b""), msgpack.ExtType(5, b"xy"), msgpack.Timestamp(1, 2)]
)
def test_extension_types_are_refused(name: str, index: int, extension: Any) -> None:
    assert refusal(with_field(name, index, extension)) == "malformed_header"


@pytest.mark.parametrize("frame", FRAMES, ids=IDS)
def test_truncated_or_followed_by_something(frame: bytes) -> None:
    for length in range(len(frame)):
        assert refusal(frame[:length]) == "malformed_header"
    for tail in (b"\x00", b"\xc0", b"\xc1", frame):
        assert refusal(frame + tail) == "malformed_header"


@pytest.mark.parametrize("frame", FRAMES, ids=IDS)
def test_a_field_too_few(frame: bytes) -> None:
    fields = msgpack.unpackb(frame)
    assert refusal(msgpack.packb(fields[:-1])) == "malformed_header"
    assert refusal(msgpack.packb(fields[:1])) == "malformed_header"


@pytest.mark.parametrize("name", FIELDS)
def test_fields_that_a_later_release_appends_are_passed_over(name: str) -> None:
    """So a field is no new protocol. Those that are known are checked all the same."""
    kind, message = FRAMES[IDS.index(name)][1], EXAMPLES[name]
    spelled_out = [kind, *message]
    for more in ([None], ["x", 1, [b""]]):
        assert unpack(msgpack.packb([*spelled_out, *more])) == message
    assert refusal(msgpack.packb([*spelled_out[:-1], NESTED, None])) == "malformed_header"


@pytest.mark.parametrize("kind", [12, 255, -1, 2**63, True, False, 0.0, "0", b"", None, [0], {}])
def test_unknown_kinds(kind: Any) -> None:
    assert refusal(msgpack.packb([kind, *EXAMPLES["ByeOk"]])) == "unknown_type"


@pytest.mark.parametrize(
    "whole", [None, 5, 1.5, "text", b"bytes", True, {}, {"kind": 0}, [], msgpack.ExtType(1, b"")]
)
def test_what_is_no_array(whole: Any) -> None:
    assert refusal(msgpack.packb(whole)) == "malformed_header"


def test_nothing_at_all() -> None:
    assert refusal(b"") == "malformed_header"


def test_a_long_array_is_not_looked_into() -> None:
    assert refusal(msgpack.packb([0] * 65)) == "malformed_header"
    # Lengths that are only claimed: arrays, maps, strings, blobs of 4 GiB.
    for claim in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"):
        assert refusal(claim + b"\xff" * 4 + b"\x00" * 20) == "malformed_header"
        assert refusal(b"\x92\x0b" + claim + b"\xff" * 4 + b"\x00" * 20) == "malformed_header"


@pytest.mark.parametrize("depth", [10, 400, 900, 1000, 1015, 1100, 4000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa0"], ids=["arrays", "maps"])
def test_deep_nesting_ends_nothing_but_itself(depth: int, opening: bytes) -> None:
    nested = opening * depth + b"\xc0"
    allowed = {"malformed_header", "unknown_type"}
    assert refusal(nested) in allowed
    assert refusal(b"\x92\x0b" + nested) == "malformed_header"
    for index, message in enumerate(FRAMES):
        assert refusal(message[:2] + nested) in allowed, IDS[index]


def test_text_that_is_no_text() -> None:
    frame = pack(EXAMPLES["Hello"])
    assert refusal(frame.replace(b"0.1.0", b"0.\xff.0")) == "malformed_header"
    # A lone surrogate, as UTF-8 does not have it.
    assert refusal(frame.replace(b"0.1.0", b"0\xed\xa0\x800")) == "malformed_header"
    # Half a text of bytes: 1001 characters, 2002 bytes.
    assert refusal(with_field("Reject", 1, "é" * 1001)) == "malformed_header"


# -------------------- whatever comes


def read_or_refused(frame: bytes) -> None:
    """Nothing but a message or a ProtocolError comes out."""
    reason, message = None, None
    try:
        message = unpack(frame)
    except ProtocolError as error:
        reason = error.reason
    if message is None:
        assert reason in {"malformed_header", "unknown_type"}
    else:
        assert unpack(pack(message)) == message


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes(frame: bytes) -> None:
    read_or_refused(frame)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(FRAMES), st.data())
def test_damaged_messages(frame: bytes, data: st.DataObject) -> None:
    damaged = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    read_or_refused(bytes(damaged))


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=40)
    | st.binary(max_size=40)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=8)),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=5) | st.binary(max_size=5), inner, max_size=5)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(FIELDS)), st.data())
def test_any_value_in_any_field(name: str, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(FIELDS[name]) - 1))
    read_or_refused(with_field(name, index, data.draw(anything)))


@settings(deadline=None, max_examples=200)
@given(anything)
def test_any_msgpack_value(value: Any) -> None:
    read_or_refused(msgpack.packb(value))
