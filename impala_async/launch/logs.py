"""The words of a process that is watched: in a file of its own, or told line by line on stderr.

Either knows whether it has spoken since its last start, and its last words, which may say why it
ended.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from impala_async.errors import StartError
from impala_async.files import MOST_LAST_BYTES, last_words, open_regular, reason_in, writing

CHUNK_BYTES = 1 << 16
# Between two looks at everything else; more waits in the pipe, and whoever prints it waits too.
MOST_CHUNKS = 16


class Log(Protocol):
    where: str
    """The place to read it, as a clause."""

    def open(self) -> IO[bytes]:
        """Begin a life; this is for its process to write to, and then to close here."""

    def follow(self) -> None:
        """Take in what was said meanwhile."""

    def has_spoken(self) -> bool: ...

    def last_words(self) -> str: ...

    def close(self) -> None:
        """Nobody begins a life any more, or says another word."""


class LogFile:
    """A file that grows from life to life; `flag` is the one that has named its folder."""

    def __init__(self, path: Path, flag: str) -> None:
        self._path, self._flag = path, flag
        self._begin = 0
        self.where = f"its log: {path}"

    def open(self) -> IO[bytes]:
        with writing(self._path, self._flag):
            # Not all of the path: a run folder that was removed does not come back.
            self._path.parent.mkdir(exist_ok=True)
            # To read as well: to write alone to a pipe without a reader is another error.
            log = open(self._path, "a+b", buffering=0, opener=open_regular)  # noqa: SIM115
        self._begin = log.tell()
        return log

    def follow(self) -> None: ...

    def has_spoken(self) -> bool:
        """Whether it has, or may have: a disk that is full takes no word."""
        with suppress(OSError):  # somebody may remove the folder
            has_grown = self._path.stat().st_size > self._begin
            return has_grown or os.statvfs(self._path).f_bavail == 0
        return False

    def last_words(self) -> str:
        return last_words(self._path, self._begin)

    def close(self) -> None: ...


class EchoedLog:
    """A pipe whose lines are told here, each behind the name of who says it."""

    where = "its words are above"

    def __init__(self, name: str) -> None:
        self._name = name
        self._fd = -1
        self._last = self._begun = b""

    def open(self) -> IO[bytes]:
        self.close()
        try:
            self._fd, written = os.pipe()
        except OSError as error:
            raise StartError(f"no pipe can be had for its words: {error.strerror}") from None
        os.set_blocking(self._fd, False)
        self._last = b""
        return os.fdopen(written, "wb", buffering=0)

    def follow(self) -> None:
        for _ in range(MOST_CHUNKS if self._fd >= 0 else 0):
            try:
                data = os.read(self._fd, CHUNK_BYTES)
            except BlockingIOError:
                return
            if not data:
                return
            self._last = (self._last + data)[-MOST_LAST_BYTES:]
            *lines, self._begun = (self._begun + data).split(b"\n")
            if len(self._begun) > CHUNK_BYTES:
                lines, self._begun = [*lines, self._begun], b""
            self._tell(lines)

    def has_spoken(self) -> bool:
        return bool(self._last)

    def last_words(self) -> str:
        return reason_in(self._last)

    def close(self) -> None:
        """Tell what is left, though no line's end came. Whom an environment has left may write on,
        to nobody."""
        self.follow()
        if self._begun:
            self._tell([self._begun])
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._begun = -1, b""

    def _tell(self, lines: list[bytes]) -> None:
        text = "".join(f"{self._name}: {line.decode(errors='replace')}\n" for line in lines)
        with suppress(OSError, ValueError):  # a full disk, or nobody reads: that ends no actor
            sys.stderr.write(text)
            sys.stderr.flush()
