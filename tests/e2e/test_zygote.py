"""A process that the zygote forks is given what a started interpreter is, and ends as it does."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.zygote import Forked, children

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
SHOWS = """
import json, os, random, signal, sys
import numpy as np

named = [path for path in sys.path if os.path.isdir(path)]
shown = {
    "flags": sys.argv[1:],
    "name": __name__,
    "path": named,
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "fds": sorted(os.listdir("/proc/self/fd")),
    "passed": os.read(int(sys.argv[1]), 9).decode(),
    "tasks": len(os.listdir("/proc/self/task")),
    "leads": os.getpgrp() == os.getpid(),
    "parent": os.getppid(),
    "handlers": [str(signal.getsignal(number)) for number in range(1, 32)],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "heard": sys.stdin.read(),
}
print(json.dumps(shown))
print(random.random(), np.random.random(), file=sys.stderr)
sys.exit({end})
"""
TERMINATED = "os.kill(os.getpid(), 15)"


def ask(make, folder, end, group):
    (folder / "shows.py").write_text(SHOWS.replace("{end}", end))
    passed, ours = os.pipe()
    os.write(ours, b"passed on")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    process = make(
        [sys.executable, "-m", "shows", str(passed), "--set", "a=b c"],
        pass_fds=[passed],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OF": "this start"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=group,
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    os.close(passed)
    os.close(ours)
    out, error = process.communicate(b"to hear", timeout=60)
    return process.returncode, json.loads(out), error.decode()


@pytest.mark.parametrize(
    ("end", "code"), [("0", 0), ("78", 78), ("'a reason'", 1), (TERMINATED, -signal.SIGTERM)]
)
def test_it_is_given_what_an_interpreter_is(tmp_path, end, code):
    if code < 0:
        end = f"sys.stdout.flush() or {end}"
    group = 0 if code else -1
    forked_code, forked, _ = ask(Forked, tmp_path, end, group)
    started_code, started, _ = ask(subprocess.Popen, tmp_path, end, group)
    assert forked == started
    assert (forked_code, started_code) == (code, code)
    assert forked["parent"] == os.getpid()


def test_two_have_random_numbers_of_their_own_and_the_zygote_is_no_child(tmp_path):
    (_, _, first), (_, _, second) = (ask(Forked, tmp_path, "0", -1) for _ in range(2))
    assert not {*first.split()} & {*second.split()}
    process = Forked([sys.executable, "-m", "this"], stdout=subprocess.DEVNULL)
    assert [child.pid for child in children()] == [process.pid]
    assert process.wait(60) == 0
    assert children() == []
