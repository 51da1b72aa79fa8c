"""How the processes that we start begin, and how they end when the one that started them does.

The parent holds the write end of a pipe that it never writes to; its children, and theirs, hold
the read end. When the parent is gone, even by SIGKILL, the pipe is closed and every child sees
it. (The kernel's parent-death signal would follow the thread that started the child.)
"""

import os
import select
import signal
import stat
import sys
import threading
import time

from impala_async.errors import EXIT_TRY_AGAIN

VARIABLE = "IMPALA_ASYNC_LIFELINE"
GATE_VARIABLE = "IMPALA_ASYNC_GATE"
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


class Gate:
    """Where some children of a process wait until another one opens it; then it stays open."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0)

    @property
    def fds(self) -> tuple[int, ...]:
        return (self._fd,)

    @property
    def environment(self) -> dict[str, str]:
        return {GATE_VARIABLE: str(self._fd)}

    @property
    def is_open(self) -> bool:
        return _is_readable(self._fd, timeout_ms=0)

    def close(self) -> None:
        os.close(self._fd)


def open_gate() -> None:
    """In a child: let in those who wait. Without a gate this does nothing."""
    for fd in _take_gate():
        os.eventfd_write(fd, 1)


def wait_at_gate() -> None:
    """In a child: until another one has opened the gate. Without one this does nothing."""
    for fd in _take_gate():
        # The count stays there for all who come later.
        _is_readable(fd, timeout_ms=None)


def _take_gate() -> tuple[int, ...]:
    """Once: it is not for the children of this one."""
    value = os.environ.pop(GATE_VARIABLE, "")
    return (int(value),) if value.isdecimal() else ()


def _is_readable(fd: int, timeout_ms: int | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def inherited_fds() -> tuple[int, ...]:
    """A child passes these on to its own children, whose environment names them already."""
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


def begin() -> None:
    """Before anything is opened or started. Twice does no harm."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Those in process groups of their own say something too, where a terminal has `stty tostop`.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free, which is fd
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", closefd=False))  # noqa: SIM115
