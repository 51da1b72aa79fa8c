"""The benchmark of ingest measures real messages over real sockets."""

import pytest

from bench import ingest
from bench.ingest_ends import CASES, Stopwatch, message_bytes
from tests import matrix

pytestmark = pytest.mark.e2e


def test_messages_are_as_large_as_the_claim_says():
    assert [round(message_bytes(case) / 1000, 1) for case in CASES] == [593.0, 177.1, 6.1]


def test_warm_messages_are_not_counted():
    watch = Stopwatch(100)
    assert not watch.count(99)
    assert watch.count(1)
    assert watch.figures.keys() == {"per_s", "cpu_us"}


@pytest.mark.parametrize("side", matrix.SIDES)
def test_every_side_receives(side, forks, monkeypatch):
    monkeypatch.setitem(ingest.NUM_MESSAGES, "cartpole", 200)
    sample = ingest.one_turn(side, "cartpole")
    assert sample["per_s"] > 0
    assert sample["cpu_us"] > 0
