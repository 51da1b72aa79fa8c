"""A watermark is the set of all settled seqs, in little memory."""

from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.wire.watermark import Watermark

seqs = st.integers(0, 30)
steps = st.lists(st.tuples(st.booleans(), seqs), max_size=40)


@settings(deadline=None)
@given(steps)
def test_it_is_the_set_of_settled_seqs(steps: list[tuple[bool, int]]) -> None:
    watermark, settled = Watermark(), set[int]()
    for is_raise, seq in steps:
        if is_raise:
            watermark.raise_to(seq)
            settled |= set(range(seq))
        else:
            watermark.settle(seq)
            settled.add(seq)
        assert {s for s in range(32) if watermark.is_settled(s)} == settled
        below = next(s for s in range(33) if s not in settled)
        assert watermark.below == below
        assert watermark.above == tuple(sorted(s for s in settled if s > below))
        for until in range(33):
            assert watermark.num_unsettled_below(until) == len(set(range(until)) - settled)


@settings(deadline=None)
@given(steps)
def test_it_is_restored_from_its_two_parts(steps: list[tuple[bool, int]]) -> None:
    watermark = Watermark()
    for is_raise, seq in steps:
        (watermark.raise_to if is_raise else watermark.settle)(seq)
    again = Watermark(watermark.below, watermark.above)
    assert (again.below, again.above) == (watermark.below, watermark.above)


def test_restored_parts_that_touch_are_joined() -> None:
    watermark = Watermark(3, (3, 4, 7))
    assert (watermark.below, watermark.above) == (5, (7,))


def test_nothing_is_kept_of_seqs_in_order() -> None:
    watermark = Watermark()
    for seq in range(1000):
        watermark.settle(seq)
        watermark.settle(seq)
    assert (watermark.below, watermark.above) == (1000, ())


def test_it_never_goes_back() -> None:
    watermark = Watermark(10)
    watermark.raise_to(5)
    watermark.settle(3)
    assert (watermark.below, watermark.above) == (10, ())
