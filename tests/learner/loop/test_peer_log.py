"""Peers and strangers make the log say few lines, and each is one line."""

import logging
from collections import Counter

import pytest

from impala_async.learner.loop.peer_log import (
    MAX_LINES_PER_S,
    STRANGERS_EVERY_S,
    ActorFailures,
    PeerLog,
    Strangers,
)


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock, caplog: pytest.LogCaptureFixture) -> PeerLog:
    caplog.set_level(logging.INFO)
    return PeerLog(logging.getLogger("test"), clock)


def test_lines_are_few_and_the_others_are_counted(
    log: PeerLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        caplog.clear()
        clock.now += 1.0
        for number in range(900):
            log.warning("number %d", number)
        assert len(caplog.messages) < MAX_LINES_PER_S
    assert caplog.messages[:2] == ["882 more lines like these", "number 0"]


def test_what_a_peer_wrote_stays_on_its_line(
    log: PeerLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.warning("actor %d runs %s", 3, "1.0\nERROR the disk is full\x1b[2J \ud800 é")
    assert caplog.messages == [r"actor 3 runs 1.0\nERROR the disk is full\x1b[2J \ud800 é"]


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
    harness.now += STRANGERS_EVERY_S
    assert harness.look(1, never_joined=1, sent_too_much=2) == [
        "strangers in 10 s: 1 hello over 1 connection; 1 connection cut off that never joined, "
        "2 connections cut off that sent too much, 1 session gave way"
    ]
    harness.now += STRANGERS_EVERY_S
    assert harness.look(1, never_joined=2, sent_too_much=2) == [
        "strangers in 10 s: 1 connection cut off that never joined"
    ]


def test_hellos_alone_are_nothing_to_tell() -> None:
    harness = StrangersHarness()
    for _ in range(100):
        harness.hellos[b"an actor that builds"] += 1
        assert harness.look(0) == []
    assert harness.hellos.total() < STRANGERS_EVERY_S + 1


HANG = {"hang_s": 12.4, "hang_in": 0, "hang_first": 3, "hang_last": 3, "env_time_ms": 1.0}
A, B = b"a" * 16, b"b" * 16


def test_a_hang_is_told_now_and_then_and_reported_with_its_seconds() -> None:
    told: list[str] = []
    now = 100.0
    failures = ActorFailures(told.append, lambda: now)
    failures.hear_beat(A, 2, {"env_time_ms": 1.0}, 60.0)
    assert failures.report({A, B})["actor/hang"] is None
    failures.hear_beat(A, 2, HANG, 60.0)
    failures.hear_beat(B, 5, HANG | {"hang_s": 10.0, "hang_in": 1, "hang_last": 6}, 60.0)
    assert told == [
        "environment 3 of actor 2 has been in step for 12 s",
        "one of environments 3 to 6 of actor 5 has been in reset for 10 s",
    ]
    now = 104.0
    failures.hear_beat(A, 2, HANG | {"hang_s": 16.4}, 60.0)
    assert len(told) == 2
    hang = failures.report({A, B})["actor/hang"]
    assert hang == "environment 3 of actor 2 has been in step for 16 s"
    now = 111.0
    failures.hear_beat(A, 2, HANG | {"hang_s": 23.4}, 60.0)
    assert told[2] == "environment 3 of actor 2 has been in step for 23 s"


def test_a_hang_that_is_over_or_whose_session_is_is_forgotten() -> None:
    failures = ActorFailures(lambda line: None, lambda: 0.0)
    failures.hear_beat(A, 2, HANG, 60.0)
    failures.hear_beat(B, 5, HANG, 60.0)
    failures.hear_beat(A, 2, {}, 60.0)
    assert "actor 5" in str(failures.report({A, B})["actor/hang"])
    assert failures.report({A})["actor/hang"] is None


def test_the_last_death_is_kept() -> None:
    failures = ActorFailures(lambda line: None, lambda: 0.0)
    assert failures.report(set())["actor/last_death"] is None
    assert failures.hear_death(2, "EnvError: it broke") == "it died of EnvError: it broke"
    assert failures.report(set())["actor/last_death"] == "actor 2 died of EnvError: it broke"
