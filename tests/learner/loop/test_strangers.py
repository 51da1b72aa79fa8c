"""What is told of strangers: one line now and then, with what they did, in good grammar."""

from collections import Counter

from impala_async.learner.loop.strangers import EVERY_S, Strangers


class StrangersHarness:
    """Strangers with a clock and a log."""

    def __init__(self) -> None:
        self.now = 5.0
        self.lines: list[str] = []
        self.hellos: Counter[bytes] = Counter()
        self.strangers = Strangers(self.lines.append, lambda: self.now)

    def look(self, num_given_way: int, **cut: int) -> list[str]:
        """A second later: what is told by then."""
        self.now += 1.0
        reasons = Counter({why.replace("_", " "): number for why, number in cut.items()})
        self.strangers.look(self.hellos, num_given_way, reasons)
        told, self.lines[:] = [*self.lines], []
        return told


def test_a_flood_is_one_line_each_ten_seconds() -> None:
    harness = StrangersHarness()
    told = []
    for second in range(1, 26):
        harness.hellos.update({b"one": 600, b"two": 400})
        told += harness.look(999 * second, said_hello_again_and_again=second)
    assert (
        told
        == [
            "strangers in 10 s: 10,000 hellos over 2 connections; 10 connections cut off that said "
            "hello again and again, 9,990 sessions gave way"
        ]
        * 2
    )
    assert harness.hellos.total() == 5000


def test_reasons_are_told_apart_and_one_is_one() -> None:
    harness = StrangersHarness()
    harness.hellos[b"one"] = 1
    harness.now += EVERY_S
    assert harness.look(1, never_joined=1, sent_too_much=2) == [
        "strangers in 10 s: 1 hello over 1 connection; 1 connection cut off that never joined, "
        "2 connections cut off that sent too much, 1 session gave way"
    ]
    harness.now += EVERY_S
    assert harness.look(1, never_joined=2, sent_too_much=2) == [
        "strangers in 10 s: 1 connection cut off that never joined"
    ]


def test_hellos_alone_are_nothing_to_tell() -> None:
    harness = StrangersHarness()
    for _ in range(100):
        harness.hellos[b"an actor that builds"] += 1
        assert harness.look(0) == []
    assert harness.hellos.total() < EVERY_S + 1
