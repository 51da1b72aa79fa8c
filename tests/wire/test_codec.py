"""Messages with bodies: literal frames, sizes from the schema, views instead of copies."""

import contextlib
from typing import Any

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.config.run import ActorSettings, RunConfig
from impala_async.errors import ProtocolError
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, Bytes2D, ObsSpec, Schema
from impala_async.trajectory import columns_over
from impala_async.weights import Version, Weights
from impala_async.wire.codec import (
    EPISODE,
    EPISODE_BYTES,
    BodySizes,
    body_sizes,
    compress,
    decode_episodes,
    decode_settings,
    decode_weights,
    decompress_into,
    encode_again,
    encode_data,
    encode_settings,
    split_inline,
)
from impala_async.wire.messages import (
    MAX_INLINE_BYTES,
    MAX_SETTINGS_BYTES,
    Data,
    WeightsReply,
    pack,
    unpack,
)

SESSION = b"\xcc" * 16
HEADER = "9a05c410" + "cc" * 16 + "0503cd03e802"


def schema_of(obs_size: int, rows: int = 2) -> Schema:
    return Schema(
        obs=ObsSpec((ArraySpec("", (obs_size,), "float32"),)),
        action=ActionSpec((ActionPart("", "discrete", (2,)),)),
        rows=rows,
    )


def data_of(columns: int, rows: int = 2) -> Data:
    return Data(SESSION, 5, 3, 1000, rows, columns, 0, 99, b"overwritten")


def planes(schema: Schema, columns: int, fill: int = 0) -> tuple[Bytes2D, Bytes2D]:
    layout = schema.layout
    return (
        np.full((columns, layout.obs_bytes), fill, np.uint8),
        np.full((columns, layout.small_bytes), fill, np.uint8),
    )


def filled(schema: Schema) -> tuple[Bytes2D, Bytes2D]:
    """One column of two rows whose every number can be found again in the bytes."""
    obs, small = planes(schema, 1)
    columns = columns_over(schema, obs, small)
    columns.obs[""][0, :, 0] = (1.0, 2.0, 3.0)
    columns.log_probs_CT[0] = (-0.5, -1.0)
    columns.rewards_CT[0] = (1.0, 0.0)
    columns.actions[""][0] = (1, 0)
    columns.terminated_CT[0] = (True, False)
    columns.mask_CT[0] = (True, False)
    return obs, small


SMALL = (
    "000000bf000080bf"  # log-probabilities
    "0000803f00000000"  # rewards
    "0100000000000000"  # actions
    "0100000000000000"  # terminated, and what aligns the next leaf
    "0000000000000000"  # truncated
    "0100000000000000"  # mask
    "00000000000000000000000000000000"  # what aligns the next column
)
EPISODES = "0000004007000000" + "000020c001000000"


def test_golden_inline_frame() -> None:
    obs, small = filled(schema_of(1))
    frames = encode_data(data_of(1), obs, small, [(2.0, 7), (-2.5, 1)])
    obs_hex = "0000803f0000004000004040" + "00" * 52
    assert [bytes(frame).hex() for frame in frames] == [
        f"{HEADER}010002c490{obs_hex}{SMALL}{EPISODES}"
    ]


def test_golden_frames_that_are_not_inline() -> None:
    obs, small = filled(schema_of(1024))
    frames = encode_data(data_of(1), obs, small, [(2.0, 7), (-2.5, 1)])
    row = "00" * 1023 * 4
    assert [bytes(frame).hex() for frame in frames] == [
        f"{HEADER}010002c0",
        f"0000803f{row}00000040{row}00004040{row}",
        f"{SMALL}{EPISODES}",
    ]


def test_header_counts_the_episodes_itself() -> None:
    schema = schema_of(1)
    for episodes in ([], [(1.0, 2)], [(1.0, 2)] * 3):
        (frame,) = encode_data(data_of(1), *planes(schema, 1), episodes)
        message = unpack(bytes(frame))
        assert isinstance(message, Data)
        assert message.num_episodes == len(episodes)
        assert message.body is not None
        assert len(message.body) == sum(body_sizes(schema.layout, 1, len(episodes)))


@pytest.mark.parametrize(
    ("total", "num_frames"), [(MAX_INLINE_BYTES - 8, 1), (MAX_INLINE_BYTES, 3)]
)
def test_from_eight_kib_on_a_body_has_its_own_frames(total: int, num_frames: int) -> None:
    obs, small = np.zeros((1, total - 72), np.uint8), np.zeros((1, 64), np.uint8)
    frames = encode_data(data_of(1), obs, small, [(0.0, 1)])
    assert len(frames) == num_frames
    assert len(encode_data(data_of(1), obs, small, [])) == 1


@pytest.mark.parametrize("obs_size", [1, 1000])
@pytest.mark.parametrize("episodes", [[], [(1.5, 2)]])
def test_a_body_in_one_block_makes_the_same_frames(
    obs_size: int, episodes: list[tuple[float, int]]
) -> None:
    schema, data = schema_of(obs_size), data_of(2)._replace(num_episodes=len(episodes))
    obs, small = planes(schema, 2, fill=7)
    frames = encode_data(data, obs, small, episodes)
    body = b"".join((obs.tobytes(), small.tobytes(), np.array(episodes, EPISODE).tobytes()))
    sizes = body_sizes(schema.layout, 2, len(episodes))
    again = encode_again(data, memoryview(body), sizes)
    assert [bytes(frame) for frame in again] == [bytes(frame) for frame in frames]
    assert len(frames) == (1 if obs_size == 1 else 3)
    with pytest.raises(ProtocolError, match="the body has"):
        encode_again(data, memoryview(body)[1:], sizes)


def test_observations_are_sent_from_where_they_are() -> None:
    schema = schema_of(1024)
    slot_obs, slot_small = planes(schema, 8)
    obs, small = slot_obs[2:5], slot_small[2:5]
    _, obs_frame, small_frame = encode_data(data_of(3), obs, small, [])
    view = np.frombuffer(obs_frame, np.uint8)
    assert np.shares_memory(view, slot_obs)
    assert view.ctypes.data == slot_obs[2].ctypes.data
    assert len(view) == 3 * schema.layout.obs_bytes
    assert not np.shares_memory(np.frombuffer(small_frame, np.uint8), slot_small)
    slot_obs[4, -1] = 77
    assert view[-1] == 77


def test_columns_follow_each_other() -> None:
    schema = schema_of(1)
    obs, small = planes(schema, 2)
    obs[0], obs[1], small[0], small[1] = 1, 2, 3, 4
    (frame,) = encode_data(data_of(2), obs, small, [])
    message = unpack(bytes(frame))
    assert isinstance(message, Data)
    assert message.body == b"\1" * 64 + b"\2" * 64 + b"\3" * 64 + b"\4" * 64


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 64), st.integers(1, 50), st.integers(0, 500))
def test_sizes_come_from_the_schema(size: int, rows: int, columns: int, num_episodes: int) -> None:
    schema = schema_of(size, rows)
    sizes = body_sizes(schema.layout, columns, num_episodes)
    obs, small = planes(schema, columns)
    assert sizes == BodySizes(obs.nbytes, small.nbytes + 8 * num_episodes)
    assert sizes.obs >= columns * (rows + 1) * size * 4
    frames = encode_data(data_of(columns, rows), obs, small, [(0.0, 1)] * num_episodes)
    if len(frames) == 3:
        assert (len(frames[1]), len(frames[2])) == sizes
    else:
        body = unpack(bytes(frames[0])).body  # type: ignore[union-attr]
        assert body is not None
        assert tuple(map(len, split_inline(body, sizes))) == sizes


def test_inline_parts_are_views() -> None:
    body = bytes(range(100))
    obs, small = split_inline(body, BodySizes(64, 36))
    assert obs == body[:64]
    assert small == body[64:]
    assert obs.obj is body
    assert small.obj is body


@pytest.mark.parametrize("length", [0, 1, 99, 101, 8192])
def test_inline_body_of_a_wrong_size(length: int) -> None:
    with pytest.raises(ProtocolError, match=rf"{length} bytes, not 100") as caught:
        split_inline(bytes(length), BodySizes(64, 36))
    assert caught.value.reason == "wrong_size"


def test_episodes_there_and_back() -> None:
    obs, small = planes(schema_of(1), 1)
    (frame,) = encode_data(data_of(1), obs, small, [(475.5, 500), (-1.25, 1)])
    body = unpack(bytes(frame)).body  # type: ignore[union-attr]
    assert body is not None
    tail = memoryview(body)[-2 * EPISODE_BYTES :]
    episodes = decode_episodes(tail)
    assert episodes["total"].tolist() == [475.5, -1.25]
    assert episodes["length"].tolist() == [500, 1]
    assert np.shares_memory(episodes, np.frombuffer(body, np.uint8))
    assert len(decode_episodes(memoryview(b""))) == 0


# -------------------- settings


def test_settings_there_and_back() -> None:
    config = RunConfig.model_validate(
        {"env": {"id": "X", "kwargs": {"a": [1, 2.5, None, {"b": "ü"}], "c": True}}, "seed": 7}
    )
    settings_ = ActorSettings.of(config)
    frame = encode_settings(settings_.model_dump(mode="json"))
    assert ActorSettings.model_validate(decode_settings(frame)) == settings_


def test_settings_have_a_largest_size() -> None:
    overhead = len(encode_settings({"x": "y" * 60000})) - 60000
    longest = "y" * (MAX_SETTINGS_BYTES - overhead)
    assert decode_settings(encode_settings({"x": longest})) == {"x": longest}
    with pytest.raises(ProtocolError, match="65537 bytes: shorten") as caught:
        encode_settings({"x": longest + "y"})
    assert caught.value.reason == "oversized_settings"
    with pytest.raises(ProtocolError) as caught:
        decode_settings(msgpack.packb({"x": longest + "y"}))
    assert caught.value.reason == "oversized_settings"


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, "\ud800", object(), {1, 2}])
def test_settings_that_cannot_travel(value: Any) -> None:
    with pytest.raises(ProtocolError, match="cannot be sent") as caught:
        encode_settings({"env": {"kwargs": {"x": value}}})
    assert caught.value.reason == "malformed_settings"


@pytest.mark.parametrize(
    "frame",
    [
        *(b"", b"\xc1", b"\x81", b"\x80\x80", msgpack.packb([1]), msgpack.packb(None)),
        *(msgpack.packb({1: 2}), msgpack.packb({"x": msgpack.ExtType(1, b"x")}), b"\xff" * 9),
        *(b"\x81\xa1x" + b"\x91" * 3000, b"\x81\xa1x" + b"\x81\xa0" * 3000),
    ],
)
def test_settings_that_are_none(frame: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_settings(frame)
    assert caught.value.reason == "malformed_settings"


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_settings_of_random_bytes(frame: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode_settings(frame), dict)


# -------------------- weights


def reply_for(content: bytes) -> WeightsReply:
    digest = Weights(Version(3, 1000), np.frombuffer(content, np.uint8)).digest()
    return WeightsReply(3, 1000, bytes(16), digest)


def test_weights_are_a_view_of_their_frame() -> None:
    content = bytes(range(256))
    weights = decode_weights(reply_for(content), [b"header", content])
    assert weights.version == Version(3, 1000)
    assert bytes(weights.buffer) == content
    assert np.shares_memory(weights.buffer, np.frombuffer(content, np.uint8))
    assert weights.digest() == Weights(Version(1, 0), weights.buffer).digest()


@pytest.mark.parametrize("index", [0, 100, 255])
def test_one_wrong_bit_is_noticed(index: int) -> None:
    content = bytearray(range(256))
    reply = reply_for(bytes(content))
    content[index] ^= 1
    with pytest.raises(ProtocolError, match=r"3\.1000 are damaged") as caught:
        decode_weights(reply, [b"header", bytes(content)])
    assert caught.value.reason == "damaged_weights"


@pytest.mark.parametrize("content", [bytes(range(255)), bytes([*range(256), 0]), b""])
def test_weights_cut_short_or_grown_are_noticed(content: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_weights(reply_for(bytes(range(256))), [b"header", content])
    assert caught.value.reason == "damaged_weights"


@pytest.mark.parametrize("num_frames", [0, 1, 3])
def test_weights_come_with_one_frame(num_frames: int) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_weights(reply_for(b"x"), [b"x"] * num_frames)
    assert caught.value.reason == "wrong_frame_count"


def test_header_of_a_big_body_is_small() -> None:
    obs, small = planes(schema_of(1024), 8)
    header, *_ = encode_data(data_of(8), obs, small, [])
    assert len(header) == len(pack(data_of(8)._replace(num_episodes=0, body=None))) < 64


@given(st.binary(max_size=5000))
def test_it_comes_out_as_it_went_in(plain: bytes) -> None:
    target = bytearray(len(plain))
    decompress_into(memoryview(target), memoryview(compress(memoryview(plain))))
    assert target == plain


def test_what_repeats_becomes_small() -> None:
    assert len(compress(memoryview(bytes(100_000)))) < 100


FRAME = compress(memoryview(b"abc" * 100))
NAMELESS = zstandard.ZstdCompressor(write_content_size=False).compress(b"abc" * 100)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"no zstd at all",
        FRAME[:-3],
        FRAME[:6],
        bytes([FRAME[0] ^ 1]) + FRAME[1:],
        compress(memoryview(b"abc" * 99)),
        compress(memoryview(b"abc" * 101)),
        compress(memoryview(bytes(1 << 28))),
        NAMELESS,
        FRAME + FRAME,
        FRAME + b"more",
    ],
    ids=[
        *("empty", "other", "cut", "cut early", "magic", "shorter", "longer", "bomb", "unsaid"),
        *("two", "more behind"),
    ],
)
def test_what_does_not_fill_the_target_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError) as error:
        decompress_into(memoryview(bytearray(300)), memoryview(frame))
    assert error.value.reason == "wrong_size"


def test_damage_is_refused_or_at_least_bounded() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        frame = bytearray(FRAME)
        frame[rng.integers(len(frame))] ^= 1 << int(rng.integers(8))
        target = bytearray(300)
        try:
            decompress_into(memoryview(target), memoryview(frame))
        except ProtocolError:
            continue
        assert len(target) == 300
