"""Messages with bodies, to frames and back. Sizes come from the agreed schema, never the wire.

The body of `Data` is two frames: the observation planes of its columns one after the other, then
their small planes followed by the statistics of the episodes that ended in them. A body under
8 KiB goes inline, inside the header frame: one frame costs half of what three do. On a thin line
the observations may be one zstd frame, at the level that costs least.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgpack
import numpy as np
import zstandard
from numpy.typing import NDArray

from impala_async.errors import ProtocolError
from impala_async.schema import Bytes2D, ColumnLayout
from impala_async.weights import Version, Weights
from impala_async.wire.messages import (
    MAX_INLINE_BYTES,
    MAX_SETTINGS_BYTES,
    Data,
    WeightsReply,
    pack,
)

Frame = bytes | memoryview
PLAIN, ZSTD = 0, 1
EPISODE_BYTES = 8
EPISODE = np.dtype([("total", "<f4"), ("length", "<i4")])

_compressor = zstandard.ZstdCompressor(level=1)
_decompressor = zstandard.ZstdDecompressor()


def compress(plain: memoryview) -> bytes:
    """The bytes as one zstd frame that says how long they are."""
    return _compressor.compress(plain)


def decompress_into(target: memoryview, frame: memoryview) -> None:
    """Unpack a frame that must fill the target exactly; ProtocolError if it does not."""
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if size != len(target):
            raise ProtocolError("wrong_size", f"it unpacks to {size} bytes, not {len(target)}")
        target[:] = _decompressor.decompress(
            frame, max_output_size=len(target), allow_extra_data=False
        )
    except (zstandard.ZstdError, ValueError) as error:
        raise ProtocolError("wrong_size", f"it cannot be unpacked: {error}") from None


class BodySizes(NamedTuple):
    """How long the two parts of a body must be."""

    obs: int
    small: int


def body_sizes(layout: ColumnLayout, columns: int, num_episodes: int) -> BodySizes:
    """The sizes that a body must have."""
    return BodySizes(
        columns * layout.obs_bytes, columns * layout.small_bytes + num_episodes * EPISODE_BYTES
    )


def encode_data(
    data: Data,
    obs: Bytes2D,
    small: Bytes2D,
    episodes: Sequence[tuple[float, int]],
    compress_obs: Callable[[Bytes2D], bytes | None] | None = None,
) -> list[Frame]:
    """The frames of one trajectory message; big ones are views of the planes, not copies.

    `compress_obs` may compress the observations of a message that is not inline.
    """
    tail = np.array(episodes, EPISODE).tobytes() if episodes else b""
    data = data._replace(num_episodes=len(episodes))
    obs_frame, small_frame = obs.data.cast("B"), b"".join((small.data.cast("B"), tail))
    if len(obs_frame) + len(small_frame) < MAX_INLINE_BYTES:
        return [pack(data._replace(body=b"".join((obs_frame, small_frame))))]
    compressed = None if compress_obs is None else compress_obs(obs)
    if compressed is None:
        return [pack(data._replace(body=None)), obs_frame, small_frame]
    return [pack(data._replace(body=None, codec=ZSTD)), compressed, small_frame]


def encode_again(data: Data, body: memoryview, sizes: BodySizes) -> list[Frame]:
    """The frames of a message whose whole body lies in one block; big ones are views of it."""
    parts = split_inline(body, sizes)
    if len(body) < MAX_INLINE_BYTES:
        return [pack(data._replace(body=bytes(body)))]
    return [pack(data._replace(body=None)), *parts]


def split_inline(body: Frame, sizes: BodySizes) -> tuple[memoryview, memoryview]:
    """The two parts of a body in one block."""
    if len(body) != sum(sizes):
        raise ProtocolError("wrong_size", f"the body has {len(body)} bytes, not {sum(sizes)}")
    view = memoryview(body)
    return view[: sizes.obs], view[sizes.obs :]


def decode_episodes(tail: Frame) -> NDArray[np.void]:
    """Return and length of the episodes in the tail of a small frame."""
    return np.frombuffer(tail, EPISODE)


def encode_settings(settings: dict[str, object]) -> bytes:
    """The second frame of `Welcome`; raises ProtocolError for what cannot travel."""
    try:
        frame: bytes = msgpack.packb(settings)
    except (ValueError, TypeError, OverflowError) as error:
        text = f"the actor's settings cannot be sent: {error}"
        raise ProtocolError("malformed_settings", text) from None
    if len(frame) > MAX_SETTINGS_BYTES:
        text = f"the actor's settings take {len(frame)} bytes: shorten env.kwargs"
        raise ProtocolError("oversized_settings", text)
    return frame


def decode_settings(frame: Frame) -> dict[str, object]:
    """The settings of `Welcome`; the caller validates them as config."""
    if len(frame) > MAX_SETTINGS_BYTES:
        raise ProtocolError("oversized_settings")
    try:
        settings = msgpack.unpackb(frame, max_ext_len=0)
    except (ValueError, RecursionError, TypeError):
        settings = None
    if not isinstance(settings, dict):
        raise ProtocolError("malformed_settings", "the settings are not a msgpack map")
    return settings


def decode_weights(reply: WeightsReply, frames: Sequence[Frame]) -> Weights:
    """The weights of a reply; raises ProtocolError if they were damaged on the way."""
    if len(frames) != 2:
        raise ProtocolError("wrong_frame_count", "weights come with one frame")
    version, buffer = Version(reply.epoch, reply.update), np.frombuffer(frames[1], np.uint8)
    weights = Weights(version, buffer, reply.layout_digest)
    if weights.digest() != reply.content_digest:
        raise ProtocolError("damaged_weights", f"weights {reply.epoch}.{reply.update} are damaged")
    return weights
