"""Ranks that meet: who is missing is named, and one that cannot start tells the others."""

import socket
import threading

import pytest

from impala_async.config.ranks import Place
from impala_async.errors import ConfigError, InUseError, RankError
from impala_async.learner import meeting
from impala_async.learner.meeting import Meeting
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
    with pytest.raises(ConfigError, match=r"^no such thing$"), Meeting(Place(number, count)):
        raise ConfigError("no such thing")


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_rank_that_cannot_start_ends_the_one_that_waits_for_it(wrong, address):
    failing = threading.Thread(target=fail, args=(wrong,))
    failing.start()
    with (
        pytest.raises(ConfigError, match=f"^rank {wrong} cannot start: no such thing$"),
        Meeting(Place(1 - wrong, 2)).joined(),
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


def test_who_is_missing_is_told_and_all_hear_of_one_that_fails(address, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr("impala_async.output.AFTER_S", 0.2)
    ended = {}

    def wait(number):
        try:
            with Meeting(Place(number, 4)).joined():
                ended[number] = None
        except RankError as error:
            ended[number] = str(error)

    waiting = [threading.Thread(target=wait, args=(number,)) for number in (1, 0)]
    for each in waiting:
        each.start()
    told = f"waiting for ranks 2 and 3, to meet at {address} ("
    until(lambda: sum(line.startswith(told) for line in caplog.messages) >= 2)
    with pytest.raises(InUseError), Meeting(Place(2, 4)):
        raise InUseError("still there")
    for each in waiting:
        each.join(10)
    # Rank 0 has stayed until all that came knew; it is no mistake of theirs.
    assert ended == dict.fromkeys((0, 1), "rank 2 cannot start: still there")


def test_one_that_is_only_late_is_no_mistake(address, monkeypatch):
    monkeypatch.setattr(meeting, "START_S", 1.1)
    with pytest.raises(RankError, match="waited 1 s for rank 1"), Meeting(Place(0, 2)).joined():
        raise AssertionError("they have met")


def test_torchrun_ends_the_others_itself(address, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    # It would wait for five seconds, as nobody else is there.
    failing = threading.Thread(target=fail, args=(0,))
    failing.start()
    failing.join(3)
    assert not failing.is_alive()


def test_one_alone_meets_nobody(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with Meeting(Place()).joined() as ranks:
        assert not ranks.are_many
    fail(0, 1)
