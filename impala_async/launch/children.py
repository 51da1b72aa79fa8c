"""Processes behind our doors: how they are started, end in time, and what their end is to a shell.

They end with the process that has started them, however that ends.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from impala_async.errors import SHELL_SIGNAL, StartError
from impala_async.processes import Lifeline

POLL_S = 0.05
ASKED_END_S = 3.0


def spawn(
    door: str,
    flags: Sequence[str],
    lifeline: Lifeline,
    output: IO[bytes] | None = None,
    fds: tuple[int, ...] = (),
) -> subprocess.Popen[bytes]:
    """A process behind a door, which ends with this one at the latest, and has these descriptors
    under their numbers; StartError if the system gives none."""
    command = [sys.executable, "-m", f"impala_async.{door}", *flags]
    # In a group of its own: Ctrl-C reaches this process alone, which passes it on once.
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "process_group": 0}
    try:
        return lifeline.start(command, fds, stdout=output, stderr=output, **how)
    except OSError as error:
        raise StartError(f"cannot start a process of the {door}: {error.strerror}") from None


def exit_code(code: int) -> int:
    """The exit code that a shell gives: 128 + n for a process that signal n ended."""
    return code if code >= 0 else SHELL_SIGNAL - code


def end_in_time(
    processes: Sequence[subprocess.Popen[bytes]],
    grace_s: float,
    is_hurried: Callable[[], bool] = lambda: False,
    asked_s: float | None = None,
) -> None:
    """Let processes end by themselves, then ask, then insist; all at once as soon as we hurry."""
    asked_s = ASKED_END_S if asked_s is None else asked_s
    for step, patience_s in (("wait", grace_s), ("terminate", asked_s), ("kill", ASKED_END_S)):
        for process in processes:
            if process.poll() is None and step != "wait":
                getattr(process, step)()
        until = time.monotonic() + patience_s
        while any(process.poll() is None for process in processes):
            if time.monotonic() >= until or is_hurried():
                break
            time.sleep(POLL_S)
    for process in processes:
        process.wait()
