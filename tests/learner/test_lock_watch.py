"""A hang with the interpreter's lock is seen from outside, and ends with the exit code of a bug."""

import os
import signal
import subprocess
import sys

import pytest

from impala_async.errors import EXIT_BUG
from impala_async.learner import lock_watch, watchdog
from impala_async.learner.lock_watch import EXIT_STUCK, GROWTH, LockWatch, Silence
from impala_async.learner.watchdog import BUILD_PATIENCE

HANG = """
import ctypes
from impala_async.learner.lock_watch import LockWatch
watch = LockWatch(0.4, 2.0)
libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
while True:
    libc.pthread_mutex_lock(mutex)  # twice, for ever, with the interpreter's lock
"""

BUILD = """
import ctypes
from impala_async.learner.lock_watch import LockWatch
watch = LockWatch(0.4, 0.6)
watch.patience = lambda: 50
watch.beat()
ctypes.PyDLL(None).usleep(1_200_000)  # with the interpreter's lock
watch.close()
"""


def ticks(silence: Silence, number: int, *, is_stopped: bool = False) -> list[str | None]:
    return [silence.last(is_stopped=is_stopped) for _ in range(number)]


def test_silence_is_shown_and_then_ended() -> None:
    assert ticks(Silence(3, 5), 5) == [None, None, "dump", None, "end"]


@pytest.mark.parametrize("how", ["a byte", "a stop"])
def test_a_byte_and_a_stop_begin_it_anew(how: str) -> None:
    silence = Silence(4, 6)
    for _ in range(9):
        assert ticks(silence, 1) == [None]
        if how == "a byte":
            silence.end(1)
        else:
            assert ticks(silence, 1, is_stopped=True) == [None]


def test_a_build_may_take_longer_and_what_follows_it_a_part_of_that() -> None:
    silence = Silence(3, 5)
    silence.end(BUILD_PATIENCE)
    assert ticks(silence, 20) == [None] * 20
    silence.end(1)
    assert ticks(silence, 60) == [None] * 59 + ["end"]
    assert GROWTH == watchdog.GROWTH


def test_it_ends_as_a_bug_ends() -> None:
    assert EXIT_STUCK == EXIT_BUG
    ended = subprocess.run(
        [sys.executable, "-c", HANG], capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == EXIT_BUG, ended.stderr
    assert 'File "<string>", line 7 in <module>' in ended.stderr
    assert "held for 2 s (learner.stuck_end_s): the learner ends" in ended.stderr


def test_a_build_that_holds_the_lock_is_waited_for() -> None:
    built = subprocess.run([sys.executable, "-c", BUILD], timeout=50, check=False)
    assert built.returncode == 0


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


def test_a_child_that_somebody_ends_is_told(caplog):
    watch = LockWatch(0.04, 90.0)
    watch._child.kill()
    watch._beats.join(30)
    assert not watch._beats.is_alive()
    assert "which watches the interpreter's lock, has ended (-9)" in caplog.text
    watch.beat()
    watch.close()
