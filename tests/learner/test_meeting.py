"""Ranks that meet: who is missing is named, and one that cannot start tells the others."""

import socket
import threading

import pytest

from impala_async.config.ranks import Place
from impala_async.errors import ConfigError
from impala_async.learner.meeting import _Meeting, failure_told, joined
from tests.wire.ends import until


@pytest.fixture
def address(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    return f"127.0.0.1:{port}"


def fail(number, count=2):
    """A rank that cannot start."""
    with pytest.raises(ConfigError, match=r"^no such thing$"), failure_told(Place(number, count)):
        raise ConfigError("no such thing")


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_rank_that_cannot_start_ends_the_one_that_waits_for_it(wrong, address):
    failing = threading.Thread(target=fail, args=(wrong,))
    failing.start()
    with (
        pytest.raises(ConfigError, match=f"^rank {wrong} cannot start: no such thing$"),
        joined(Place(1 - wrong, 2)),
    ):
        raise AssertionError("they have met")
    failing.join(10)
    assert not failing.is_alive()


def test_ranks_that_all_fail_wait_for_none(address):
    failing = [threading.Thread(target=fail, args=(number, 3)) for number in range(3)]
    for each in failing:
        each.start()
    for each in failing:
        each.join(4)
    assert not any(each.is_alive() for each in failing)


def test_who_is_missing_is_known(address):
    meetings = [_Meeting(Place(number, 4)) for number in (1, 0)]
    assert [each.missing for each in meetings] == [f"rank 0 at {address}", "the other ranks"]
    for each in meetings:
        each.start()
    until(lambda: all(each.missing == f"ranks 2 and 3, at {address}" for each in meetings))
    fail(2, 4)
    for each in meetings:
        each.join(10)
        assert str(each.error) == "rank 2 cannot start: no such thing"


def test_torchrun_ends_the_others_itself(address, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    # It would wait for five seconds, as nobody else is there.
    failing = threading.Thread(target=fail, args=(0,))
    failing.start()
    failing.join(3)
    assert not failing.is_alive()


def test_one_alone_meets_nobody(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with joined(Place()):
        pass
    fail(0, 1)
