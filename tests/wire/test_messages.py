"""The messages as literal bytes, so that none changes unnoticed; and whatever is no message is a
ProtocolError, with one of two reasons, and nothing else ever."""

import random
from typing import Any, NamedTuple, get_args

import msgpack
import pytest

from impala_async.errors import ProtocolError
from impala_async.wire import messages as wire

A = bytes(range(16))
B = b"\xbb" * 16
C = b"\xcc" * 16
A_HEX = "c410" + A.hex()
B_HEX = "c410" + B.hex()
C_HEX = "c410" + C.hex()

GOLDEN = [
    (wire.Hello(1, A, "0.1.0", B, 3, 300), f"970001{A_HEX}a5302e312e30{B_HEX}03cd012c"),
    (
        wire.Welcome(B, 3, C, 2, 5556, "/r/data", "/r/weights", "/r/nonce", A, 10.0, 2.0, 16),
        f"9d01{B_HEX}03{C_HEX}02cd15b4a72f722f64617461aa2f722f77656967687473a82f722f6e6f6e6365"
        f"{A_HEX}cb4024000000000000cb400000000000000010",
    ),
    (wire.Spec(C, A, B, 8, 1), f"9602{C_HEX}{A_HEX}{B_HEX}0801"),
    (
        wire.Grant(C, 7, 5, 3, 70000, [[6, 1], [5, 4]]),
        f"9703{C_HEX}070503ce0001117092920601920504",
    ),
    (wire.Grant(C, 7, 5, 3, 70000, [], -1, 6), f"9903{C_HEX}070503ce0001117090ff06"),
    (
        wire.Reject(3, "rows: 50 here, 20 there", -1.0),
        "940403b7726f77733a20353020686572652c203230207468657265cbbff0000000000000",
    ),
    (wire.Data(C, 5, 3, 70000, 50, 8, 0, 2, None), f"9a05{C_HEX}0503ce0001117032080002c0"),
    (wire.Data(C, 5, 3, 70000, 50, 8, 0, 0, b"\1\2"), f"9a05{C_HEX}0503ce0001117032080000c4020102"),
    (
        wire.Data(C, 5, 3, 70000, 50, 8, 0, 2, None, 37),
        f"9b05{C_HEX}0503ce0001117032080002c025",
    ),
    (wire.Get(C, 3, 69999), f"9406{C_HEX}03ce0001116f"),
    (wire.WeightsReply(3, 70000, A, B), f"950703ce00011170{A_HEX}{B_HEX}"),
    (wire.NotModified(3, 70000), "930803ce00011170"),
    (
        wire.Heartbeat(C, {"env_time_ms": 1.5}),
        f"9309{C_HEX}81ab656e765f74696d655f6d73cb3ff8000000000000",
    ),
    (wire.Bye(C, 2), f"930a{C_HEX}02"),
    (wire.ByeOk(C), f"920b{C_HEX}"),
]


EXAMPLES = {type(message).__name__: message for message, _ in GOLDEN}
FRAMES = [bytes.fromhex(frame) for _, frame in GOLDEN]


@pytest.mark.parametrize(("message", "frame"), GOLDEN, ids=lambda value: type(value).__name__)
def test_golden_bytes(message, frame):
    whole = bytes.fromhex(frame)
    assert wire.pack(message) == whole
    back = wire.unpack(memoryview(bytearray(whole + b"rest"))[:-4])
    assert (back, type(back)) == (message, type(message))


def test_every_kind_has_golden_bytes_and_every_number_its_meaning():
    assert {type(message) for message, _ in GOLDEN} == set(get_args(wire.Message))
    assert all(len(FIELDS[name]) == len(message) for name, message in EXAMPLES.items())
    assert wire.PROTOCOL == 1
    verdicts = "duplicate invalid nonfinite unknown_session stale dead_branch"
    codes = "hello_again full protocol mismatch not_allowed bad_message wrong_port elsewhere"
    assert " ".join(wire.VERDICTS) == verdicts
    assert " ".join(wire.REJECT_CODES) == codes
    assert wire.BYE_REASONS == ("finished", "restarting", "leaving", "moving")
    assert (wire.MAX_HEADER_BYTES, wire.MAX_INLINE_BYTES) == (4096, 8192)
    assert (wire.MAX_SETTINGS_BYTES, wire.MAX_TEXT_BYTES) == (65536, 2000)
    assert (wire.MAX_COLUMNS, wire.MAX_TIMERS, wire.MAX_VERDICTS) == (4096, 16, 64)


def test_codes_that_are_not_known_have_a_name_too():
    assert wire.code_of(wire.Reject(3, "", 0.0)) == "mismatch"
    assert wire.code_of(wire.Reject(len(wire.REJECT_CODES), "", 0.0)) == "unknown"


def test_the_largest_headers_fit():
    seqs = [[2**62, len(wire.VERDICTS) - 1]] * wire.MAX_VERDICTS
    grant = wire.Grant(C, 2**62, 2**61, 2**31, 2**62, seqs)
    welcome = wire.Welcome(
        *(B, 2**31, C, 2**31, 65535, "ä" * 255, "ä" * 255, "ä" * 255, A, 1e11, 1e11, 4096),
    )
    heartbeat = wire.Heartbeat(C, {"ä" * 30 + f"{i:02d}": 1e11 for i in range(wire.MAX_TIMERS)})
    reject = wire.Reject(0, "x" * wire.MAX_TEXT_BYTES, 1.0)
    for message in (grant, welcome, heartbeat, reject):
        assert len(wire.pack(message)) <= wire.MAX_HEADER_BYTES
        assert wire.unpack(wire.pack(message)) == message


# -------------------- each field

NESTED = []
for _ in range(200):
    NESTED = [NESTED]


class Field(NamedTuple):
    """The values that a field takes at its limits, and some beyond them."""

    good: tuple[Any, ...]
    bad: tuple[Any, ...]


def uint(largest, smallest=0):
    odd = (True, False, 1.0, "1", b"1", None, [1], {})
    return Field((smallest, largest), (smallest - 1, largest + 1, -(2**63), 2**64 - 1, *odd))


def text(longest):
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

FIELDS = {
    "Hello": [uint(255), ID, text(64), ID, EPOCH, uint(2**60), uint(4096, wire.NO_NUMBER)],
    "Welcome": [
        *(ID, EPOCH, ID, uint(2**31), uint(65535, 1), PATH, PATH, PATH, ID),
        *(SPAN, SPAN, COLUMNS),
    ],
    "Spec": [ID, ID, ID, COLUMNS, COLUMNS, uint(1)],
    "Grant": [ID, COUNT, uint(2**61), EPOCH, COUNT, VERDICTS, *[uint(2**62, wire.NO_SEQ)] * 2],
    "Reject": [uint(255), text(2000), NUMBER],
    "Data": [
        *(ID, COUNT, EPOCH, COUNT, uint(65535, 1), COLUMNS, uint(1), uint(2**28), BODY),
        uint(65535),
    ],
    "Get": [ID, EPOCH, COUNT],
    "WeightsReply": [EPOCH, COUNT, ID, ID],
    "NotModified": [EPOCH, COUNT],
    "Heartbeat": [ID, TIMERS],
    "Bye": [ID, uint(3), text(wire.MAX_WHY)],
    "ByeOk": [ID],
}
EACH_FIELD = [(name, i) for name, fields in FIELDS.items() for i in range(len(fields))]
EXTENSIONS = (msgpack.ExtType(5, b""), msgpack.ExtType(5, b"xy"), msgpack.Timestamp(1, 2))


def refusal(frame):
    """The reason for which this is no message."""
    with pytest.raises(ProtocolError) as caught:
        wire.unpack(frame)
    # It is quoted in a reply and in a log line.
    assert len(str(caught.value)) < 300
    return caught.value.reason


def kind_of(name):
    return [form.__name__ for form in get_args(wire.Message)].index(name)


def with_field(name, index, value):
    fields = list(EXAMPLES[name])
    fields[index] = value
    return msgpack.packb([kind_of(name), *fields])


@pytest.mark.parametrize(("name", "index"), EACH_FIELD)
def test_each_field_has_its_range(name, index):
    field = FIELDS[name][index]
    for value in field.good:
        message = wire.unpack(with_field(name, index, value))
        assert (message[index], wire.unpack(wire.pack(message))) == (value, message)
    for value in (*field.bad, *EXTENSIONS, NESTED):
        assert refusal(with_field(name, index, value)) == "malformed_header", value


@pytest.mark.parametrize("name", FIELDS)
def test_fields_that_a_later_release_appends_are_passed_over(name):
    """So a field is no new protocol. Those that are known are checked all the same."""
    message = EXAMPLES[name]
    spelled_out = [kind_of(name), *message]
    for more in ([None], ["x", 1, [b""]]):
        assert wire.unpack(msgpack.packb([*spelled_out, *more])) == message
    assert refusal(msgpack.packb([*spelled_out[:-1], NESTED, None])) == "malformed_header"
    appended = type(message)._field_defaults
    assert refusal(msgpack.packb(spelled_out[: len(message) - len(appended)])) == "malformed_header"
    for field in appended:
        said = message._replace(**{field: FIELDS[name][-1].good[-1]})
        assert wire.pack(said)[1:] != wire.pack(message)[1:]


# -------------------- whatever else comes


def test_what_is_cut_or_followed_by_something():
    for frame in FRAMES:
        for length in range(len(frame)):
            assert refusal(frame[:length]) == "malformed_header"
        for tail in (b"\x00", b"\xc0", b"\xc1", frame):
            assert refusal(frame + tail) == "malformed_header"


def test_what_is_no_array_and_unknown_kinds():
    for kind in (12, 255, -1, 2**63, True, False, 0.0, "0", b"", None, [0], {}):
        assert refusal(msgpack.packb([kind, *EXAMPLES["ByeOk"]])) == "unknown_type"
    wholes = (None, 5, 1.5, "text", b"bytes", True, {}, {"kind": 0}, [], EXTENSIONS[0], [0] * 65)
    for whole in wholes:
        assert refusal(msgpack.packb(whole)) == "malformed_header", whole
    # Lengths that are only claimed: arrays, maps, strings, blobs of 4 GiB.
    for claim in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"):
        assert refusal(claim + b"\xff" * 4 + b"\x00" * 20) == "malformed_header"
        assert refusal(b"\x92\x0b" + claim + b"\xff" * 4 + b"\x00" * 20) == "malformed_header"


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa0"], ids=["arrays", "maps"])
def test_deep_nesting_ends_nothing_but_itself(opening):
    for depth in (10, 400, 900, 1000, 1015, 1100, 4000):
        nested = opening * depth + b"\xc0"
        assert refusal(b"\x92\x0b" + nested) == "malformed_header"
        for before in (b"", *(frame[:2] for frame in FRAMES)):
            assert refusal(before + nested) in {"malformed_header", "unknown_type"}


def test_text_that_is_no_text():
    frame = wire.pack(EXAMPLES["Hello"])
    assert refusal(frame.replace(b"0.1.0", b"0.\xff.0")) == "malformed_header"
    # A lone surrogate, as UTF-8 does not have it.
    assert refusal(frame.replace(b"0.1.0", b"0\xed\xa0\x800")) == "malformed_header"
    # Half a text of bytes: 1001 characters, 2002 bytes.
    assert refusal(with_field("Reject", 1, "é" * 1001)) == "malformed_header"


@pytest.mark.parametrize("frame", FRAMES)
def test_damaged_messages_are_messages_or_refused(frame):
    rng = random.Random(1)
    for _ in range(500):
        damaged = bytearray(frame)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            message = wire.unpack(bytes(damaged))
        except ProtocolError:
            continue
        assert wire.unpack(wire.pack(message)) == message
