"""Processes that begin with closed streams, or deaf to the end of their children."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from impala_async.doors import run_door
from impala_async.processes import begin

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
def test_no_file_of_ours_becomes_a_stream(closed: str, out: str, err: str, tmp_path: Path) -> None:
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


def test_a_door_hears_how_its_children_end_whoever_has_started_it() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run_door(lambda: subprocess.run(["sh", "-c", "exit 3"]).returncode) == 3
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_open_streams_are_left_as_they_are() -> None:
    before = sys.stdin, sys.stdout, sys.stderr
    begin()
    assert (sys.stdin, sys.stdout, sys.stderr) == before
