"""Real processes: whoever holds a lifeline does not outlive the process at its other end."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from impala_async import processes
from impala_async.doors import run_door
from impala_async.errors import EXIT_TRY_AGAIN
from impala_async.processes import GATE_VARIABLE, VARIABLE, Gate, Lifeline, begin

PATIENCE_S = 10.0
ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if key != VARIABLE},
    "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
}
# All are gone within this time.
GONE_S = 2.0

# A process that holds its lifeline, says its id, and stays until it is ended. Arguments: how it
# takes a request to end, and how many generations follow.
MEMBER = """
    import os, signal, subprocess, sys, time
    from impala_async import processes

    manner, generations = sys.argv[1], int(sys.argv[2])
    if manner == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif manner == "orderly":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    processes.hold()
    if generations:
        arguments = [manner, str(generations - 1)]
        child = subprocess.Popen(
            [sys.executable, sys.argv[0], *arguments], pass_fds=processes.inherited_fds()
        )
    os.write(1, b"%d\\n" % os.getpid())
    while True:
        time.sleep(0.01)
"""
# The one whose death they follow: it starts a member for each argument and then only waits.
PARENT = """
    import subprocess, sys, time, os
    from impala_async.processes import Lifeline

    line = Lifeline()
    for manner in sys.argv[2:]:
        subprocess.Popen(
            [sys.executable, sys.argv[1], manner, "1"],
            env={**os.environ, **line.environment},
            pass_fds=line.fds,
        )
    time.sleep(1000)
"""


def write(path, program):
    path.write_text(textwrap.dedent(program))
    return str(path)


@pytest.fixture
def member(tmp_path):
    return write(tmp_path / "member.py", MEMBER)


@pytest.fixture
def started():
    """Processes of a test; what is left of them is ended by their ids."""
    processes = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def until(condition, within_s=PATIENCE_S):
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {within_s} s"
        time.sleep(0.005)


def is_gone(pid):
    """Ended; nobody may have asked for its exit code yet."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"


def read_pids(process, count):
    assert process.stdout is not None
    return [int(process.stdout.readline()) for _ in range(count)]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_children_and_grandchildren_end_with_the_parent(tmp_path, member, started, end):
    parent_program = write(tmp_path / "parent.py", PARENT)
    parent = subprocess.Popen(
        [sys.executable, parent_program, member, "default", "orderly", "stubborn"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
    )
    started.append(parent)
    pids = read_pids(parent, count=6)
    assert not any(map(is_gone, pids))
    parent.send_signal(end)
    try:
        until(lambda: all(map(is_gone, pids)), within_s=GONE_S)
    finally:
        for pid in pids:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


def start_member(member, line, started, manner):
    process = subprocess.Popen(
        [sys.executable, member, manner, "0"],
        env={**ENVIRONMENT, **line.environment},
        pass_fds=line.fds,
        stdout=subprocess.PIPE,
    )
    started.append(process)
    read_pids(process, count=1)
    return process


@pytest.mark.parametrize(
    ("manner", "code"),
    [("default", -signal.SIGTERM), ("orderly", 7), ("stubborn", EXIT_TRY_AGAIN)],
)
def test_letting_go_ends_a_child_in_good_order_or_anyway(member, started, manner, code):
    line = Lifeline()
    process = start_member(member, line, started, manner)
    assert process.poll() is None
    line.close()
    assert process.wait(GONE_S) == code


def test_a_child_without_a_lifeline_stays(member, started):
    line = Lifeline()
    free = subprocess.Popen(
        [sys.executable, member, "default", "0"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
    )
    started.append(free)
    read_pids(free, count=1)
    bound = start_member(member, line, started, "default")
    line.close()
    bound.wait(GONE_S)
    assert free.poll() is None


def test_a_child_that_comes_late_ends_too(member, started):
    line = Lifeline()
    (fd,) = line.fds
    # The end of the parent's side comes before the child has begun to watch.
    late = os.dup(fd)
    line.close()
    os.dup2(late, fd)
    process = subprocess.Popen(
        [sys.executable, member, "stubborn", "0"],
        env={**ENVIRONMENT, **line.environment},
        pass_fds=(fd,),
        stdout=subprocess.PIPE,
    )
    started.append(process)
    os.close(fd)
    os.close(late)
    assert process.wait(PATIENCE_S) == EXIT_TRY_AGAIN


def test_the_variable_names_the_descriptor(monkeypatch):
    line = Lifeline()
    try:
        monkeypatch.delenv(VARIABLE, raising=False)
        assert processes.inherited_fds() == ()
        for key, value in line.environment.items():
            monkeypatch.setenv(key, value)
        assert processes.inherited_fds() == line.fds
        assert not os.get_inheritable(line.fds[0])
    finally:
        line.close()


@pytest.mark.parametrize("value", ["", "x", "-1", "3.5", " 3", "²"])
def test_a_variable_that_names_none(monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    assert processes.inherited_fds() == ()
    processes.hold()


@pytest.mark.parametrize("kind", ["file", "null", "closed"])
def test_a_descriptor_that_is_no_lifeline_ends_nobody(tmp_path, kind):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    fd = os.open(os.devnull if kind == "null" else path, os.O_RDONLY)
    program = (
        "import os, sys, threading\n"
        "from impala_async import processes\n"
        "if sys.argv[1] == 'closed': os.close(processes.inherited_fds()[0])\n"
        "processes.hold()\n"
        "for thread in threading.enumerate():\n"
        "    if thread.name == 'lifeline': thread.join()\n"
        "if sys.argv[1] == 'file':\n"
        "    print(os.read(processes.inherited_fds()[0], 99).decode())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, kind],
        env={**ENVIRONMENT, VARIABLE: str(fd)},
        pass_fds=(fd,),
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=False,
    )
    os.close(fd)
    assert done.returncode == 0
    # What belongs to somebody else was not read either.
    assert kind != "file" or done.stdout == b"content\n"


def test_a_child_that_lets_no_thread_run_ends_too():
    """As an interpreter does that is being torn down: only the kernel can end it."""
    code = (
        "import ctypes, signal, sys\n"
        "from impala_async import processes\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "processes.hold()\n"
        "print('ready', flush=True)\n"
        "import time; time.sleep(0.3)\n"
        "ctypes.PyDLL(None).sleep(30)\n"  # with the GIL held
    )
    line = Lifeline()
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, **line.environment},
        pass_fds=line.fds,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    line.close()
    try:
        assert child.wait(10) in (-signal.SIGALRM, 75)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_who_waits_at_a_gate_is_let_in_when_it_is_opened(monkeypatch):
    gate = Gate()
    passed = []

    def come():
        monkeypatch.setenv(GATE_VARIABLE, gate.environment[GATE_VARIABLE])
        thread = threading.Thread(target=lambda: passed.append(processes.wait_at_gate() is None))
        thread.start()
        until(lambda: GATE_VARIABLE not in os.environ)
        return thread

    threads = [come(), come()]
    assert not gate.is_open
    assert passed == []
    monkeypatch.setenv(GATE_VARIABLE, gate.environment[GATE_VARIABLE])
    processes.open_gate()
    # It is for none of our children.
    assert GATE_VARIABLE not in os.environ
    threads.append(come())
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(passed) == 3
    assert gate.is_open
    gate.close()


def test_without_a_gate_nobody_waits(monkeypatch):
    monkeypatch.delenv(GATE_VARIABLE, raising=False)
    processes.wait_at_gate()
    processes.open_gate()


ROOT = Path(__file__).resolve().parents[1]
WITHIN_S = 60.0
OPEN = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
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
    [
        ("<&-", "out\n", "err\n"),
        (">&-", "", "err\n"),
        ("2>&-", "out\n", ""),
        ("<&- >&- 2>&-", "", ""),
    ],
)
def test_no_file_of_ours_becomes_a_stream(closed, out, err, tmp_path):
    ended = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", OPEN, str(ROOT)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=WITHIN_S,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, out, err)
    assert int((tmp_path / "fd").read_text()) > 2


def test_a_door_hears_how_its_children_end_whoever_has_started_it():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run_door(lambda: subprocess.run(["sh", "-c", "exit 3"]).returncode) == 3
    finally:
        signal.signal(signal.SIGCHLD, before)


IN_BACKGROUND = """
import os, pty, signal, sys, termios

pid, terminal = pty.fork()
if pid == 0:
    modes = termios.tcgetattr(1)
    modes[3] |= termios.TOSTOP
    termios.tcsetattr(1, termios.TCSANOW, modes)
    if (child := os.fork()) == 0:
        os.setpgid(0, 0)
        from impala_async.processes import begin
        begin()
        os.write(1, b"said")
        os._exit(0)
    _, status = os.waitpid(child, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(child, signal.SIGKILL)
    os._exit(os.WIFSTOPPED(status))
said = os.read(terminal, 99)
_, status = os.waitpid(pid, 0)
print(said.decode(), os.waitstatus_to_exitcode(status))
"""


def test_a_terminal_that_stops_those_in_the_background_does_not_stop_ours():
    ended = subprocess.run(
        [sys.executable, "-c", IN_BACKGROUND], capture_output=True, text=True, timeout=WITHIN_S
    )
    assert (ended.stdout, ended.stderr) == ("said 0\n", "")


def test_open_streams_are_left_as_they_are():
    before = sys.stdin, sys.stdout, sys.stderr
    begin()
    assert (sys.stdin, sys.stdout, sys.stderr) == before
