"""Messages between two processes: in order, of any length, and with an end that is told."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from impala_async.learner.channel import Channel, ChannelClosedError
from tests.learner.hand_actor import until


class End:
    """One side, and what it has heard."""

    def __init__(self, end: socket.socket) -> None:
        self.heard: list[list[Any]] = []
        self.num_ends = 0
        self.channel = Channel(end, self.heard.append, self._note_end)

    def _note_end(self) -> None:
        self.num_ends += 1


@pytest.fixture
async def ends() -> AsyncIterator[tuple[End, End]]:
    ours, theirs = map(End, socket.socketpair())
    yield ours, theirs
    ours.channel.close()
    theirs.channel.close()


async def test_all_comes_in_order_whatever_its_length(ends: tuple[End, End]) -> None:
    ours, theirs = ends
    for number in range(100):
        ours.channel.send("say", number, b"x" * (number * 10_000), {"a": None, "b": 0.5})
    await until(lambda: len(theirs.heard) == 100)
    assert [words[1] for words in theirs.heard] == list(range(100))
    assert [len(words[2]) for words in theirs.heard] == [n * 10_000 for n in range(100)]
    assert theirs.heard[0][3] == {"a": None, "b": 0.5}


async def test_who_is_waited_for_may_say_other_things_before(ends: tuple[End, End]) -> None:
    ours, theirs = ends
    theirs.channel.send("early", 1)
    theirs.channel.send("answer", 2)
    theirs.channel.send("late", 3)
    # What is said goes out at the end of the moment.
    await asyncio.sleep(0)
    assert ours.channel.wait_for("answer", "no") == ["answer", 2]
    assert ours.heard == []
    await until(lambda: len(ours.heard) == 2)
    assert ours.heard == [["early", 1], ["late", 3]]
    theirs.channel.send("more", 4)
    await until(lambda: len(ours.heard) == 3)


async def test_what_was_not_sent_yet_goes_before_the_wait() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, lambda words: None, lambda: None)
    question = b"x" * 10_000_000
    channel.send("question", question)
    reading = asyncio.get_running_loop().run_in_executor(None, answer_after, theirs, len(question))
    assert channel.wait_for("answer") == ["answer"]
    await reading
    channel.close()


def answer_after(end: socket.socket, num_bytes: int) -> None:
    with end:
        while num_bytes > 0:
            num_bytes -= len(end.recv(1 << 20))
        end.sendall(b"\x91\xa6answer")


async def test_the_end_is_told_once_and_after_the_last_words(ends: tuple[End, End]) -> None:
    ours, theirs = ends
    theirs.channel.send("last")
    theirs.channel.close()
    await until(lambda: ours.num_ends == 1)
    assert ours.heard == [["last"]]
    ours.channel.send("nobody hears this")
    assert not ours.channel.is_open
    assert theirs.num_ends == 0


async def test_an_end_in_the_middle_of_a_wait_is_an_error(ends: tuple[End, End]) -> None:
    ours, theirs = ends
    theirs.channel.send("something else")
    theirs.channel.close()
    with pytest.raises(ChannelClosedError):
        ours.channel.wait_for("answer")
    await until(lambda: ours.num_ends == 1)
    assert ours.heard == [["something else"]]
