"""Peers and strangers make the log say few lines, and each is one line."""

import logging

import pytest

from impala_async.learner.loop.sessions import MAX_LINES_PER_S, PeerLog
from impala_async.wire.messages import PROTOCOL, Heartbeat, Hello
from impala_async.wire.peer import Peer
from tests.learner.columns import small_schema
from tests.learner.pure_learner import PureLearner


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
    return PeerLog(clock)


def test_lines_are_few_and_the_others_are_counted(
    log: PeerLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        caplog.clear()
        clock.now += 1.0
        for number in range(900):
            log.say(logging.WARNING, "number %d", number)
        assert len(caplog.messages) <= MAX_LINES_PER_S
    assert caplog.messages[:2] == ["881 more lines like these", "number 0"]


def test_what_a_peer_wrote_stays_on_its_line(
    log: PeerLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.say(logging.WARNING, "actor %d runs %s", 3, "1.0\nERROR the disk is full\x1b[2J \ud800 é")
    assert caplog.messages == [r"actor 3 runs 1.0\nERROR the disk is full\x1b[2J \ud800 é"]


HANG = {"hang_s": 12.4, "hang_in": 0, "hang_first": 3, "hang_last": 3, "env_time_ms": 1.0}


class Beating:
    """Two actors that joined sixty seconds ago and say how they are."""

    def __init__(self) -> None:
        self.learner = PureLearner(small_schema())
        self.peers = []
        for rank in range(2):
            actor = bytes([rank]) * 16
            peer = self.learner.table.hello(Hello(PROTOCOL, actor, "", bytes(16), 0, 0), actor, 0.0)
            assert isinstance(peer, Peer)
            assert self.learner.table.join(peer, 1, 1)
            self.peers.append(peer)
        self.learner.now = 60.0

    def beat(self, rank: int, timers: dict[str, float]) -> None:
        self.learner.hear_pull(b"route", Heartbeat(self.peers[rank].session, timers))

    @property
    def hang(self) -> object:
        return self.learner.report()["actor/hang"]


def test_a_hang_is_told_now_and_then_and_reported_with_its_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    beating = Beating()
    beating.beat(0, {"env_time_ms": 1.0})
    assert beating.hang is None
    beating.beat(0, HANG)
    beating.beat(1, HANG | {"hang_s": 10.0, "hang_in": 1, "hang_last": 6})
    assert caplog.messages == [
        "environment 3 of actor 0 has been in step for 12 s",
        "one of environments 3 to 6 of actor 1 has been in reset for 10 s",
    ]
    beating.learner.now = 64.0
    beating.beat(0, HANG | {"hang_s": 16.4})
    assert len(caplog.messages) == 2
    assert beating.hang == "environment 3 of actor 0 has been in step for 16 s"
    beating.learner.now = 71.0
    beating.beat(0, HANG | {"hang_s": 23.4})
    assert caplog.messages[2] == "environment 3 of actor 0 has been in step for 23 s"


def test_a_hang_that_is_over_or_whose_session_is_is_forgotten() -> None:
    beating = Beating()
    beating.beat(0, HANG)
    beating.beat(1, HANG)
    beating.beat(0, {})
    assert "actor 1" in str(beating.hang)
    beating.learner.table.end(beating.peers[1])
    assert beating.hang is None
