"""`metrics.jsonl`: one strict-JSON line per report, appended with one `write` each.

Who reads the file meanwhile may see the last line without its end, and reads it again. If the
disk fills up in the middle of a line, its half is cut off again, at once or, after a crash, by the
next report.

Reports leave room: where less is free than they are to leave, they stop, until there is more again.
A failing disk costs the reports of that time and nothing else. Every report opens the file anew,
so it comes back when its folder does, and one that is moved away is followed by a new one. Only a
report that is no strict JSON is refused loudly: that is our own bug.
"""

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
        path: Path,
        *,
        reserve: Callable[[], int] = lambda: 0,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._path = path
        self._reserve = reserve
        self._is_gone = is_gone
        self._num_lost = 0

    def write(self, report: dict[str, Value]) -> None:
        """Append one line, or note that it is lost."""
        if self._is_gone():
            return
        line = json.dumps(report, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            _append(self._path, line, self._reserve())
        except OSError as error:
            if self._num_lost == 0:
                _LOG.error("%s: cannot be written (%s); still trying", self._path, error)
            self._num_lost += 1
            return
        if self._num_lost:
            _LOG.warning("%s: written again, %d reports lost", self._path, self._num_lost)
        self._num_lost = 0

    def close(self) -> None:
        """Nothing is open between two reports."""


def _append(path: Path, line: bytes, reserve: int) -> None:
    fd = os.open(path, _FLAGS, 0o644)
    try:
        disk = os.fstatvfs(fd)
        # Some file systems do not know what is free: all they say is 0.
        if disk.f_blocks and disk.f_bavail * disk.f_frsize < reserve:
            raise OSError(errno.ENOSPC, "what is free is left to checkpoints")
        end = _cut_torn_line(fd)
        num_written = os.write(fd, line)
        if num_written < len(line):
            # This process is the only writer, so the torn piece is the end of the file.
            os.ftruncate(fd, end)
            raise OSError(errno.ENOSPC, f"{num_written} of {len(line)} bytes written")
    finally:
        os.close(fd)


def _cut_torn_line(fd: int) -> int:
    """Shorten a file to its last whole line; a pipe or a device has no such thing."""
    status = os.fstat(fd)
    if not S_ISREG(status.st_mode):
        return 0
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
    return end
