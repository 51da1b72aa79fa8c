"""Crossings between loop and threads: order, completeness, and an end for everybody who waits."""

import asyncio
import threading
from unittest.mock import Mock

import pytest

from impala_async.errors import ServiceError
from impala_async.learner.handoff import ClosedError, Inbox, Mailbox, on_thread
from tests.learner.hand_actor import until


async def test_a_mailbox_keeps_only_the_newest():
    got = []

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


def test_after_the_loop_nobody_listens(monkeypatch):
    loop = asyncio.new_event_loop()
    monkeypatch.setattr(loop, "call_soon_threadsafe", Mock(side_effect=RuntimeError))
    with pytest.raises(RuntimeError):
        Inbox(loop, print).post(1)
    loop.close()
    Inbox(loop, print).post(1)


class Boom(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "reported"),
    [(None, None), (ClosedError("full"), None), (Boom("x"), Boom), (SystemExit(3), ServiceError)],
)
async def test_the_end_of_a_thread_reaches_the_loop(error, reported):
    threads = []

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
