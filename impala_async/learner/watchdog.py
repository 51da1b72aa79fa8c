"""A hang is shown and then ended: the event loop, the learner thread, or the end of a run. A child
watches, because nothing here runs while a thread holds the interpreter's lock. This file is also
its program, and then imports the standard library alone.

Runs on: the child, and the event loop, which tells it; the learner thread calls `beat` and `rest`
"""

import contextlib
import faulthandler
import logging
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

EXIT_STUCK = 70
DUMP_SIGNAL = signal.SIGUSR2
TICK_S = 1.0
# A build, a compilation or a recording may take so much longer than the rest.
BUILD_PATIENCE = 10
# A silence that ended may come again, and last this many times as long.
GROWTH = 3
# Longer than the threads get for their last update.
END_WITHIN_S = 90.0
# Nobody may read what is said, as of a terminal that was stopped.
SAY_WITHIN_S = 5.0
# Between the word that ends it and the kernel, which would not take the exit code along.
GRACE_S = 2.0
# A process that is stopped for longer is told of, as it can say nothing itself.
STOPPED_S = 5.0
LOOP_STANDS = "the event loop has not moved"
TOO_LATE = "not ended"


class Watchdog:
    """Watches the loop and the learner thread, which says `beat`, from `start` to `close`.

    The loop tells the child in each tick that it moves, and whether the learner thread does. After
    `end_s` of silence this process ends, and after half of it all stacks are shown.
    """

    def __init__(self, end_s: float, tell: Callable[[str], object] | None = None) -> None:
        tick_s = min(TICK_S, end_s / 8)
        self._settings = os.getpid(), tick_s, round(end_s / tick_s)
        # Twice in each tick of the child, which else could miss it.
        self._pace_s = tick_s / 2
        self._tell = tell or self._tell_child
        # The learner thread may be silent before the first of them.
        self.num_beats = self._num_seen = 0
        self.patience = 1
        self._left_s = self._within_s = math.inf
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def start(
        self, call_later: Callable[[float, Callable[[], None]], object], *, has_child: bool
    ) -> None:
        """Begin to watch, to some end only with a child; `call_later` is the loop's."""

        def beat() -> None:
            if not self._is_closed:
                self.tick()
                call_later(self._pace_s, beat)

        if has_child:
            self._start_child()
        beat()

    def beat(self, patience: int = 1) -> None:
        """The learner thread moves. Its next beat may take so many times as long as it should."""
        before, self.patience = self.patience, patience
        self.num_beats += 1
        if patience > before:
            # It is told at once, as what follows may hold the lock.
            self._tell(str(patience))

    def rest(self) -> None:
        """The learner thread may be silent from now on."""
        self.num_beats, self.patience = 0, 1

    def loop_builds(self) -> None:
        """The loop may be silent for as long as a build takes."""
        self._tell(str(BUILD_PATIENCE))

    def end_begins(self, within_s: float = END_WITHIN_S) -> None:
        """The run is ending: it gets this long from now, and again where it waits for a disk."""
        self._left_s = self._within_s = within_s

    def close(self) -> None:
        self._is_closed = True
        if self._child is not None:
            self._child.kill()
            self._child.communicate()

    def tick(self) -> None:
        """The loop moves: tell that, and how long the learner thread may take, or that it hangs."""
        self._left_s -= self._pace_s
        if self._left_s <= 0:
            self._tell(f"{TOO_LATE} within {self._within_s:g} s")
        elif 0 < self.num_beats == self._num_seen:
            self._tell("the learner thread has not moved")
        else:
            self._num_seen = self.num_beats
            self._tell(str(self.patience))
        if self._child is not None and (code := self._child.poll()) is not None:
            logger.warning(
                "the process %d, which watches for hangs, has ended (%d): none is ended any more "
                "(learner.stuck_end_s)",
                *(self._child.pid, code),
            )
            self._is_closed = True

    def _start_child(self) -> None:
        from impala_async.processes import call_when_read

        faulthandler.register(DUMP_SIGNAL, all_threads=True)
        read_fd, end_fd = os.pipe()
        call_when_read(read_fd, "_exit", EXIT_STUCK)
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *map(str, (*self._settings, end_fd))],
            stdin=subprocess.PIPE,
            pass_fds=(end_fd,),
            process_group=0,
        )
        assert self._child.stdin is not None
        # A child that is stopped reads nothing.
        os.set_blocking(self._child.stdin.fileno(), False)

    def _tell_child(self, line: str) -> None:
        if self._child is not None and self._child.stdin is not None:
            # It may have ended, or been ended by somebody.
            with contextlib.suppress(OSError, ValueError):
                os.write(self._child.stdin.fileno(), f"{line}\n".encode())


# -------------------- in the child


class Silence:
    """Counts the ticks in which not everybody has moved, and says when they are too many.

    It counts no seconds, and no tick while the process is stopped: neither a suspended process nor
    a machine that slept is ended.
    """

    def __init__(self, tick_s: float, end_ticks: int) -> None:
        self._tick_s, self._end_ticks, self._patience = tick_s, end_ticks, 1
        self._ticks = self._longest = 0

    def add(self, lines: Iterable[str], *, is_stopped: bool = False) -> tuple[str, bool] | None:
        """Take a tick and the lines that came in it; returns what to say, and if it is the end."""
        what, has_moved = LOOP_STANDS, is_stopped
        for what in lines:
            if what.startswith(TOO_LATE):
                return what, True
            if what.isdigit():
                has_moved, self._patience = True, int(what)
        if has_moved:
            self._longest = max(self._longest, self._ticks)
            self._ticks = 0
            return None
        self._ticks += 1
        end_ticks = max(self._end_ticks * self._patience, GROWTH * self._longest)
        if self._ticks not in (end_ticks // 2, end_ticks):
            return None
        said = f"{what} for {self._ticks * self._tick_s:.0f} s (learner.stuck_end_s)"
        return said, self._ticks == end_ticks


class Stops:
    """Counts the ticks in which a signal has stopped the process."""

    def __init__(self, pid: int, tick_s: float) -> None:
        self._tick_s, self._go_on = tick_s, f"kill -CONT {pid}"
        self._ticks, self._is_told = 0, False

    def add(self, *, is_stopped: bool) -> str | None:
        """Take a tick; returns what to say."""
        self._ticks += is_stopped
        stopped_s = self._ticks * self._tick_s
        if is_stopped and stopped_s >= STOPPED_S and not self._is_told:
            self._is_told = True
            return f"the learner is stopped, for {stopped_s:.0f} s now; to go on: {self._go_on}"
        if is_stopped:
            return None
        told = f"the learner was stopped for {stopped_s:.0f} s; its reports have that among waits"
        was_told, self._is_told, self._ticks = self._is_told, False, 0
        return told if was_told else None


def _watch_over(pid: int, silence: Silence, tick_s: float, end_fd: int) -> None:
    os.set_blocking(0, False)
    stops = Stops(pid, tick_s)
    while os.getppid() == pid:
        time.sleep(tick_s)
        heard = b""
        with contextlib.suppress(BlockingIOError):
            heard = os.read(0, 1 << 16)
        state = _state_of(pid)
        # A debugger stops it in another way, and knows of it.
        if stop := stops.add(is_stopped=state == "T"):
            _say(stop)
        found = silence.add(heard.decode().splitlines(), is_stopped=state in ("T", "t"))
        if found is None:
            continue
        what, is_end = found
        _say(f"{what}: {'the learner ends' if is_end else 'all its stacks'}")
        os.kill(pid, DUMP_SIGNAL)
        if is_end:
            time.sleep(tick_s)
            os.write(end_fd, b".")
            time.sleep(GRACE_S)
            if os.getppid() == pid:
                os.kill(pid, signal.SIGKILL)


def _say(line: str) -> None:
    if select.select([], [2], [], SAY_WITHIN_S)[1]:
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode())


def _state_of(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


if __name__ == "__main__":
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # All processes of a run may be told to end: the learner decides, and its end is watched.
        signal.signal(_number, signal.SIG_IGN)
    _pid, _tick_s, _end_ticks, _end_fd = sys.argv[1:]
    _silence = Silence(float(_tick_s), int(_end_ticks))
    with contextlib.suppress(ProcessLookupError):
        _watch_over(int(_pid), _silence, float(_tick_s), int(_end_fd))
