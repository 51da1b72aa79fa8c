"""Real processes that end though something of theirs does not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
WITHIN_S = 60.0
START = """
import atexit, os, sys, threading, time
from impala_async import interrupts
"""


def end(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", START + code]
    return subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, timeout=WITHIN_S
    )


def test_a_thread_that_never_ends_is_named_and_left() -> None:
    ended = end(
        "interrupts.GRACE_S = 0.05\n"
        "threading.Thread(target=time.sleep, args=(1e6,), name='simulator').start()\n"
        "print('result')\n"
        "interrupts.leave(3)"
    )
    said = "ending without what the environment left running: Thread simulator\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "result\n", said)


def test_a_process_that_never_ends_is_ended_too() -> None:
    ended = end(
        "import multiprocessing\n"
        "interrupts.GRACE_S = 0.05\n"
        "fork = multiprocessing.get_context('fork')\n"
        "fork.Process(target=time.sleep, args=(1e6,), name='game').start()\n"
        "interrupts.leave(2)"
    )
    # It held our streams open.
    said = "ending without what the environment left running: ForkProcess game\n"
    assert (ended.returncode, ended.stderr) == (2, said)


def test_what_ends_by_itself_gets_the_time() -> None:
    ended = end(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "interrupts.GRACE_S = 60.0\n"
        "ThreadPoolExecutor(2).submit(print, 'worked').result()\n"
        "atexit.register(print, 'closed')\n"
        "interrupts.leave(0)"
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "worked\nclosed\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cuts_it_short_with_the_same_code(number: signal.Signals) -> None:
    ended = end(
        "interrupts.GRACE_S = 60.0\n"
        f"tell = lambda: (time.sleep(0.1), os.kill(os.getpid(), {int(number)}), time.sleep(1e6))\n"
        "threading.Thread(target=tell).start()\n"
        "interrupts.leave(130)"
    )
    assert (ended.returncode, ended.stderr) == (130, "")
