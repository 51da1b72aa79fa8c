"""The output of a process: it never waits for its reader, and tells of what is waited for.

A terminal that is stopped by Ctrl-S, a pager, or a line that stalls makes a write wait until it is
read, and every thread that logs waits with it. So a thread of its own writes to such a stream.
"""

import logging
import math
import os
import queue
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any, TextIO

# Pieces of text that wait to be read; what comes beyond them is lost, and counted.
MOST_WAITING = 2048
# At the end of a process; then what nobody has read is lost.
GRACE_S = 2.0
WRITER = "output"
# A wait is told of not at once, then now and then.
AFTER_S = 3.0
EVERY_S = 10.0
LOOK_EVERY_S = 0.25


class Unhurried:
    """A stream to write to that never waits. After an error each write raises it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # Unlike other queues, a signal's handler may use it.
        self._waiting: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        self._num_lost = 0
        self._error: OSError | ValueError | None = None
        threading.Thread(target=self._serve, name=WRITER, daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        """All else is the stream's own."""
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self.check()
        if self._waiting.qsize() >= MOST_WAITING:
            self._num_lost += text.count("\n")
            return len(text)
        if self._num_lost:
            missing = f"({self._num_lost} lines are missing here: nobody read them in time)\n"
            self._num_lost = 0
            self._waiting.put(missing)
        self._waiting.put(text)
        return len(text)

    def flush(self) -> None:
        """There is nothing to do: what was written is on its way."""

    def check(self) -> None:
        """Raise the error of an earlier write, if there was one."""
        if self._error is not None:
            raise self._error

    def drain(self, within_s: float) -> None:
        """Wait until all of it is read, or nobody reads it in time."""
        is_read = threading.Event()
        self._waiting.put(is_read)
        is_read.wait(within_s)

    def _serve(self) -> None:
        while True:
            piece = self._waiting.get()
            if isinstance(piece, threading.Event):
                piece.set()
                continue
            try:
                self._stream.write(piece)
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._error = error


def write_unhurried(name: str = "stderr") -> None:
    """Let it never wait for its reader; a file has no reader, and is left as it is."""
    stream = getattr(sys, name)
    if isinstance(stream, Unhurried) or not _has_reader(stream):
        return
    setattr(sys, name, Unhurried(stream))
    # A fork has no threads but the one that made it.
    os.register_at_fork(after_in_child=lambda: setattr(sys, name, stream))


def say(text: str) -> None:
    """Say on stdout what nobody need read: no wait for a reader, or lack of one, or of room, holds
    up or ends what goes on."""
    write_unhurried("stdout")
    with suppress(OSError):
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def write_last(text: str) -> None:
    """Write this to stderr, beneath all streams, unless nobody reads it in time, or ever."""
    if select.select([], [2], [], GRACE_S)[1]:
        with suppress(OSError):
            os.write(2, text.encode())


def flush_output() -> None:
    """Say what is left. A reader that has gone, as `head` goes, is no error, nor a full disk."""
    until = time.monotonic() + GRACE_S
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            if isinstance(stream, Unhurried):
                stream.drain(until - time.monotonic())
                stream.check()
            else:
                stream.flush()
        except OSError:
            # The interpreter flushes once more when it ends, and would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except ValueError:  # somebody has closed it
            pass


def _has_reader(stream: TextIO) -> bool:
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


@dataclass(eq=False)
class Wait:
    """One wait, from now on or `since` a moment of the clock. `tell` takes a line."""

    tell: Callable[[str], None]
    _: KW_ONLY
    after_s: float = AFTER_S
    since: float | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._since = self.clock() if self.since is None else self.since
        self._due_s = self.after_s

    def look(self, what: Callable[[float], str]) -> None:
        """Tell `what` of the seconds waited, if it is time for another line."""
        waited_s = self.clock() - self._since
        if waited_s >= self._due_s:
            self._due_s = waited_s + EVERY_S
            self.tell(what(waited_s))


class SeldomLog(logging.LoggerAdapter[logging.Logger]):
    """Says of each kind of line, which is its text before any arguments, one in `EVERY_S`."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logger)
        self._clock = clock
        self._said_at: dict[object, float] = {}

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        now = self._clock()
        if now - self._said_at.get(msg, -math.inf) >= EVERY_S:
            self._said_at[msg] = now
            self.logger.log(level, msg, *args, **kwargs)


@contextmanager
def told_of(what: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Another thread tells of the work that is done in here, as this one is busy with it."""
    is_over = threading.Event()
    wait = Wait(tell)

    def look() -> None:
        while not is_over.wait(LOOK_EVERY_S):
            wait.look(lambda s: f"{what} ({s:.0f} s)")

    thread = threading.Thread(target=look, name="wait", daemon=True)
    # The work is done all the same where the system gives no thread.
    with suppress(RuntimeError):
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if thread.is_alive():
            thread.join()
