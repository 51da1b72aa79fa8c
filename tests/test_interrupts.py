"""Real processes that are told to end while they start: a word, no traceback, a code of ours."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from impala_async import interrupts
from impala_async.config.run import EnvSection, RunConfig
from impala_async.interrupts import deaf_children, quit_at_once
from impala_async.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
WITHIN_S = 60.0
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
# Seconds after the first of its modules that take long was imported. What comes before belongs to
# the interpreter. Evaluating nothing does not last longer than torch takes to be imported.
CODES = {signal.SIGINT: 130, signal.SIGTERM: 0}
DELAYS = [(door, s) for door in ("train", "learner", "actor") for s in (0.05, 0.3, 0.7, 1.5)]
DELAYS += [("evaluate", s) for s in (0.05, 0.2)]
ALL = [(door, s, signal.SIGINT) for door, s in DELAYS]
ALL += [(door, 0.3, signal.SIGTERM) for door in FLAGS]
ALL += [(door, s, signal.SIGTERM) for door in ("train", "learner") for s in (0.05, 1.0)]
# Each door, early and late, and each signal.
QUICK = [
    *(
        ("train", 0.3, signal.SIGINT),
        ("learner", 1.5, signal.SIGINT),
        ("actor", 0.7, signal.SIGINT),
    ),
    *(("evaluate", 0.05, signal.SIGINT), ("learner", 0.3, signal.SIGTERM)),
]
CASES = [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in ALL]


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
    assert process.stderr is not None
    while "pydantic" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(delay_s)
    process.send_signal(number)
    _, said = process.communicate(timeout=WITHIN_S)
    lines = [line for line in said.splitlines() if not line.startswith("import time:")]
    assert process.returncode == CODES[number], lines
    # "interrupted", or what a service says that was there already.
    assert not [line for line in lines if re.search("Traceback|File|Error|Interrupt", line)]
    # Either there is a run, or nothing that looks like one.
    has_result = (tmp_path / "new" / "summary.json").exists()
    assert (tmp_path / "new" / "config.json").exists() == has_result


def run(code, deaf=False):
    """A process that interrupts itself and then says that it lives."""
    whole = (
        "import os, signal\n"
        "from impala_async.interrupts import end_silently, quit_at_once, undone\n"
        f"{code}\nprint('alive')\n"
    )
    command = [sys.executable, "-c", whole]

    def start():
        return subprocess.run(
            command, capture_output=True, text=True, env=ENVIRONMENT, timeout=WITHIN_S
        )

    if not deaf:
        return start()
    with deaf_children():
        return start()


INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"
TERMINATE = "os.kill(os.getpid(), signal.SIGTERM)"


@pytest.mark.parametrize("deaf", [False, True])
def test_ctrl_c_is_a_word_and_a_code(deaf):
    ended = run(f"with quit_at_once():\n    {INTERRUPT}", deaf)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


def test_sigterm_is_a_word_and_a_code_too():
    ended = run(f"with quit_at_once():\n    {TERMINATE}")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "terminated\n")


@pytest.mark.parametrize(("inherited", "said"), [("SIG_DFL", "terminated"), ("SIG_IGN", "")])
def test_a_closed_terminal_is_a_sigterm_unless_it_is_to_be_ignored(inherited, said):
    code = (
        f"import os, signal\nsignal.signal(signal.SIGHUP, signal.{inherited})\n"
        "from impala_async.doors import run_door\n"
        "def body():\n    os.kill(os.getpid(), signal.SIGHUP)\n    print('alive')\n    return 0\n"
        "raise SystemExit(run_door(body))"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, timeout=WITHIN_S
    )
    alive = "" if said else "alive"
    assert (ended.returncode, ended.stdout.strip(), ended.stderr.strip()) == (0, alive, said)


def test_what_was_begun_is_taken_back_the_newest_first():
    ended = run(
        "def fail(): raise OSError\n"
        "with quit_at_once(), undone(lambda: os.write(1, b'1')), undone(fail):\n"
        "    with undone(lambda: os.write(1, b'done')): pass\n"
        f"    with undone(lambda: os.write(1, b'2')): {TERMINATE}"
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "21", "terminated\n")


@pytest.mark.parametrize("deaf", [False, True])
def test_or_nothing_at_all(deaf):
    ended = run(f"end_silently()\n{INTERRUPT}", deaf)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_a_deaf_child_hears_it_later():
    assert run(INTERRUPT, deaf=True).stdout == "alive\n"
    ended = run(f"{INTERRUPT}\nwith quit_at_once():\n    pass", deaf=True)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


def test_afterwards_all_is_as_before():
    numbers = interrupts.REQUESTS
    handlers, mask = (
        list(map(signal.getsignal, numbers)),
        signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    )
    with quit_at_once():
        assert set(map(signal.getsignal, numbers)) == {interrupts._quit}
    with deaf_children():
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert list(map(signal.getsignal, numbers)) == handlers
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


START = """
import atexit, os, sys, threading, time
from impala_async import interrupts
"""


def end(code):
    command = [sys.executable, "-c", START + code]
    return subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, timeout=WITHIN_S
    )


def test_a_thread_that_never_ends_is_named_and_left():
    ended = end(
        "interrupts.GRACE_S = 0.05\n"
        "threading.Thread(target=time.sleep, args=(1e6,), name='simulator').start()\n"
        "print('result')\n"
        "interrupts.leave(3)"
    )
    said = "ending without what the environment left running: Thread simulator\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "result\n", said)


def test_a_process_that_never_ends_is_ended_too():
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


def test_what_ends_by_itself_gets_the_time():
    ended = end(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "interrupts.GRACE_S = 60.0\n"
        "ThreadPoolExecutor(2).submit(print, 'worked').result()\n"
        "atexit.register(print, 'closed')\n"
        "interrupts.leave(0)"
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "worked\nclosed\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cuts_it_short_with_the_same_code(number):
    ended = end(
        "interrupts.GRACE_S = 60.0\n"
        f"tell = lambda: (time.sleep(0.1), os.kill(os.getpid(), {int(number)}), time.sleep(1e6))\n"
        "threading.Thread(target=tell).start()\n"
        "interrupts.leave(130)"
    )
    assert (ended.returncode, ended.stderr) == (130, "")
