"""Flat buffers as views, and who descends from whom; whole histories are in
tests/wire/test_session_network.py."""

import hashlib
import zlib

import numpy as np
import pytest

from impala_async.schema import ArraySpec
from impala_async.weights import NO_VERSION, Lineage, Version, Weights, WeightsLayout

LAYOUT = WeightsLayout(
    (
        ArraySpec("first", (2, 3), "float32"),
        ArraySpec("scalar", (), "float64"),
        ArraySpec("count", (1,), "int64"),
        ArraySpec("last", (3,), "float32"),
    )
)


def test_arrays_lie_one_after_the_other_and_those_that_are_coarse_behind_all_others():
    assert LAYOUT.num_bytes == 24 + 8 + 8 + 12
    assert LAYOUT.places == (slice(0, 24), slice(24, 32), slice(32, 40), slice(40, 52))
    assert LAYOUT.dtypes == ("float32", "float64", "int64", "float32")
    layout = LAYOUT.coarse({"first", "count"})
    assert layout.dtypes == ("bfloat16", "float64", "bfloat16", "float32")
    # The model's own are what they were.
    assert layout.arrays == LAYOUT.arrays
    assert layout.num_bytes == 12 + 8 + 2 + 12
    assert layout.places == (slice(20, 32), slice(0, 8), slice(32, 34), slice(8, 20))
    assert layout.digest != LAYOUT.digest
    assert LAYOUT.coarse(()) == LAYOUT


def test_digest_is_of_names_shapes_types_and_order():
    first, *rest = LAYOUT.arrays
    others = [
        WeightsLayout((*rest, first)),
        WeightsLayout((ArraySpec("other", (2, 3), "float32"), *rest)),
        WeightsLayout((ArraySpec("first", (3, 2), "float32"), *rest)),
        WeightsLayout((ArraySpec("first", (2, 3), "int32"), *rest)),
        WeightsLayout((first,)),
        WeightsLayout(()),
    ]
    digests = {LAYOUT.digest, *(other.digest for other in others)}
    assert len(digests) == len(others) + 1
    text = b'[{"name":"w","shape":[2],"dtype":"float32"}]'
    layout = WeightsLayout((ArraySpec("w", (2,), "float32"),))
    assert layout.digest == hashlib.sha256(text).digest()[:16]


@pytest.mark.parametrize("num_bytes", [0, 1, 3, 4, 100, 101])
def test_the_content_digest_is_of_each_byte_and_of_nothing_else(num_bytes):
    buffer = np.arange(num_bytes, dtype=np.uint8)
    digest = Weights(Version(1, 1), buffer).digest()
    assert len(digest) == 16
    assert digest == Weights(Version(2, 2), buffer.copy()).digest()
    if num_bytes == 100:
        quarters = [bytes(range(start, start + 25)) for start in (0, 25, 50, 75)]
        assert digest == b"".join(zlib.crc32(quarter).to_bytes(4, "big") for quarter in quarters)
    for place in range(num_bytes):
        buffer[place] ^= 1
        assert Weights(Version(1, 1), buffer).digest() != digest
        buffer[place] ^= 1


def test_what_came_after_the_checkpoint_is_a_dead_branch():
    first = Lineage(1)
    second = first.resumed(2, 50)
    # Epoch 3 had to go back to a checkpoint of epoch 1.
    third = first.resumed(3, 30)
    forks = {1: 0, 2: 5}
    copied = Lineage(2, forks)
    forks[2] = 99
    for lineage, ancestors, others in (
        (first, [(1, 0), (1, 10**9)], [NO_VERSION, (2, 0)]),
        (second, [(1, 50), (2, 51)], [(1, 51)]),
        (third, [(1, 30), (3, 99)], [(1, 31), (2, 10)]),
        (copied, [(1, 5)], [(1, 6)]),
        (second.resumed(4, 60).resumed(5, 55), [(1, 50), (2, 55), (5, 99)], [(2, 56), (4, 61)]),
    ):
        assert all(lineage.is_ancestor(Version(*version)) for version in ancestors)
        assert not any(lineage.is_ancestor(Version(*version)) for version in others)
    assert (second.epoch, first.forks, sorted(second.forks)) == (2, {}, [1, 2])


@pytest.mark.parametrize("rounded", [(), ("a",), ("a", "b")])
def test_what_nobody_can_act_with_is_no_weights_of_a_layout(rounded):
    layout = WeightsLayout((ArraySpec("a", (3,), "float32"), ArraySpec("b", (5,), "float32")))
    layout = layout.coarse(rounded)
    good = np.zeros(layout.num_bytes, np.uint8)
    assert layout.misfit(good) == ""
    assert layout.misfit(good[1:]) == f"they have {len(good) - 1} bytes, not {len(good)}"
    for place in layout.places:
        # The last two bytes hold the exponent, in either precision.
        bad = good.copy()
        bad[place.stop - 2 : place.stop] = 0x80, 0x7F
        assert "not finite" in layout.misfit(bad)


def test_huge_numbers_are_finite_though_their_sum_is_not():
    layout = WeightsLayout((ArraySpec("a", (3,), "float32"),))
    numbers = np.full(3, 3e38, np.float32)
    assert layout.misfit(numbers.view(np.uint8)) == ""
    numbers[1] = np.inf
    assert "not finite" in layout.misfit(numbers.view(np.uint8))


def test_whole_numbers_are_always_finite():
    buffer = np.zeros(LAYOUT.num_bytes, np.uint8)
    buffer[LAYOUT.places[2]] = 0xFF
    assert LAYOUT.misfit(buffer) == ""
    buffer[LAYOUT.places[1]] = 0xFF
    assert "not finite" in LAYOUT.misfit(buffer)
