"""Processes that end when the one that started them ends, however it ends.

The parent holds the write end of a pipe that it never writes to; its children, and theirs, hold
the read end. When the parent is gone, even by SIGKILL, the pipe is closed and every child sees
it. (The kernel's parent-death signal would follow the thread that started the child.)
"""

import os
import signal
import stat
import threading
import time

from impala_async.errors import EXIT_TRY_AGAIN

VARIABLE = "IMPALA_ASYNC_LIFELINE"
# A child that has not ended in good order by then ends anyway.
GRACE_S = 1.0


class Lifeline:
    """The parent's side: pass `fds` and `environment` to every child."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()

    @property
    def fds(self) -> tuple[int, ...]:
        return (self._read_fd,)

    @property
    def environment(self) -> dict[str, str]:
        return {VARIABLE: str(self._read_fd)}

    def close(self) -> None:
        """Let go: every child ends."""
        os.close(self._write_fd)
        os.close(self._read_fd)


def inherited_fds() -> tuple[int, ...]:
    """What a child passes on to its own children, whose environment names it already."""
    value = os.environ.get(VARIABLE, "")
    return (int(value),) if value.isdecimal() else ()


def hold() -> None:
    """In a child: from now on end with the parent. Without a lifeline this does nothing."""
    for fd in inherited_fds():
        threading.Thread(target=_watch, args=(fd,), name="lifeline", daemon=True).start()


def _watch(fd: int) -> None:
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return  # not a descriptor of ours: the variable came from somewhere else
        while os.read(fd, 1):
            pass
    except OSError:
        return
    os.kill(os.getpid(), signal.SIGTERM)
    # An interpreter that is being torn down lets no other thread run, and on a busy machine that
    # takes seconds: then the kernel ends us.
    signal.setitimer(signal.ITIMER_REAL, GRACE_S + 0.2)
    time.sleep(GRACE_S)
    os._exit(EXIT_TRY_AGAIN)
