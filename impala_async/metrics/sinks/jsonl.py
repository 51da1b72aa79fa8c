"""`metrics.jsonl`: one strict-JSON line per report, appended with one `write` each.

Owns the file descriptor. Used by the reporter only. Whoever reads the file meanwhile may see the
last line without its end, and reads it again. If the disk fills up in the middle of a line, its
half is cut off again, at once or, after a crash, when the next run opens the file.

Reports leave room: where less is free than they are to leave, they stop, until there is more again.
A failing disk costs the reports of that time and nothing else. Every report tries again from
the open on, so the file also comes back when its folder does, and one that is moved away in mid-run
is followed by a new one. What is refused loudly is a report that is no strict JSON: that is our own
bug.
"""

import contextlib
import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from stat import S_ISREG
from typing import Final

from impala_async.metrics.names import Value

_LOG = logging.getLogger(__name__)
# A pipe that nobody empties is not waited for.
_FLAGS: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
_TAIL_BYTES: Final = 65536


class JsonlSink:
    """Appends reports to `path`, which the first of them creates.

    `reserve` says how many bytes they leave free for what matters more, and `is_gone` whether its
    folder is not there any more, but perhaps somebody else's: then nothing is written.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        reserve: Callable[[], int] = lambda: 0,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._path = Path(path)
        self._reserve = reserve
        self._is_gone = is_gone
        self._fd: int | None = None
        self._num_lost = 0

    def write(self, report: dict[str, Value]) -> None:
        """Append one line, or note that it is lost."""
        if self._is_gone():
            return
        line = json.dumps(report, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            self._leave_what_was_moved()
            if self._fd is None:
                self._fd = _open(self._path)
            _check_room(self._fd, self._reserve())
            _append(self._fd, line)
        except OSError as error:
            self._lose(error)
        else:
            self._recover()

    def close(self) -> None:
        """Close the file; what the disk has to say about that no longer matters."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _leave_what_was_moved(self) -> None:
        """Reports belong at the path: a file that was moved away or removed gets no more."""
        if self._fd is None:
            return
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._fd), self._path.stat()):
                return
        _LOG.warning(
            "%s: it was moved away or removed; the reports before are not in it, but in %s",
            self._path,
            os.readlink(f"/proc/self/fd/{self._fd}"),
        )
        self.close()

    def _lose(self, error: OSError) -> None:
        if self._num_lost == 0:
            _LOG.error("%s: cannot be written (%s); still trying", self._path, error)
        self._num_lost += 1
        self.close()

    def _recover(self) -> None:
        if self._num_lost:
            _LOG.warning("%s: written again, %d reports lost", self._path, self._num_lost)
        self._num_lost = 0


def _open(path: Path) -> int:
    fd = os.open(path, _FLAGS, 0o644)
    try:
        _cut_torn_line(fd)
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_room(fd: int, reserve: int) -> None:
    if reserve > 0:
        disk = os.fstatvfs(fd)
        # Some file systems do not know: all they say is 0.
        if disk.f_blocks and disk.f_bavail * disk.f_frsize < reserve:
            raise OSError(errno.ENOSPC, "what is free is left to checkpoints")


def _append(fd: int, line: bytes) -> None:
    num_written = os.write(fd, line)
    if num_written == len(line):
        return
    # This process is the only writer, so the torn piece is the end of the file.
    with contextlib.suppress(OSError):
        os.ftruncate(fd, os.lseek(fd, 0, os.SEEK_END) - num_written)
    raise OSError(errno.ENOSPC, f"{num_written} of {len(line)} bytes written")


def _cut_torn_line(fd: int) -> None:
    """Shorten a file to its last whole line; a pipe or a device has no such thing."""
    status = os.fstat(fd)
    if not S_ISREG(status.st_mode):
        return
    end = status.st_size
    while end > 0:
        start = max(0, end - _TAIL_BYTES)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < status.st_size:
        os.ftruncate(fd, end)
