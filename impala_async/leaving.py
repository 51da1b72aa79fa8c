"""The end of a process, which nothing that an environment leaves behind may hold up.

Python waits at its end for threads that are no daemons, and multiprocessing for such processes.
Many a simulator leaves one that never ends.
"""

import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn

from impala_async.interrupts import REQUESTS

# What ends by itself once Python ends, as the threads of an idle pool do, needs much less.
GRACE_S = 2.0


def leave(code: int) -> NoReturn:
    """End this process with that exit code, within `GRACE_S`; a signal ends it at once."""
    for number in REQUESTS:
        signal.signal(number, lambda *_: os._exit(code))
    if _left():
        threading.Thread(target=_insist, args=(code,), name="leave", daemon=True).start()
    sys.exit(code)


def flush_output() -> None:
    """Say what is left. A reader that has gone, as `head` goes, is no error, nor a full disk."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            # The interpreter flushes once more when it ends, and would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _insist(code: int) -> None:
    time.sleep(GRACE_S)
    left = _left()
    if not left:
        return  # it ends by itself
    flush_output()
    names = ", ".join(f"{type(each).__name__} {each.name}" for each in left)
    os.write(2, f"ending without what the environment left running: {names}\n".encode())
    for each in left:
        if not isinstance(each, threading.Thread):
            each.terminate()
    os._exit(code)


def _left() -> list[Any]:
    """The threads and processes that Python waits for."""
    found: list[Any] = threading.enumerate()
    if "multiprocessing" in sys.modules:
        found += sys.modules["multiprocessing"].active_children()
    return [each for each in found if not each.daemon and each is not threading.main_thread()]
