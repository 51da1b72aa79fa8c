"""The benchmark of the codec compares what brings over the same columns."""

from bench import codec
from bench.codec import SIDES, figures_of, measure
from bench.ingest_ends import CASES


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
