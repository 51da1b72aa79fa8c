"""Messages with bodies: literal frames, sizes from the schema, views instead of copies."""

import contextlib

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from impala_async.errors import ProtocolError
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema
from impala_async.trajectory import columns_over
from impala_async.weights import Version, Weights
from impala_async.wire.codec import (
    EPISODE,
    EPISODE_BYTES,
    PLAIN,
    ZSTD,
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
    unpack,
)

SESSION = b"\xcc" * 16
HEADER = "9a05c410" + "cc" * 16 + "0503cd03e802"


def schema_of(obs_size, rows=2):
    return Schema(
        obs=ObsSpec((ArraySpec("", (obs_size,), "float32"),)),
        action=ActionSpec((ActionPart("", "discrete", (2,)),)),
        rows=rows,
    )


def data_of(columns, rows=2):
    return Data(SESSION, 5, 3, 1000, rows, columns, 0, 99, b"overwritten")


def planes(schema, columns, fill=0):
    layout = schema.layout
    return (
        np.full((columns, layout.obs_bytes), fill, np.uint8),
        np.full((columns, layout.small_bytes), fill, np.uint8),
    )


def filled(schema):
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


def test_golden_frames():
    episodes = [(2.0, 7), (-2.5, 1)]
    obs_hex = "0000803f0000004000004040" + "00" * 52
    inline = encode_data(data_of(1), *filled(schema_of(1)), episodes)
    assert [bytes(frame).hex() for frame in inline] == [
        f"{HEADER}010002c490{obs_hex}{SMALL}{EPISODES}"
    ]
    row = "00" * 1023 * 4
    assert [
        bytes(frame).hex() for frame in encode_data(data_of(1), *filled(schema_of(1024)), episodes)
    ] == [
        f"{HEADER}010002c0",
        f"0000803f{row}00000040{row}00004040{row}",
        f"{SMALL}{EPISODES}",
    ]


def test_from_eight_kib_on_a_body_has_its_own_frames():
    for total, num_frames in ((MAX_INLINE_BYTES - 8, 1), (MAX_INLINE_BYTES, 3)):
        obs, small = np.zeros((1, total - 72), np.uint8), np.zeros((1, 64), np.uint8)
        assert len(encode_data(data_of(1), obs, small, [(0.0, 1)])) == num_frames
        assert len(encode_data(data_of(1), obs, small, [])) == 1


@pytest.mark.parametrize("obs_size", [1, 1000])
@pytest.mark.parametrize("episodes", [[], [(1.5, 2)], [(1.5, 2), (-1.25, 1)]])
def test_sizes_come_from_the_schema_and_a_body_in_one_block_makes_the_same_frames(
    obs_size, episodes
):
    schema, data = schema_of(obs_size), data_of(2)
    obs, small = planes(schema, 2, fill=7)
    frames = encode_data(data, obs, small, episodes)
    body = b"".join((obs.tobytes(), small.tobytes(), np.array(episodes, EPISODE).tobytes()))
    sizes = body_sizes(schema.layout, 2, len(episodes))
    assert sizes == BodySizes(obs.nbytes, small.nbytes + EPISODE_BYTES * len(episodes))
    header = unpack(bytes(frames[0]))
    assert isinstance(header, Data)
    assert header.num_episodes == len(episodes)
    assert header.body == (body if obs_size == 1 else None)
    assert len(frames) == (1 if obs_size == 1 else 3)
    again = encode_again(header, memoryview(body), sizes)
    assert [bytes(frame) for frame in again] == [bytes(frame) for frame in frames]
    parts = split_inline(body, sizes)
    assert [part.obj is body for part in parts] == [True, True]
    assert parts[0].tobytes() == obs.tobytes()
    ended = decode_episodes(parts[1][small.nbytes :])
    assert [tuple(each) for each in ended.tolist()] == episodes
    for wrong in (body[1:], body + b"x", b""):
        with pytest.raises(ProtocolError, match=f"{len(wrong)} bytes, not {sum(sizes)}") as caught:
            encode_again(header, memoryview(wrong), sizes)
        assert caught.value.reason == "wrong_size"


def test_only_a_body_that_is_not_inline_is_compressed_and_only_if_it_pays():
    for obs_size, compress_obs, num_frames, codec in (
        (1, lambda _: b"less", 1, PLAIN),
        (1024, lambda _: b"less", 3, ZSTD),
        (1024, lambda _: None, 3, PLAIN),
    ):
        obs, small = planes(schema_of(obs_size), 2)
        header, *others = encode_data(data_of(2), obs, small, [], compress_obs)
        message = unpack(bytes(header))
        assert isinstance(message, Data)
        assert (message.codec, 1 + len(others)) == (codec, num_frames)
        assert codec == PLAIN or others[0] == b"less"


def test_observations_are_sent_from_where_they_are():
    schema = schema_of(1024)
    slot_obs, slot_small = planes(schema, 8)
    obs, small = slot_obs[2:5], slot_small[2:5]
    _, obs_frame, small_frame = encode_data(data_of(3), obs, small, [])
    view = np.frombuffer(obs_frame, np.uint8)
    assert np.shares_memory(view, slot_obs)
    assert view.ctypes.data == slot_obs[2].ctypes.data
    assert len(view) == 3 * schema.layout.obs_bytes
    assert not np.shares_memory(np.frombuffer(small_frame, np.uint8), slot_small)
    header = encode_data(data_of(3), obs, small, [])[0]
    assert len(header) < 64


# -------------------- settings


def test_settings_have_a_largest_size():
    overhead = len(encode_settings({"x": "y" * 60000})) - 60000
    longest = "y" * (MAX_SETTINGS_BYTES - overhead)
    assert decode_settings(encode_settings({"x": longest})) == {"x": longest}
    with pytest.raises(ProtocolError, match="65537 bytes: shorten") as caught:
        encode_settings({"x": longest + "y"})
    assert caught.value.reason == "oversized_settings"
    with pytest.raises(ProtocolError) as caught:
        decode_settings(msgpack.packb({"x": longest + "y"}))
    assert caught.value.reason == "oversized_settings"


def test_settings_that_cannot_travel():
    for value in (2**64, -(2**63) - 1, "\ud800", object(), {1, 2}):
        with pytest.raises(ProtocolError, match="cannot be sent") as caught:
            encode_settings({"env": {"kwargs": {"x": value}}})
        assert caught.value.reason == "malformed_settings"


NO_SETTINGS = [
    *(b"", b"\xc1", b"\x81", b"\x80\x80", msgpack.packb([1]), msgpack.packb(None)),
    *(msgpack.packb({1: 2}), msgpack.packb({"x": msgpack.ExtType(1, b"x")}), b"\xff" * 9),
    *(b"\x81\xa1x" + b"\x91" * 3000, b"\x81\xa1x" + b"\x81\xa0" * 3000),
]


def test_settings_that_are_none():
    for frame in NO_SETTINGS:
        with pytest.raises(ProtocolError) as caught:
            decode_settings(frame)
        assert caught.value.reason == "malformed_settings", frame


# -------------------- weights


def reply_for(content):
    digest = Weights(Version(3, 1000), np.frombuffer(content, np.uint8)).digest()
    return WeightsReply(3, 1000, bytes(16), digest)


def test_weights_are_a_view_of_their_frame_and_whole():
    content = bytes(range(256))
    reply = reply_for(content)
    weights = decode_weights(reply, [b"header", content])
    assert (weights.version, bytes(weights.buffer)) == (Version(3, 1000), content)
    assert np.shares_memory(weights.buffer, np.frombuffer(content, np.uint8))
    flipped = [content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :] for i in (0, 100, 255)]
    for damaged in (*flipped, content[:-1], content + b"\0", b""):
        with pytest.raises(ProtocolError, match=r"3\.1000 are damaged") as caught:
            decode_weights(reply, [b"header", damaged])
        assert caught.value.reason == "damaged_weights"
    for num_frames in (0, 1, 3):
        with pytest.raises(ProtocolError) as caught:
            decode_weights(reply, [content] * num_frames)
        assert caught.value.reason == "wrong_frame_count"


# -------------------- compression


@given(st.binary(max_size=5000))
def test_it_comes_out_as_it_went_in(plain):
    target = bytearray(len(plain))
    decompress_into(memoryview(target), memoryview(compress(memoryview(plain))))
    assert target == plain


FRAME = compress(memoryview(b"abc" * 100))
NAMELESS = zstandard.ZstdCompressor(write_content_size=False).compress(b"abc" * 100)


UNFIT = {
    "empty": b"",
    "other": b"no zstd at all",
    "cut": FRAME[:-3],
    "cut early": FRAME[:6],
    "magic": bytes([FRAME[0] ^ 1]) + FRAME[1:],
    "shorter": compress(memoryview(b"abc" * 99)),
    "longer": compress(memoryview(b"abc" * 101)),
    "bomb": compress(memoryview(bytes(1 << 28))),
    "unsaid": NAMELESS,
    "two": FRAME + FRAME,
    "more behind": FRAME + b"more",
}


def test_what_does_not_fill_the_target_is_refused():
    for what, frame in UNFIT.items():
        with pytest.raises(ProtocolError) as error:
            decompress_into(memoryview(bytearray(300)), memoryview(frame))
        assert error.value.reason == "wrong_size", what
    rng = np.random.default_rng(1)
    for _ in range(300):
        damaged = bytearray(FRAME)
        damaged[rng.integers(len(damaged))] ^= 1 << int(rng.integers(8))
        with contextlib.suppress(ProtocolError):
            decompress_into(memoryview(bytearray(300)), memoryview(damaged))
