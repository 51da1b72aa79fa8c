"""Observations squeezed for a thin line: zstd, at the level that costs least.

The size of what comes out is known from the schema, and whatever would be longer or shorter is
refused before it is unpacked.
"""

import zstandard

from impala_async.errors import ProtocolError

PLAIN, ZSTD = 0, 1
_LEVEL = 1

_compressor = zstandard.ZstdCompressor(level=_LEVEL)
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
        target[:] = _decompressor.decompress(frame, max_output_size=len(target))
    except (zstandard.ZstdError, ValueError) as error:
        raise ProtocolError("wrong_size", f"it cannot be unpacked: {error}") from None
