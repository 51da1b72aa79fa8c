"""Messages with bodies: sizes from the schema, views instead of copies. Where what lies in a body
is in test_protocol_page.py."""

import contextlib

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from impala_async.errors import ConfigError, ProtocolError
from impala_async.wire import messages as wire
from tests.learner.columns import planes_of, small_schema


def data_of(columns):
    return wire.Data(b"\xcc" * 16, 5, 3, 1000, 3, columns, 0, 99, b"overwritten")


def header_of(frames):
    return wire.unpack(bytes(frames[0]))


def refusal(call, *args, says=None):
    with pytest.raises(ProtocolError, match=says) as caught:
        call(*args)
    return caught.value.reason


def test_from_eight_kib_on_a_body_has_its_own_frames():
    for total, num_frames in ((wire.MAX_INLINE_BYTES - 8, 1), (wire.MAX_INLINE_BYTES, 3)):
        obs, small = np.zeros((1, total - 72), np.uint8), np.zeros((1, 64), np.uint8)
        assert len(wire.encode_data(data_of(1), obs, small, [(0.0, 1)])) == num_frames
        assert len(wire.encode_data(data_of(1), obs, small, [])) == 1


@pytest.mark.parametrize("num_obs", [1, 1000])
@pytest.mark.parametrize("episodes", [[], [(1.5, 2)], [(1.5, 2), (-1.25, 1)]])
def test_sizes_come_from_the_schema_and_a_body_in_one_block_makes_the_same_frames(
    num_obs, episodes
):
    schema = small_schema(num_obs=num_obs)
    planes = planes_of(schema, 2)
    frames = [bytes(f) for f in wire.encode_data(data_of(2), planes.obs, planes.small, episodes)]
    parts = [
        planes.obs.tobytes(),
        planes.small.tobytes() + np.array(episodes, wire.EPISODE).tobytes(),
    ]
    body, sizes = b"".join(parts), wire.body_sizes(schema.layout, 2, len(episodes))
    assert sizes == wire.BodySizes(
        len(parts[0]), planes.small.nbytes + wire.EPISODE_BYTES * len(episodes)
    )
    header = header_of(frames)
    is_inline = num_obs == 1
    assert header == data_of(2)._replace(
        num_episodes=len(episodes), body=body if is_inline else None
    )
    assert frames[1:] == ([] if is_inline else parts)
    found = wire.split_inline(body, sizes)
    assert [(part.obj is body, bytes(part)) for part in found] == [(True, part) for part in parts]
    ended = np.frombuffer(found[1][planes.small.nbytes :], wire.EPISODE)
    again = wire.encode_data(header, planes.obs, planes.small, ended)
    assert [bytes(frame) for frame in again] == frames
    assert [tuple(each) for each in ended.tolist()] == episodes
    for wrong in (body[1:], body + b"x", b""):
        says = f"{len(wrong)} bytes, not {sum(sizes)}"
        assert refusal(wire.split_inline, wrong, sizes, says=says) == "wrong_size"


def test_only_a_body_that_is_not_inline_is_compressed_and_only_if_it_pays():
    even, noise = 0, np.random.default_rng(0).integers(0, 256, (2, 1 << 16), np.uint8)
    for num_obs, content, num_frames, codec in (
        (1, even, 1, wire.PLAIN),
        (1024, even, 3, wire.ZSTD),
        (1024, noise, 3, wire.PLAIN),
    ):
        planes = planes_of(small_schema(num_obs=num_obs), 2)
        planes.obs[:] = content if content is even else content[:, : planes.obs.shape[1]]
        frames = wire.encode_data(data_of(2), planes.obs, planes.small, [], is_compressed=True)
        assert (header_of(frames).codec, len(frames)) == (codec, num_frames)
        if codec == wire.ZSTD:
            target = bytearray(planes.obs.nbytes)
            wire.decompress_into(memoryview(target), memoryview(frames[1]))
            assert target == planes.obs.tobytes()


def test_observations_are_sent_from_where_they_are():
    slot = planes_of(small_schema(num_obs=1024), 8)
    header, obs, small = wire.encode_data(data_of(3), slot.obs[2:5], slot.small[2:5], [])
    view = np.frombuffer(obs, np.uint8)
    assert (view.ctypes.data, len(view)) == (slot.obs[2].ctypes.data, slot.obs[2:5].nbytes)
    assert not np.shares_memory(np.frombuffer(small, np.uint8), slot.small)
    assert len(header) < 64


def test_settings_that_cannot_travel_are_refused():
    overhead = len(wire.encode_settings({"x": "y" * 60000})) - 60000
    longest = "y" * (wire.MAX_SETTINGS_BYTES - overhead)
    assert msgpack.unpackb(wire.encode_settings({"x": longest})) == {"x": longest}
    with pytest.raises(ConfigError, match=r"^env\.kwargs: .* take 65537 bytes: shorten"):
        wire.encode_settings({"x": longest + "y"})
    for value in (2**64, -(2**63) - 1, "\ud800", object(), {1, 2}):
        with pytest.raises(ConfigError, match=r"^env\.kwargs: .* cannot be sent"):
            wire.encode_settings({"env": {"kwargs": {"x": value}}})


def unpacked(size, frame):
    target = bytearray(size)
    wire.decompress_into(memoryview(target), memoryview(frame))
    return target


@given(st.binary(max_size=5000))
def test_it_comes_out_as_it_went_in(plain):
    assert unpacked(len(plain), wire.compress(memoryview(plain))) == plain


FRAME = wire.compress(memoryview(b"abc" * 100))
UNFIT = {
    "empty": b"",
    "other": b"no zstd at all",
    "cut": FRAME[:-3],
    "cut early": FRAME[:6],
    "magic": bytes([FRAME[0] ^ 1]) + FRAME[1:],
    "shorter": wire.compress(memoryview(b"abc" * 99)),
    "longer": wire.compress(memoryview(b"abc" * 101)),
    "bomb": wire.compress(memoryview(bytes(1 << 28))),
    "unsaid": zstandard.ZstdCompressor(write_content_size=False).compress(b"abc" * 100),
    "two": FRAME + FRAME,
    "more behind": FRAME + b"more",
}


def test_what_does_not_fill_the_target_is_refused():
    for what, frame in UNFIT.items():
        assert refusal(unpacked, 300, frame) == "wrong_size", what
    rng = np.random.default_rng(1)
    for _ in range(300):
        damaged = bytearray(FRAME)
        damaged[rng.integers(len(damaged))] ^= 1 << int(rng.integers(8))
        with contextlib.suppress(ProtocolError):
            unpacked(300, bytes(damaged))
