"""Real processes: none outlives its parent, and each that is told to end does, with a word."""

import errno
import mmap
import os
import platform
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from impala_async import processes
from impala_async.config.run import EnvSection, RunConfig
from impala_async.doors import run_door
from impala_async.errors import Exit
from impala_async.processes import (
    ECHO_S,
    REQUESTS,
    VARIABLE,
    Lifeline,
    quit_at_once,
    terms_later,
    without_echo,
)
from impala_async.runs.folder import RunFolder

PATIENCE_S = 60.0
# With their parent all are gone within this time.
GONE_S = 2.0
ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if key != VARIABLE},
    "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
}


def run(code, *args, **how):
    """The exit code of a Python process, and what it said."""
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        **{"env": ENVIRONMENT, "timeout": PATIENCE_S, "capture_output": True, "text": True, **how},
    )
    return ended.returncode, ended.stdout, ended.stderr


# -------------------- with the parent

# A process that holds its lifeline, says its id, and stays until it is ended, in its own manner.
MEMBER = """
import os, signal, sys, time
from impala_async import processes

manner = sys.argv[1]
if manner == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif manner == "orderly":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
processes.hold()
os.write(1, b"%d\\n" % os.getpid())
while True:
    time.sleep(0.01)
"""


def test_letting_go_ends_a_child_in_good_order_or_anyway():
    line = Lifeline()
    command = [sys.executable, "-c", MEMBER]
    manners = ("default", "orderly", "stubborn")
    bound = {name: line.start([*command, name], stdout=subprocess.PIPE) for name in manners}
    free = subprocess.Popen([*command, "default"], stdout=subprocess.PIPE, env=ENVIRONMENT)
    with free:
        for process in (free, *bound.values()):
            process.stdout.readline()
        assert not any(process.poll() for process in bound.values())
        line.close()
        codes = {}
        for manner, process in bound.items():
            with process:
                codes[manner] = process.wait(2 * GONE_S)
        assert free.poll() is None
        free.kill()
    assert codes == {"default": -signal.SIGTERM, "orderly": 7, "stubborn": Exit.TRY_AGAIN}


@pytest.mark.parametrize("is_rank", [True, False])
def test_a_child_of_torchrun_is_asked_to_end_when_that_is_killed(is_rank):
    member = MEMBER.replace("processes.hold", "processes.PARENT_POLL_S = 0.05; processes.hold", 1)
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    env = ENVIRONMENT | ({processes.TORCHRUN: "none"} if is_rank else {})
    command = [sys.executable, "-c", parent, member, "orderly"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as process:
        child = int(process.stdout.readline())
        process.kill()
        # Its end closes the pipe.
        closed, _, _ = select.select([process.stdout], [], [], 2 * GONE_S if is_rank else 0.5)
        if not closed:
            os.kill(child, signal.SIGKILL)
    assert bool(closed) == is_rank


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is another one")
def test_letting_go_ends_a_child_whose_code_holds_the_lock():
    line = Lifeline()
    # It says its word with the lock held, which no thread of it gets from then on.
    code = "libc = ctypes.PyDLL(None); libc.write(1, b'!', 1); libc.sleep(30)"
    command = f"import ctypes; from impala_async import processes; processes.hold(); {code}"
    with line.start([sys.executable, "-c", command], stdout=subprocess.PIPE) as process:
        assert process.stdout.read(1) == b"!"
        line.close()
        assert process.wait(2 * GONE_S) == -signal.SIGALRM


@pytest.mark.parametrize("kind", ["file", "closed", "no number"])
def test_a_descriptor_that_is_no_lifeline_ends_nobody(tmp_path, kind):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    program = """
        import os, sys, threading
        from impala_async import processes
        fds = processes.inherited_fds()
        if sys.argv[1] == "closed": os.close(*fds)
        processes.hold()
        for thread in threading.enumerate():
            if thread.name == "lifeline": thread.join()
        if sys.argv[1] == "file": print(os.read(*fds, 99).decode())
    """
    with path.open() as file:
        fd = file.fileno()
        value = "²" if kind == "no number" else str(fd)
        code, out, _ = run(program, kind, env={**ENVIRONMENT, VARIABLE: value}, pass_fds=(fd,))
    # A descriptor of somebody else was not read either.
    assert (code, out) == (0, "content\n" if kind == "file" else "")


# -------------------- the beginning

OPEN = """
import subprocess, sys
from impala_async.doors import run_door

def body():
    with open("fd", "w") as file:
        file.write(str(file.fileno()))
    print("out")
    print("err", file=sys.stderr)
    sys.stdin.read()
    child = "import sys; sys.exit(None in (sys.stdin, sys.stdout, sys.stderr))"
    return subprocess.run([sys.executable, "-c", child], close_fds=True).returncode

sys.exit(run_door(body))
"""


@pytest.mark.parametrize(
    ("closed", "out", "err"),
    [("<&-", "out\n", "err\n"), (">&- 2>&-", "", ""), ("<&- >&- 2>&-", "", "")],
)
def test_no_file_of_ours_becomes_a_stream(closed, out, err, tmp_path):
    ended = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", OPEN],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=ENVIRONMENT,
        timeout=PATIENCE_S,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, out, err)
    assert int((tmp_path / "fd").read_text()) > 2


def test_a_door_hears_how_its_children_end_and_no_terminal_stops_it_whoever_has_started_it():
    before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTTOU)}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    try:
        assert run_door(lambda: subprocess.run(["sh", "-c", "exit 3"]).returncode) == 3
        # Where a terminal has `stty tostop`, it would stop who writes from the background.
        assert signal.getsignal(signal.SIGTTOU) == signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -------------------- a signal

ANY_PORT = "tcp://127.0.0.1:*"
FLAGS = {
    "train": ["--run-dir", "new"],
    "learner": [
        *("--run-dir", "new", "--set", "env.id=CartPole-v1"),
        *("--set", f"bind.data={ANY_PORT}", "--set", f"bind.weights={ANY_PORT}"),
    ],
    "actor": ["--learner", "tcp://127.0.0.1:9"],
    "evaluate": ["old"],
}
# Seconds after the first of its modules that take long was imported. The time before belongs to
# the interpreter. Evaluating nothing does not last longer than torch takes to be imported.
CASES = [
    *(("train", 0.3, signal.SIGINT), ("learner", 1.5, signal.SIGINT)),
    *(("actor", 0.7, signal.SIGINT), ("evaluate", 0.05, signal.SIGINT)),
    ("learner", 0.3, signal.SIGTERM),
    *(
        pytest.param(door, delay_s, number, marks=pytest.mark.slow)
        for door in FLAGS
        for delay_s in ((0.05, 0.2) if door == "evaluate" else (0.05, 0.7, 1.0))
        for number in (signal.SIGINT, signal.SIGTERM)
    ),
]


@pytest.mark.e2e
@pytest.mark.parametrize(("door", "delay_s", "number"), CASES)
def test_a_door_that_is_interrupted_early_ends_with_a_word(door, delay_s, number, tmp_path):
    old = RunFolder(tmp_path / "old")
    old.begin(RunConfig(env=EnvSection(id="CartPole-v1")))
    old.let_go()
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", f"impala_async.{door}", *FLAGS[door]],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )
    while "pydantic" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(delay_s)
    process.send_signal(number)
    _, said = process.communicate(timeout=PATIENCE_S)
    lines = [line for line in said.splitlines() if not line.startswith("import time:")]
    ended = 75 if door == "evaluate" else 0  # which owes a result
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: ended}[number], lines
    # "interrupted", or what a service says that was there already.
    assert not [line for line in lines if re.search("Traceback|File|Error|Interrupt", line)]
    # Either there is a run, or nothing that looks like one.
    has_result = (tmp_path / "new" / "summary.json").exists()
    assert (tmp_path / "new" / "config.json").exists() == has_result


def told(code, number=signal.SIGINT, *, child=False, stderr=subprocess.PIPE):
    """A process that sends itself a signal where the code says so, and then says that it lives."""
    head = "import os, signal\nfrom impala_async.processes import *\n"
    sent = code.replace("TELL", f"os.kill(os.getpid(), {int(number)})")
    code = f"{head}{sent}\nprint('alive')\n"
    if not child:
        return run(code, capture_output=False, stdout=subprocess.PIPE, stderr=stderr)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = Lifeline().start([sys.executable, "-c", code], **streams)
    out, err = started.communicate(timeout=PATIENCE_S)
    return started.returncode, out, err


def test_a_signal_is_a_word_and_a_code_or_nothing_at_all():
    assert told("with quit_at_once(): TELL") == (130, "", "interrupted\n")
    assert told("with quit_at_once(): TELL", signal.SIGTERM) == (0, "", "terminated\n")
    assert told("end_silently(); TELL", child=True) == (-signal.SIGINT, "", "")


def test_a_word_that_nobody_reads_holds_up_no_end():
    reads, writes = os.pipe()
    try:
        os.set_blocking(writes, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writes, bytes(4096))
        os.set_blocking(writes, True)
        code = "from impala_async import output\noutput.GRACE_S = 0.1\nwith quit_at_once(): TELL"
        assert told(code, signal.SIGTERM, stderr=writes) == (0, "", None)
    finally:
        os.close(reads)
        os.close(writes)


def test_a_signal_that_comes_again_at_once_is_the_same_press():
    now, heard = 100.0, []
    hear = without_echo(lambda number, frame: heard.append((number, now)), clock=lambda: now)
    hear(signal.SIGTERM, None)
    # One that is held down is heard again.
    for _ in range(4):
        hear(signal.SIGINT, None)
        now += ECHO_S / 2
    number = signal.SIGINT
    assert heard == [(signal.SIGTERM, 100.0), (number, 100.0), (number, 100.0 + ECHO_S)]


def test_a_child_hears_ctrl_c_once_its_door_is_open():
    assert told("TELL", child=True) == (0, "alive\n", "")
    assert told("TELL\nwith quit_at_once(): pass", child=True) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("inherited", "outcome"),
    [("SIG_DFL", (0, "", "terminated\n")), ("SIG_IGN", (0, "alive\n", ""))],
)
def test_a_closed_terminal_is_a_sigterm_unless_it_is_to_be_ignored(inherited, outcome):
    code = f"""
        import os, signal
        signal.signal(signal.SIGHUP, signal.{inherited})
        from impala_async.doors import run_door
        def body():
            os.kill(os.getpid(), signal.SIGHUP)
            print('alive')
            return 0
        raise SystemExit(run_door(body))
    """
    assert run(code) == outcome


def test_what_was_begun_is_taken_back_the_newest_first():
    code = (
        "def fail(): raise OSError\n"
        "with quit_at_once(), undone(lambda: os.write(1, b'1')), undone(fail):\n"
        "    with undone(lambda: os.write(1, b'done')): pass\n"
        "    with undone(lambda: os.write(1, b'2')): TELL"
    )
    assert told(code, signal.SIGTERM) == (0, "21", "terminated\n")


def test_a_word_may_be_heard_later_but_ctrl_c_is_heard_at_once():
    later = "with quit_at_once():\n    with terms_later():\n        TELL\n        print('held')"
    assert told(later, signal.SIGTERM) == (0, "held\n", "terminated\n")
    assert told(later, signal.SIGINT) == (130, "", "interrupted\n")
    assert told(later.replace("TELL", "pass")) == (0, "held\nalive\n", "")


def test_it_is_heard_in_a_start_that_is_too_long_or_at_a_second_word_and_children_hear_theirs():
    head = "import time\nfrom impala_async import processes\n"
    waits = "with quit_at_once(), terms_later():\n    TELL\n    time.sleep(60)"
    soon = f"{head}processes.TERM_PATIENCE_S = 0.7\n{waits}"
    assert told(soon, signal.SIGTERM) == (0, "", "terminated\n")
    twice = waits.replace("time.sleep(60)", "time.sleep(0.6)\n    TELL\n    time.sleep(60)")
    assert told(head + twice, signal.SIGTERM) == (0, "", "terminated\n")
    child = "with quit_at_once(), terms_later():\n    child = subprocess.Popen(['sleep', '60'])\n"
    child += "    child.terminate()\n    print(child.wait())"
    assert told(f"import subprocess\n{child}") == (0, "-15\nalive\n", "")


def test_afterwards_all_is_as_before():
    handlers = list(map(signal.getsignal, REQUESTS))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with quit_at_once(), terms_later():
        assert set(map(signal.getsignal, REQUESTS)).isdisjoint(handlers)
    Lifeline().start(["true"]).wait()
    assert list(map(signal.getsignal, REQUESTS)) == handlers
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


def test_sigterm_ends_what_foreign_code_forks_and_is_not_heard_in_its_stead():
    code = """
    import os, select, signal, time
    from impala_async import processes

    processes.begin()
    signal.signal(signal.SIGTERM, lambda *_: None)
    heard, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    begun, begins = os.pipe()
    if (child := os.fork()) == 0:
        os.write(begins, b".")
        time.sleep(1e6)
    os.read(begun, 1)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), select.select([heard], [], [], 0)[0])
    """
    assert run(code) == (0, "-15 []\n", "")


# -------------------- the end in time


def leave(code, grace_s, body):
    head = "import atexit, multiprocessing, os, threading, time\nfrom impala_async import processes"
    return run(f"{head}\nprocesses.GRACE_S = {grace_s}\n{body}\nprocesses.leave({code})")


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("threading.Thread(target=time.sleep, args=(1e6,), name='sim').start()", "Thread sim"),
        (
            "fork = multiprocessing.get_context('fork')\n"
            "fork.Process(target=time.sleep, args=(1e6,), name='game').start()",
            # It held our streams open.
            "ForkProcess game",
        ),
    ],
)
def test_what_never_ends_is_named_and_left(body, name):
    said = f"ending without what the environment left running: {name}\n"
    assert leave(3, 0.05, f"{body}\nprint('result')") == (3, "result\n", said)


def test_what_never_ends_is_left_where_nobody_reads_its_name():
    gone = "read, write = os.pipe()\nos.dup2(write, 2)\nos.close(read)"
    stays = "threading.Thread(target=time.sleep, args=(1e6,)).start()"
    assert leave(3, 0.05, f"{gone}\n{stays}") == (3, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_python_takes_itself_down_changes_no_exit_code(number):
    """Its own handlers are gone by then."""
    late = f"class Late:\n    def __del__(self, kill=os.kill, me=os.getpid()): kill(me, {number:d})"
    assert leave(3, 0.05, f"{late}\nlate = Late()") == (3, "", "")


def test_what_ends_by_itself_gets_the_time():
    body = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "ThreadPoolExecutor(2).submit(print, 'worked').result()\n"
        "atexit.register(print, 'closed')"
    )
    assert leave(0, 60.0, body) == (0, "worked\nclosed\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cuts_it_short_with_the_same_code(number):
    body = (
        f"tell = lambda: (time.sleep(0.1), os.kill(os.getpid(), {int(number)}), time.sleep(1e6))\n"
        "threading.Thread(target=tell).start()"
    )
    assert leave(130, 60.0, body) == (130, "", "")


# -------------------- freed memory

MMAP, TRIM, ARENAS = -3, -1, -8
NUM_ROUNDS = 20
CHURN = f"""
import resource, sys
import numpy as np
from impala_async.processes import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def churn():
    # A block beside it is freed last, as an activation is: so the heap could shrink each time.
    first, second = np.ones(24 << 20, np.uint8), np.ones(40 << 20, np.uint8)
churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({NUM_ROUNDS}):
    churn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is another one")
def test_what_is_allocated_again_faults_no_more():
    kept, given_back = (int(run(CHURN, how)[1]) for how in ("keep", "as it is"))
    assert kept < 100 * NUM_ROUNDS
    # Otherwise this test shows nothing.
    assert given_back > 10 * kept


FLOOD = """
import threading
import numpy as np, psutil
from impala_async.processes import give_back_freed_memory, keep_freed_memory
keep_freed_memory()
rss = psutil.Process().memory_info
flood = []
before = rss().rss
fill = lambda: flood.extend(np.ones(16 << 10, np.uint8) for _ in range(3000))
thread = threading.Thread(target=fill)
thread.start()
thread.join()
flood.clear()
kept = rss().rss
give_back_freed_memory()
print(kept - before, rss().rss - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is another one")
def test_memory_of_a_flood_in_another_thread_can_be_given_back():
    kept, left = map(int, run(FLOOD)[1].split())
    assert kept > 40e6
    assert left < 10e6


class Library:
    """A C library that refuses thresholds over a limit, and one that knows none."""

    def __init__(self, largest):
        self.set = {}

        def mallopt(option, value):
            if option == MMAP and value > largest:
                return 0
            self.set[option] = value
            return 1

        if largest >= 0:
            self.mallopt = mallopt


@pytest.mark.parametrize(
    ("largest", "options"),
    [(1 << 40, {MMAP, TRIM, ARENAS}), (32 << 20, {MMAP, TRIM, ARENAS}), (0, {ARENAS}), (-1, set())],
    ids=["new", "old", "stubborn", "another"],
)
def test_both_thresholds_or_none(largest, options, monkeypatch):
    library = Library(largest)
    monkeypatch.setattr(processes.ctypes, "CDLL", lambda name: library)
    processes.keep_freed_memory()
    assert library.set.keys() == options
    assert library.set.get(MMAP, 0) <= largest or largest < 0


def test_growth_is_seen_for_a_while_and_not_for_ever(monkeypatch):
    now = 0.0
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now))
    growth = processes.Growth()
    assert not growth.is_seen()
    # Memory that an earlier test has given back may be used again, and that is no growth.
    held = mmap.mmap(-1, processes.GROWTH_BYTES + (16 << 20))
    for page in range(0, len(held), mmap.PAGESIZE):
        held[page] = 1
    assert growth.is_seen()
    assert not growth.is_seen(expected_bytes=len(held))
    now = processes.GROWTH_OVER_S + 1.0
    assert not growth.is_seen()


def test_growth_that_cannot_be_looked_at_is_none(monkeypatch):
    growth, look = processes.Growth(), open

    def refuse(*given):
        raise OSError(errno.EMFILE, "Too many open files")

    assert not growth.is_seen()
    monkeypatch.setattr("builtins.open", refuse)
    assert not growth.is_seen()
    monkeypatch.setattr("builtins.open", look)
    assert not growth.is_seen()


def test_a_process_that_foreign_code_forks_does_not_hold_up_an_end():
    code = """
import os, select
from impala_async.processes import Lifeline
lifeline = Lifeline()
reader = os.dup(lifeline._read_fd)
told, go_on = os.pipe()
if os.fork() == 0:
    os.close(go_on)
    os.read(told, 1)  # until its parent is gone
    os._exit(0)
lifeline.close()
poll = select.poll()
poll.register(reader, select.POLLIN)
print(poll.poll(5000) == [(reader, select.POLLHUP)])
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert said.stdout == "True\n", said.stderr
