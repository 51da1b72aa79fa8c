"""A thread that is silent for too long is shown and ended, and so is an end that takes too long;
one that waits, builds or was suspended is not.
"""

import asyncio
import subprocess
import sys

import pytest

from impala_async.errors import Exit
from impala_async.learner.watchdog import (
    BUILD_PATIENCE,
    EXIT_STUCK,
    LOOP_STANDS,
    Silence,
    Stops,
    Watchdog,
)
from tests.learner.hand_actor import until

HANGS = "the learner thread has not moved"
# Every hang lasts longer than the limit, which is 1 s.
SCRIPT = """
import ctypes, os, signal, subprocess, sys, threading, time
from impala_async.learner.watchdog import Watchdog

def hold_the_lock():
    mutex = ctypes.create_string_buffer(64)
    while True:  # the second time for ever
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)

def hang():
    dog.beat()
    time.sleep(20)

def end():
    time.sleep(0.5)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # as told to all processes
        dog._child.send_signal(number)
    dog.end_begins(0.3)
    time.sleep(20)

def build():
    dog.loop_builds()
    ctypes.PyDLL(None).usleep(2_000_000)

def be_stopped():
    wake = f"sleep 2; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", wake])
    os.kill(os.getpid(), signal.SIGSTOP)

def call_later(seconds, call):
    if CALL is not build:
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        timer.start()

dog = Watchdog(1.0)
dog.start(call_later, has_child=True)
CALL()
time.sleep(0.5)
dog.close()
"""


def run(what):
    script = SCRIPT.replace("CALL", what)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False
    )


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("hold_the_lock", f"{LOOP_STANDS} for 1 s (learner.stuck_end_s): the learner ends"),
        ("hang", f"{HANGS} for 1 s (learner.stuck_end_s): the learner ends"),
        ("end", "not ended within 0.3 s: the learner ends"),
    ],
)
def test_a_hang_shows_its_stacks_and_ends_as_a_bug_ends(what, says):
    ended = run(what)
    assert ended.returncode == EXIT_STUCK == Exit.BUG, ended.stderr
    assert says in ended.stderr.splitlines()
    assert f"in {what}\n" in ended.stderr


@pytest.mark.parametrize("what", ["build", "be_stopped"])
def test_a_build_and_a_process_that_was_stopped_are_waited_for(what):
    ended = run(what)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_process_that_is_stopped_is_told_of_and_so_is_its_going_on():
    stops = Stops(77, 1.0)
    said = [stops.add(is_stopped=each) for each in (1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0)]
    assert [tick for tick, line in enumerate(said) if line] == [7, 10]
    assert said[7] == "the learner is stopped, for 5 s now; to go on: kill -CONT 77"
    assert said[10].startswith("the learner was stopped for 7 s; its reports have")
    # Once more for another time.
    assert [bool(stops.add(is_stopped=True)) for _ in range(6)] == [False] * 4 + [True, False]


class Watched:
    """A watchdog whose time the test makes, and whose loop never comes to anything."""

    def __init__(self):
        self.lines = []
        self.dog = Watchdog(60.0, self.lines.append)

    def tick(self):
        self.dog.tick()
        return self.lines[-1]


def test_it_is_told_whether_the_learner_thread_moves_and_of_a_build_before_it_begins():
    watched = Watched()
    assert [watched.tick(), watched.tick()] == ["1", "1"]
    for moves, says in ((True, "1"), (False, HANGS), (False, HANGS), (True, "1"), (False, HANGS)):
        if moves:
            watched.dog.beat()
        assert watched.tick() == says
    watched.dog.rest()
    assert watched.tick() == "1"
    watched.lines.clear()
    for _ in range(2):
        watched.dog.beat(BUILD_PATIENCE)
        assert watched.lines == [str(BUILD_PATIENCE)]
    assert watched.tick() == str(BUILD_PATIENCE)
    watched.dog.rest()
    assert watched.tick() == "1"
    watched.dog.loop_builds()
    assert watched.lines[-1] == str(BUILD_PATIENCE)


def test_an_end_has_its_time_and_a_save_its_own():
    watched = Watched()
    watched.dog.end_begins()
    assert [watched.tick() for _ in range(179)] == ["1"] * 179
    assert watched.tick() == "not ended within 90 s"
    watched.dog.end_begins(600.0)
    assert [watched.tick() for _ in range(1199)] == ["1"] * 1199
    assert watched.tick() == "not ended within 600 s"


async def test_the_loop_tells_that_it_runs_until_the_close():
    lines = []
    dog = Watchdog(2.0, lines.append)
    dog.start(asyncio.get_running_loop().call_later, has_child=False)
    await until(lambda: lines.count("1") >= 3, "ticks")
    dog.close()
    num_lines = len(lines)
    await asyncio.sleep(0.3)
    assert len(lines) == num_lines


async def test_a_child_that_somebody_ends_is_told_once(caplog):
    dog = Watchdog(2.0)
    dog.start(asyncio.get_running_loop().call_later, has_child=True)
    dog._child.kill()
    await until(lambda: "which watches for hangs, has ended (-9)" in caplog.text, "its end")
    dog.beat(BUILD_PATIENCE)
    await asyncio.sleep(0.3)
    assert len(caplog.messages) == 1
    dog.close()


def silent(silence, ticks, line="X"):
    """The ticks at which something is said, each with whether it is the end."""
    found = ((tick, silence.add([line])) for tick in range(1, ticks + 1))
    return [(tick, said[1]) for tick, said in found if said is not None]


def test_silence_is_shown_once_and_then_ended():
    assert silent(Silence(1.0, 60), 99) == [(30, False), (60, True)]
    silence = Silence(0.5, 4)
    said = [silence.add(lines) for lines in ([], ["1", "X"], [], ["X", "Y"], [], [])]
    assert said[:3] == [None, None, None]
    assert said[3] == ("Y for 1 s (learner.stuck_end_s)", False)
    assert said[5] == (f"{LOOP_STANDS} for 2 s (learner.stuck_end_s)", True)
    assert silence.add(["1", "not ended within 3 s"]) == ("not ended within 3 s", True)


def test_who_moves_or_is_stopped_begins_anew_and_may_take_longer_next_time():
    for end in (lambda silence: silence.add(["1"]), lambda s: s.add([], is_stopped=True)):
        silence = Silence(1.0, 10)
        assert silent(silence, 9) == [(5, False)]
        assert end(silence) is None
        assert silent(silence, 27) == [(13, False), (27, True)]


def test_a_build_may_take_longer_and_what_follows_it_a_part_of_that():
    silence = Silence(1.0, 60)
    silence.add([str(BUILD_PATIENCE)])
    assert silent(silence, 250) == []
    silence.add(["1"])
    assert silent(silence, 750) == [(375, False), (750, True)]
