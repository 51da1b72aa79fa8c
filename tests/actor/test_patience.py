import logging

import pytest

from impala_async.actor.patience import FIRST_S, LONGEST_S, Pauses, SeldomLog
from impala_async.waiting import EVERY_S


def test_pauses_double_until_something_succeeds() -> None:
    pauses = Pauses()
    taken = [pauses.take() for _ in range(9)]
    assert taken[:4] == [0.0, FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert taken[-1] == LONGEST_S
    pauses.reset()
    assert pauses.take() == 0.0


def test_of_each_kind_of_line_one_is_said_in_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    now = 100.0
    log = SeldomLog(logging.getLogger("some"), lambda: now)
    for number in range(3):
        log.warning("refused: %d", number)
        log.info("looking")
    assert caplog.messages == ["refused: 0", "looking"]
    now += EVERY_S
    log.warning("refused: %d", 7)
    assert caplog.messages[2:] == ["refused: 7"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]
