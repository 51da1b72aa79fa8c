"""The messages as literal bytes, so that none changes unnoticed, and there and back."""

import math
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async import errors
from impala_async.wire import messages as wire
from impala_async.wire.messages import (
    Bye,
    ByeOk,
    Data,
    Get,
    Grant,
    Heartbeat,
    Hello,
    Message,
    NotModified,
    Reject,
    Spec,
    WeightsReply,
    Welcome,
    pack,
    unpack,
)

A = bytes(range(16))
B = b"\xbb" * 16
C = b"\xcc" * 16
A_HEX = "c410" + A.hex()
B_HEX = "c410" + B.hex()
C_HEX = "c410" + C.hex()

GOLDEN: list[tuple[Message, str]] = [
    (Hello(1, A, "0.1.0", B, 3, 300), f"970001{A_HEX}a5302e312e30{B_HEX}03cd012c"),
    (
        Welcome(B, 3, C, 2, 5556, "/r/data", "/r/weights", "/r/nonce", A, 10.0, 2.0, 16),
        f"9d01{B_HEX}03{C_HEX}02cd15b4a72f722f64617461aa2f722f77656967687473a82f722f6e6f6e6365"
        f"{A_HEX}cb4024000000000000cb400000000000000010",
    ),
    (Spec(C, A, B, 8, 1), f"9602{C_HEX}{A_HEX}{B_HEX}0801"),
    (
        Grant(C, 7, 5, 3, 70000, [[6, 1], [5, 4]]),
        f"9703{C_HEX}070503ce0001117092920601920504",
    ),
    (
        Reject(3, "rows: 50 here, 20 there", -1.0),
        "940403b7726f77733a20353020686572652c203230207468657265cbbff0000000000000",
    ),
    (Data(C, 5, 3, 70000, 50, 8, 0, 2, None), f"9a05{C_HEX}0503ce0001117032080002c0"),
    (Data(C, 5, 3, 70000, 50, 8, 0, 0, b"\1\2"), f"9a05{C_HEX}0503ce0001117032080000c4020102"),
    (Get(C, 3, 69999), f"9406{C_HEX}03ce0001116f"),
    (WeightsReply(3, 70000, A, B), f"950703ce00011170{A_HEX}{B_HEX}"),
    (NotModified(3, 70000), "930803ce00011170"),
    (
        Heartbeat(C, {"env_time_ms": 1.5}),
        f"9309{C_HEX}81ab656e765f74696d655f6d73cb3ff8000000000000",
    ),
    (Bye(C, 2), f"930a{C_HEX}02"),
    (ByeOk(C), f"920b{C_HEX}"),
]


@pytest.mark.parametrize(("message", "frame"), GOLDEN, ids=lambda value: type(value).__name__)
def test_golden_bytes(message: Message, frame: str) -> None:
    assert pack(message).hex() == frame
    assert unpack(bytes.fromhex(frame)) == message
    assert type(unpack(bytes.fromhex(frame))) is type(message)


def test_appended_fields_say_nothing_to_those_who_do_not_know_them() -> None:
    hello = GOLDEN[0][0]
    assert isinstance(hello, Hello)
    numbered = hello._replace(number=3)
    assert pack(numbered)[1:-1] == pack(hello)[1:]
    assert unpack(pack(numbered)) == numbered
    assert unpack(pack(Bye(C, 2, "it broke"))) == Bye(C, 2, "it broke")
    assert unpack(pack(Spec(C, A, B, 8, 1, 1))) == Spec(C, A, B, 8, 1, gives_way=1)
    assert unpack(pack(Grant(C, 7, 5, 3, 9, [], 0))) == Grant(C, 7, 5, 3, 9, [], again=0)
    for field in (-2, 4097, True, "1"):
        with pytest.raises(errors.ProtocolError, match=r"Hello\.number"):
            unpack(pack(hello._replace(number=field)))


def test_what_others_wrote_is_one_line() -> None:
    assert wire.plain("an actor, Ä") == "an actor, Ä"
    assert wire.plain("one\ntwo\x1b[2J") == "one\\ntwo\\x1b[2J"


def test_every_kind_has_golden_bytes() -> None:
    assert {type(message) for message, _ in GOLDEN} == set(get_args(Message))


def test_what_numbers_stand_for() -> None:
    assert wire.PROTOCOL == 1
    verdicts = "duplicate invalid nonfinite unknown_session stale dead_branch"
    codes = "hello_again full protocol mismatch not_allowed bad_message wrong_port"
    assert " ".join(wire.VERDICTS) == verdicts
    assert " ".join(wire.REJECT_CODES) == codes
    assert wire.BYE_REASONS == ("finished", "restarting", "leaving")
    assert (wire.MAX_HEADER_BYTES, wire.MAX_INLINE_BYTES) == (4096, 8192)
    assert (wire.MAX_SETTINGS_BYTES, wire.MAX_TEXT_BYTES) == (65536, 2000)
    assert (wire.MAX_COLUMNS, wire.MAX_TIMERS, wire.MAX_VERDICTS) == (4096, 16, 64)


def test_a_view_is_read_like_bytes() -> None:
    message, frame = GOLDEN[0]
    buffer = memoryview(bytearray(bytes.fromhex(frame) + b"rest"))
    assert unpack(buffer[:-4]) == message


def test_the_largest_headers_fit() -> None:
    seqs = [[2**62, len(wire.VERDICTS) - 1]] * wire.MAX_VERDICTS
    grant = Grant(C, 2**62, 2**62, 2**31, 2**62, seqs)
    welcome = Welcome(
        *(B, 2**31, C, 2**31, 65535, "ä" * 255, "ä" * 255, "ä" * 255, A, 1e11, 1e11, 4096),
    )
    heartbeat = Heartbeat(C, {"ä" * 30 + f"{i:02d}": 1e11 for i in range(wire.MAX_TIMERS)})
    reject = Reject(0, "x" * wire.MAX_TEXT_BYTES, 1.0)
    for message in (grant, welcome, heartbeat, reject):
        assert len(pack(message)) <= wire.MAX_HEADER_BYTES
        assert unpack(pack(message)) == message


# -------------------- there and back

ids = st.binary(min_size=16, max_size=16)
counts = st.integers(0, 2**62)
epochs = st.integers(0, 2**31)
columns = st.integers(1, wire.MAX_COLUMNS)
numbers = st.floats(-1e11, 1e11) | st.integers(-(10**11), 10**11)
paths = st.text(max_size=255)
bodies = st.none() | st.binary(max_size=64) | st.just(b"x" * wire.MAX_INLINE_BYTES)
verdicts = st.lists(
    st.tuples(counts, st.integers(0, len(wire.VERDICTS) - 1)).map(list), max_size=wire.MAX_VERDICTS
)
spans = st.floats(1e-6, 1e11) | st.integers(1, 10**11)
timers = st.dictionaries(st.text(max_size=32), numbers, max_size=wire.MAX_TIMERS)
reject_texts = st.text(max_size=500)
reasons = st.integers(0, 2)
codes = st.integers(0, 5)

any_message: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Hello,
        *(st.integers(0, 255), ids, st.text(max_size=64), ids, epochs, st.integers(0, 2**61)),
        st.integers(-1, wire.MAX_COLUMNS),
    ),
    st.builds(
        Welcome,
        *(ids, epochs, ids, st.integers(0, 2**31), st.integers(1, 65535), paths, paths, paths),
        *(ids, spans, spans, columns),
    ),
    st.builds(Spec, ids, ids, ids, columns, columns, st.integers(0, 1)),
    st.builds(
        Grant, *(ids, counts, counts, epochs, counts, verdicts), st.integers(wire.NO_SEQ, 2**62)
    ),
    st.builds(Reject, codes, reject_texts, numbers),
    st.builds(
        Data,
        *(ids, counts, epochs, counts, st.integers(1, 65535), columns, st.just(0)),
        *(st.integers(0, 2**28), bodies),
    ),
    st.builds(Get, ids, epochs, counts),
    st.builds(WeightsReply, epochs, counts, ids, ids),
    st.builds(NotModified, epochs, counts),
    st.builds(Heartbeat, ids, timers),
    st.builds(Bye, ids, reasons, st.text(max_size=wire.MAX_WHY)),
    st.builds(ByeOk, ids),
)


@settings(deadline=None)
@given(any_message)
def test_there_and_back(message: Message) -> None:
    back = unpack(pack(message))
    assert back == message
    assert type(back) is type(message)
    assert pack(back) == pack(message)


@settings(deadline=None)
@given(any_message)
def test_a_message_that_came_in_holds_only_plain_values(message: Message) -> None:
    def plain(value: Any) -> bool:
        if isinstance(value, list):
            return all(map(plain, value))
        if isinstance(value, dict):
            return all(plain(key) and plain(item) for key, item in value.items())
        return type(value) in (int, str, bytes, type(None)) or (
            type(value) is float and math.isfinite(value)
        )

    assert all(map(plain, unpack(pack(message))))


def test_integers_pass_where_numbers_are_wanted_and_stay_integers() -> None:
    frame = msgpack.packb([9, C, {"env_time_ms": 2}])
    assert unpack(frame) == Heartbeat(C, {"env_time_ms": 2})
