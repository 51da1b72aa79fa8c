"""Sums by sockets between ranks: the same bits at each, whoever is lost is named, strangers are not
let in, and where there is no way all do without."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from impala_async.config.ranks import Place
from impala_async.errors import RankError
from impala_async.training import rank_sockets
from impala_async.training.rank_sockets import AHEAD, MOST_NUMBERS, PIECE_BYTES, open_sockets

HOST = "127.0.0.1"
PIECE = PIECE_BYTES // 4


class Meeting:
    """Ranks, here threads, tell each other by it how to meet."""

    def __init__(self, count):
        self._barrier, self._said = threading.Barrier(count), [b""] * count

    def gather_of(self, number):
        def gather(own):
            self._said[number] = own
            self._barrier.wait(20)
            said = list(self._said)
            self._barrier.wait(20)
            return said

        return gather


def at_each(count, act, host_of=lambda number: HOST, wait_s=20.0):
    """The results of `act(place, sockets)` at each rank, or its error."""
    meeting = Meeting(count)

    def of(number):
        place = Place(number, count)
        sockets = open_sockets(place, host_of(number), meeting.gather_of(number), wait_s)
        try:
            return act(place, sockets)
        except RankError as error:
            return error
        finally:
            if sockets is not None:
                sockets.close()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(of, range(count)))


def shares_of(place, size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(place.number)
    return (1000 * torch.randn(size, generator=generator, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("size", [1, PIECE - 1, PIECE, (AHEAD + 1) * PIECE + 7, 400 * PIECE + 1])
@pytest.mark.parametrize("count", [2, 3])
def test_all_have_the_same_sum_to_the_bit(count, size):
    """The largest are far more than the kernel keeps for a socket."""

    def act(place, sockets):
        shares = shares_of(place, size)
        for _ in range(2):
            sockets.sum(shares)
        return shares

    wanted = sum(shares_of(Place(number, count), size).double() for number in range(count))
    first, *others = at_each(count, act)
    torch.testing.assert_close(first.double(), wanted * count, rtol=1e-5, atol=1e-2)
    assert all(torch.equal(first, each) for each in others)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.uint8])
def test_numbers_of_any_kind_are_summed(dtype):
    def act(place, sockets):
        matrix = torch.full((3, 5), place.number + 1, dtype=dtype)
        sockets.sum(matrix)
        return matrix

    for found in at_each(3, act):
        assert torch.equal(found, torch.full((3, 5), 6, dtype=dtype))


def test_two_sum_all_by_it_and_more_what_is_short():
    def act(place, sockets):
        most = MOST_NUMBERS // place.count
        return [sockets.can_sum(torch.empty(size)) for size in (most, most + 1)]

    assert at_each(2, act) == [[True, True]] * 2
    assert at_each(3, act) == [[True, False]] * 3


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_has_ended_is_named(lost):
    def act(place, sockets):
        if place.number != lost:
            sockets.sum(torch.zeros(400 * PIECE))

    found = at_each(2, act)[1 - lost]
    assert str(found).startswith(f"rank {lost} has ended")


def test_a_rank_that_does_not_answer_is_named():
    done = threading.Event()

    def act(place, sockets):
        if place.number == 2:
            done.wait(20)
            return
        try:
            sockets.sum(torch.zeros(1))
        finally:
            if place.is_first:
                done.set()

    first, second, _ = at_each(3, act, wait_s=0.3)
    assert str(first) == "rank 2 has said nothing for 0.3 s"
    assert str(second).startswith("rank 0 has")


def test_whoever_does_not_know_the_secret_is_no_rank(monkeypatch):
    """A stranger is first, and stays as long as it may."""
    monkeypatch.setattr(rank_sockets, "GREET_S", 0.2)
    strangers, connect = [], socket.create_connection

    def connect_late(address, timeout):
        for greeting in (b"", b"x" * 20, b"y" * 64):
            strangers.append(connect(address))
            strangers[-1].sendall(greeting)
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", connect_late)

    def act(place, sockets):
        shares = torch.ones(1)
        sockets.sum(shares)
        return shares.item()

    assert at_each(2, act) == [2.0, 2.0]
    for stranger in strangers:
        stranger.close()


def test_strangers_that_say_nothing_cost_less_than_the_others_wait_for_rank_0(monkeypatch):
    strangers, connect = [], socket.create_connection

    def connect_late(address, timeout):
        strangers.extend(connect(address) for _ in range(12))
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", connect_late)
    began_at = time.monotonic()
    assert at_each(2, lambda _, sockets: sockets, wait_s=2.0) == [None] * 2
    assert time.monotonic() - began_at < 2.0
    for stranger in strangers:
        stranger.close()


def test_where_one_finds_no_way_all_do_without(monkeypatch):
    monkeypatch.setattr(rank_sockets, "OPEN_S", 0.5)
    began_at = time.monotonic()
    nowhere = {1: HOST, 2: "no-such-host.invalid"}
    found = at_each(3, lambda _, sockets: sockets, host_of=lambda number: nowhere.get(number, HOST))
    assert found == [None] * 3
    assert time.monotonic() - began_at < 20
