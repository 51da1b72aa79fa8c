"""What peers make the log say: few lines in a second, and each is one line."""

import logging

import pytest

from impala_async.learner.loop.peer_log import MAX_LINES_PER_S, PeerLog


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
