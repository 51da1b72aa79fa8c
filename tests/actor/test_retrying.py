import logging
import socket
import threading

import pytest

from impala_async.actor import retrying
from impala_async.actor.retrying import UNKNOWN, Inquiry, SeldomLog, why_silent
from impala_async.output import EVERY_S


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


def test_a_port_that_nobody_listens_at_refuses() -> None:
    with socket.socket() as taken:
        # Bound, so that nobody else takes it, and not listening.
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert "refused" in why_silent(f"tcp://127.0.0.1:{port}")


def test_what_listens_and_says_nothing_is_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "something listens there" in why_silent(f"tcp://127.0.0.1:{port}")


def test_a_name_that_does_not_resolve_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    assert why_silent("tcp://no-such-host:5555") == "the name no-such-host does not resolve"


@pytest.mark.parametrize(
    ("error", "says"),
    [(TimeoutError(), "no answer at all"), (OSError(101, "Network is unreachable"), "unreachable")],
)
def test_other_reasons(monkeypatch: pytest.MonkeyPatch, error: OSError, says: str) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    assert says in why_silent("tcp://10.0.0.1:5555")


def test_nobody_waits_long_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer = threading.Event()

    def ask(url: str) -> str:
        assert may_answer.wait(20)
        return f"found of {url}"

    monkeypatch.setattr(retrying, "why_silent", ask)
    inquiry = Inquiry("tcp://there:1")
    assert inquiry.why(0.01) == inquiry.why(0.01) == UNKNOWN
    may_answer.set()
    assert inquiry.why(20) == "found of tcp://there:1"
