"""A hang that holds the interpreter's lock: no thread of the process can see it, so a child does.

The child reads a byte from the learner now and then, which says how many times as long as usual the
next may take, as during a build. When none comes any more, it lets the learner
show its stacks by a signal whose handler is C, and then ends it: the learner has an asynchronous
read open whose completion calls `_exit`, on a thread of the C library that knows no such lock. The
child counts its own waits rather than seconds, and none while the learner is stopped, so neither a
suspended process nor a machine that slept is ended.

This file is also the child's program, and imports the standard library alone.

Runs on: a thread of its own, which writes the bytes; and the child
"""

import contextlib
import ctypes
import faulthandler
import logging
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

EXIT_STUCK = 70
DUMP_SIGNAL = signal.SIGUSR2
TICK_S = 1.0
# Between the word that ends it and the kernel, which would not take the exit code along.
GRACE_S = 2.0
# A silence that ended may come again, and last this many times as long, as in `watchdog.py`.
GROWTH = 3
_SIGEV_THREAD = 2


class LockWatch:
    """From the start until `close` this process is watched."""

    def __init__(self, dump_s: float, end_s: float) -> None:
        faulthandler.register(DUMP_SIGNAL, all_threads=True)
        self._tick_s = min(TICK_S, dump_s / 4)
        read_fd, self._end_fd = os.pipe()
        # Kept: the C library reads and writes them as long as this process lives.
        self._request = _exit_when_read(read_fd)
        limits = (str(round(limit_s / self._tick_s)) for limit_s in (dump_s, end_s))
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(self._tick_s), *limits, str(self._end_fd)],
            stdin=subprocess.PIPE,
            pass_fds=(self._end_fd,),
            process_group=0,
        )
        self.patience: Callable[[], int] = lambda: 1
        """How many times as long as usual the lock may be held now; 255 at most."""
        self._is_closed = threading.Event()
        self._beats = threading.Thread(target=self._beat_regularly, name="lock watch", daemon=True)
        self._beats.start()

    def close(self) -> None:
        self._is_closed.set()
        self._child.kill()
        self._beats.join()
        self._child.communicate()

    def beat(self) -> None:
        """Tell the child of the patience now, before the lock is held."""
        assert self._child.stdin is not None
        # The child may have been ended by somebody.
        with contextlib.suppress(OSError):
            os.write(self._child.stdin.fileno(), bytes([self.patience()]))

    def _beat_regularly(self) -> None:
        while not self._is_closed.wait(self._tick_s):
            self.beat()
            code = self._child.poll()
            if code is not None and not self._is_closed.is_set():
                logger.warning(
                    "the process %d, which watches the interpreter's lock, has ended (%d): a hang "
                    "that holds the lock is not ended any more (learner.stuck_end_s)",
                    *(self._child.pid, code),
                )
                return


class Silence:
    """Decides what to do about so many ticks without a byte."""

    def __init__(self, dump_ticks: int, end_ticks: int) -> None:
        self._dump_ticks, self._end_ticks = dump_ticks, end_ticks
        self._patience = 1
        self.ticks = self._longest = 0

    def end(self, patience: int) -> None:
        """A byte came, and the next may take so many times as long as it should."""
        self._longest = max(self._longest, self.ticks)
        self.ticks, self._patience = 0, patience

    def last(self, *, is_stopped: bool) -> str | None:
        """A tick passed without one: "dump", "end" or nothing."""
        self.ticks = 0 if is_stopped else self.ticks + 1
        if self.ticks >= self._limit(self._end_ticks):
            return "end"
        return "dump" if self.ticks == self._limit(self._dump_ticks) else None

    def _limit(self, ticks: int) -> int:
        return max(ticks * self._patience, GROWTH * self._longest)


def _exit_when_read(fd: int) -> object:
    """Let the C library end this process as soon as there is a byte to read; what it holds."""
    libc = ctypes.CDLL(None)
    byte, request = ctypes.create_string_buffer(1), ctypes.create_string_buffer(512)
    leave = ctypes.cast(libc._exit, ctypes.c_void_p).value
    # struct aiocb of glibc on 64 bits, with its struct sigevent.
    struct.pack_into("=i12xQQ", request, 0, fd, ctypes.addressof(byte), 1)
    struct.pack_into("=QiiQQ", request, 32, EXIT_STUCK, 0, _SIGEV_THREAD, leave, 0)
    # Without it the kernel ends what hangs, with its own exit code. An older glibc lacks it.
    is_known = hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "aio_read")
    if is_known and struct.calcsize("P") == 8:
        libc.aio_read(request)
    return byte, request


def _is_stopped(pid: int) -> bool:
    """By a signal, or by a debugger."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def _watch(pid: int, tick_s: float, silence: Silence, end_fd: int) -> None:
    while True:
        if select.select([0], [], [], tick_s)[0]:
            heard = os.read(0, 64)
            if not heard:
                return  # it has ended
            silence.end(heard[-1])
            continue
        todo = silence.last(is_stopped=_is_stopped(pid))
        if todo is None:
            continue
        held = f"the interpreter's lock has been held for {silence.ticks * tick_s:.0f} s"
        os.write(2, f"{held} {SAYS[todo]}\n".encode())
        if todo == "dump":
            os.kill(pid, DUMP_SIGNAL)
            continue
        os.write(end_fd, b".")
        give_up_at = time.monotonic() + GRACE_S
        while os.getppid() == pid and time.monotonic() < give_up_at:
            time.sleep(GRACE_S / 50)
        if os.getppid() == pid:
            os.kill(pid, signal.SIGKILL)
        return


SAYS = {
    "dump": "(learner.stuck_dump_s): all stacks of the learner",
    "end": "(learner.stuck_end_s): the learner ends",
}

if __name__ == "__main__":
    _tick_s, _dump_ticks, _end_ticks, _end_fd = sys.argv[1:]
    with contextlib.suppress(BrokenPipeError, ProcessLookupError):
        _watch(
            os.getppid(), float(_tick_s), Silence(int(_dump_ticks), int(_end_ticks)), int(_end_fd)
        )
