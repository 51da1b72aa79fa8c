"""Real processes that are interrupted while they start: a word, no traceback, exit code 130."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from impala_async import interrupts
from impala_async.config import EnvSection, RunConfig
from impala_async.interrupts import deaf_children, quit_at_once
from impala_async.learner.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
WITHIN_S = 30.0
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
DELAYS = [(door, s) for door in ("train", "learner", "actor") for s in (0.05, 0.3, 0.7, 1.5)]
DELAYS += [("evaluate", s) for s in (0.05, 0.2)]


@pytest.mark.e2e
@pytest.mark.parametrize(("door", "delay_s"), DELAYS)
def test_a_door_that_is_interrupted_early_ends_with_a_word(
    door: str, delay_s: float, tmp_path: Path
) -> None:
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
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=WITHIN_S)
    lines = [line for line in said.splitlines() if not line.startswith("import time:")]
    assert process.returncode == 130, lines
    # "interrupted", or what a service says that was there already.
    assert not [line for line in lines if re.search("Traceback|File|Error|Interrupt", line)]


def run(code: str, deaf: bool = False) -> subprocess.CompletedProcess[str]:
    """A process that interrupts itself and then says that it lives."""
    whole = (
        "import os, signal\n"
        "from impala_async.interrupts import end_silently, quit_at_once\n"
        f"{code}\nprint('alive')\n"
    )
    command = [sys.executable, "-c", whole]

    def start() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, capture_output=True, text=True, env=ENVIRONMENT, timeout=WITHIN_S
        )

    if not deaf:
        return start()
    with deaf_children():
        return start()


INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize("deaf", [False, True])
def test_ctrl_c_is_a_word_and_a_code(deaf: bool) -> None:
    ended = run(f"with quit_at_once():\n    {INTERRUPT}", deaf)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("deaf", [False, True])
def test_or_nothing_at_all(deaf: bool) -> None:
    ended = run(f"end_silently()\n{INTERRUPT}", deaf)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_a_deaf_child_hears_it_later() -> None:
    assert run(INTERRUPT, deaf=True).stdout == "alive\n"
    ended = run(f"{INTERRUPT}\nwith quit_at_once():\n    pass", deaf=True)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


def test_afterwards_all_is_as_before() -> None:
    handler, mask = signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with quit_at_once():
        assert signal.getsignal(signal.SIGINT) is interrupts._quit
    with deaf_children():
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.getsignal(signal.SIGINT) is handler
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
