"""What was compressed comes out as it was, or is refused."""

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from impala_async.errors import ProtocolError
from impala_async.wire.compression import compress, decompress_into


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
    ],
    ids=["empty", "other", "cut", "cut early", "magic", "shorter", "longer", "bomb", "unsaid"],
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
