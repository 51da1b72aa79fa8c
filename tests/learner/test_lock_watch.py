"""A hang with the interpreter's lock is seen from outside, and ends with the exit code of a bug."""

import os
import signal
import subprocess
import sys

import pytest

from impala_async.errors import EXIT_BUG
from impala_async.learner import lock_watch
from impala_async.learner.lock_watch import EXIT_STUCK, LockWatch, Silence

HANG = """
import ctypes
from impala_async.learner.lock_watch import LockWatch
watch = LockWatch(0.4, 2.0)
libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
while True:
    libc.pthread_mutex_lock(mutex)  # twice, for ever, with the interpreter's lock
"""


def test_silence_is_shown_and_then_ended() -> None:
    silence = Silence(3, 5)
    noted = [silence.note(is_heard=False, is_stopped=False) for _ in range(5)]
    assert noted == [None, None, "dump", None, "end"]


@pytest.mark.parametrize("how", ["is_heard", "is_stopped"])
def test_a_byte_and_a_stop_begin_it_anew(how: str) -> None:
    silence = Silence(2, 3)
    for _ in range(9):
        assert silence.note(is_heard=False, is_stopped=False) is None
        assert silence.note(**{"is_heard": False, "is_stopped": False, how: True}) is None


def test_it_ends_as_a_bug_ends() -> None:
    assert EXIT_STUCK == EXIT_BUG
    ended = subprocess.run(
        [sys.executable, "-c", HANG], capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == EXIT_BUG, ended.stderr
    assert 'File "<string>", line 7 in <module>' in ended.stderr
    assert "held for learner.stuck_end_s: the learner ends" in ended.stderr


def test_a_process_that_a_signal_stopped_is_known() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not lock_watch._is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert lock_watch._is_stopped(process.pid)
        process.kill()
    assert not lock_watch._is_stopped(2**22 + 1)


def test_its_child_ends_with_it() -> None:
    watch = LockWatch(60.0, 90.0)
    assert watch._child.poll() is None
    watch.close()
    assert watch._child.poll() is not None
    assert not watch._beats.is_alive()
