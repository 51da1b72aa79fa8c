"""The process of a front: what it says, what it does not hear, and what ends it."""

import logging
import os
import signal
from collections.abc import Callable

import pytest

from tests.learner.hand_actor import until
from tests.learner.world import Harbour, process_of

Make = Callable[..., Harbour]


async def test_what_breaks_there_ends_the_run_here(
    make_remote: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    harbour = make_remote()
    # No such batch is under way.
    harbour.front.give_up(4711)
    await until(lambda: bool(harbour.deaths), "word of the fault")
    assert "KeyError(4711)" in str(harbour.deaths[0])
    assert "Traceback" in capfd.readouterr().err


async def test_signals_to_the_whole_group_do_not_end_it(make_remote: Make) -> None:
    harbour = make_remote()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process_of(harbour).pid, number)
    actor = await harbour.join(4)
    await actor.send()
    await until(lambda: harbour.full == [0])
    assert harbour.deaths == []


async def test_what_it_logs_is_logged_here(
    make_remote: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    harbour = make_remote()
    await harbour.join(3)
    await until(lambda: "actor 0 joined with 3 columns" in caplog.messages)
