"""The benchmark of the codec compares what brings over the same columns."""

import numpy as np
import pytest

from bench import codec
from bench.codec import SIDES, Ours, check_equal, figures_of, measure
from bench.ingest_ends import CASES


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", SIDES)
def test_what_arrives_is_what_was_sent(name, case):
    side = SIDES[name](*CASES[case])
    assert not any(view.any() for view in side.target.values())
    check_equal(side)
    assert all(view.any() for view in side.target.values())


def test_what_is_damaged_is_noticed_and_large_messages_go_as_they_lie():
    side = Ours(*CASES["cartpole"])
    side.source["reward"][3, 7] += 1
    with pytest.raises(AssertionError, match="reward"):
        check_equal(side)
    side = Ours(*CASES["stacked"])
    _, obs, _ = side.pack()
    assert np.shares_memory(np.frombuffer(obs, np.uint8), side.source_planes[0])


def test_ratios_are_of_packing_and_unpacking(monkeypatch):
    monkeypatch.setattr(codec, "NUM_TIMES", dict.fromkeys(CASES, 10))
    samples = {case: measure(case, 1) for case in CASES}
    for sides in samples.values():
        assert sides.keys() == SIDES.keys()
        assert all(each["pack_us"] > 0 for (each,) in sides.values())
    samples["stacked"]["ours"] = [{"pack_us": 2.0, "unpack_us": 8.0, "both_us": 10.0}]
    samples["stacked"]["msgpack"] = [{"pack_us": 20.0, "unpack_us": 5.0, "both_us": 25.0}]
    figures = figures_of(samples)
    stacked = [each.name for each in figures].index("stacked Atari, 593 kB: pack")
    assert [each.median for each in figures[stacked : stacked + 3]] == [2.0, 8.0, 2.5]
