"""Crossings between loop and threads: order, completeness, and an end for everybody who waits."""

import asyncio
import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from impala_async.errors import ServiceError
from impala_async.learner.handoff import (
    ClosedError,
    Inbox,
    IndexQueue,
    Mailbox,
    on_thread,
)
from impala_async.metrics.report import merge
from tests.learner.hand_actor import DEADLINE_S, until


def in_thread(body: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


# -------------------- an index queue


def queue_of(*items: int, capacity: int = 3) -> IndexQueue:
    made = IndexQueue("full", capacity)
    for item in items:
        made.put(item)
    return made


def test_a_queue_keeps_the_order_and_wakes_whoever_waits():
    indices = queue_of(2, 0, 1)
    assert len(indices) == 3
    assert [indices.get(), indices.get(0.0), indices.get(1.0)] == [2, 0, 1]
    got: list[int] = []
    thread = in_thread(lambda: got.append(indices.get(DEADLINE_S)))
    indices.put(5)
    thread.join(DEADLINE_S)
    assert got == [5]


def test_an_empty_queue_raises_after_the_timeout():
    for timeout in (0.0, 0.02):
        started = time.monotonic()
        with pytest.raises(queue.Empty):
            queue_of().get(timeout)
        assert time.monotonic() - started >= timeout


def test_more_indices_than_slots_are_a_bug():
    with pytest.raises(AssertionError, match="full: more indices than slots"):
        queue_of(0, 1, capacity=1)


def test_a_close_wakes_all_waiters_and_leaves_the_rest_for_the_accounts():
    for is_drained in (False, True):
        indices, ends = queue_of(), list[type[BaseException]]()

        def wait(timeout, indices=indices, ends=ends):
            try:
                indices.get(timeout)
            except (ClosedError, queue.Empty) as error:
                ends.append(type(error))

        waiting = (functools.partial(wait, timeout) for timeout in (None, DEADLINE_S, None))
        threads = [in_thread(body) for body in waiting]
        indices.close(is_drained=is_drained)
        for thread in threads:
            thread.join(DEADLINE_S)
        assert ends == [ClosedError] * 3
    indices = queue_of(1, 2)
    indices.close()
    with pytest.raises(ClosedError):
        indices.get()
    assert indices.take_all() == [1, 2]
    assert len(indices) == 0


def test_a_drained_close_gives_out_what_is_there_unless_another_one_follows():
    indices = queue_of(2, 1)
    indices.close(is_drained=True)
    assert [indices.get(), indices.get(0.0)] == [2, 1]
    for timeout in (None, 0.0, DEADLINE_S):
        with pytest.raises(ClosedError):
            indices.get(timeout)
    indices = queue_of(2)
    indices.close(is_drained=True)
    indices.close()
    with pytest.raises(ClosedError):
        indices.get()
    assert indices.take_all() == [2]


def test_a_queue_reports_its_three_numbers():
    indices = IndexQueue("ready", 4)
    for index in range(3):
        indices.put(index)
    indices.get()
    report = merge(indices.report())
    assert report["queue/ready_capacity"] == 4
    assert report["queue/ready_depth_quantiles"] == [1.0, 1.2, 2.0, 2.8, 3.0]
    wait_ms = report["queue/ready_get_wait_ms"]
    assert isinstance(wait_ms, float)
    assert 0 <= wait_ms < 1000


# -------------------- inbox, mailbox


async def test_a_mailbox_keeps_only_the_newest():
    got: list[int] = []

    def take(value):
        got.append(value)
        # It may be filled again while it delivers.
        if 99 <= value < 102:
            mailbox.post(value + 1)

    mailbox = Mailbox(asyncio.get_running_loop(), take)
    for value in range(100):
        mailbox.post(value)
    assert got == []
    await until(lambda: len(got) == 4)
    assert got == [99, 100, 101, 102]


async def test_a_mailbox_never_loses_the_last():
    for last in range(0, 3000, 300):
        got: list[int] = []
        mailbox = Mailbox(asyncio.get_running_loop(), got.append)

        def post(mailbox=mailbox, last=last):
            for value in range(last + 1):
                mailbox.post(value)

        thread = in_thread(post)
        await until(lambda got=got, last=last: bool(got) and got[-1] == last)
        thread.join()
        assert got == sorted(set(got))


class EndedLoop:
    """A loop that takes no more callbacks, closed or for a reason of its own."""

    def __init__(self, *, is_closed: bool) -> None:
        self._is_closed = is_closed

    def call_soon_threadsafe(self, *_: Any) -> None:
        raise RuntimeError("no")

    def is_closed(self) -> bool:
        return self._is_closed


def test_after_the_loop_nobody_listens():
    Inbox(EndedLoop(is_closed=True), print).post(1)
    with pytest.raises(RuntimeError):
        Inbox(EndedLoop(is_closed=False), print).post(1)


# -------------------- threads


class Boom(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "reported"),
    [(None, None), (ClosedError("full"), None), (Boom("x"), Boom), (SystemExit(3), ServiceError)],
)
async def test_the_end_of_a_thread_reaches_the_loop(error, reported):
    threads: list[threading.Thread] = []

    def body():
        threads.append(threading.current_thread())
        if error is not None:
            raise error

    if reported is None:
        await on_thread("worker", body)
    else:
        with pytest.raises(reported) as caught:
            await on_thread("worker", body)
        assert error in (caught.value, caught.value.__cause__)
    (thread,) = threads
    # A process that ends does not wait for it.
    assert (thread.name, thread.daemon) == ("worker", True)
    assert thread is not threading.current_thread()


async def test_one_that_waits_for_a_body_can_be_cancelled():
    may_end = threading.Event()
    waiting = asyncio.create_task(on_thread("save", lambda: may_end.wait(10) and None))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    may_end.set()


# -------------------- what passes between the learner thread and the loop
