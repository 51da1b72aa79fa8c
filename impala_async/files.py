"""The files of a run folder, written whole and read as if a stranger had written them.

A pipe is not waited for, a file that is too long is not parsed, and whatever is wrong with a file
is one error that names it.
"""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from impala_async.errors import CheckpointError, ConfigError

# Others may read what a run did, but not the arguments of its environment, a key, or the ids of
# actors, by which one could speak in their name.
PUBLIC, PRIVATE = 0o666, 0o600
# A disk that takes no more, or a limit: a later try may succeed.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MOST_BYTES = 32 << 20
# Last words are looked for in so much of a log's end: an environment may print without end.
MOST_LAST_BYTES = 64 << 10
MOST_QUOTED = 300
# A number beyond these overflows, or does not fit into a message, as soon as it is computed with.
MOST_INT, MOST_FLOAT = 2**62, 1e100


def write_whole(path: Path, data: bytes, mode: int = PUBLIC) -> None:
    """Write through to the disk, beside its place at first; raises OSError, and leaves the old."""
    written = beside(path)
    try:
        written.unlink(missing_ok=True)
        fd = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        written.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            written.unlink()
        raise
    sync(path.parent)


def path_of(what: str, given: object) -> Path:
    """A path that a program has given; ConfigError for anything else."""
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{what}: wants a path, got {given!r}")
    return Path(text)


def sync(folder: Path) -> None:
    """Make the names in a folder as durable as the files behind them."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def beside(path: Path) -> Path:
    """The path where this process first writes the file."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def left_beside(path: Path) -> Iterator[Path]:
    """The paths where processes, killed ones perhaps, first wrote the file."""
    return path.parent.glob(f".{path.name}.[0-9]*")


@contextlib.contextmanager
def writing(path: Path, flag: str = "--run-dir") -> Iterator[None]:
    """A context in which an OSError is told as that of the folder that a user has named."""
    try:
        yield
    except OSError as error:
        # Where it was to get its name, that is the second of two.
        where = Path(error.filename2 or error.filename or path)
        why = error.strerror or error
        for each in (where, *where.parents):
            # A folder cannot be made where such a link has its name.
            if error.errno == errno.EEXIST and each.is_symlink() and not each.exists():
                why = f"{each} is a link to {each.readlink()}, which is not there"
            elif error.errno == errno.EEXIST and each.is_file():
                why = f"{each} is a file, and a folder is wanted"
        raise ConfigError(f"{flag}: cannot write to {where}: {why}") from None


def check_file(flag: str, path: Path) -> None:
    """Raise ConfigError, before there is a result, where it cannot be written."""
    if not os.path.isdir(path.absolute().parent):  # unlike Path.is_dir, where it may not be looked
        raise ConfigError(f"{flag}: {path}: there is no such folder")
    if os.path.isdir(path):
        raise ConfigError(f"{flag}: {path} is a folder: wants a file")
    if os.path.lexists(path) and not os.path.isfile(path):
        # A file that is written whole would take its place, as that of /dev/stdout.
        raise ConfigError(f"{flag}: {path} is there, and no regular file: wants a file")


def unwritten(flag: str, path: Path, error: OSError) -> Exception:
    """The error of a result that a flag says where to write; doors know those of a full disk."""
    why = error.strerror or " ".join(str(error).split())
    if error.errno in FULL:
        return OSError(error.errno, why, str(path))
    return ConfigError(f"{flag}: cannot write to {path}: {why}")


def find_bytes(path: Path, most: int = MOST_BYTES) -> bytes | None:
    """The content of a small file, None if there is none; raises CheckpointError."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            data = file.read(most + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    if len(data) > most:
        raise _unreadable(path, f"it is longer than {most:,} bytes")
    return data


def find_object(
    path: Path, *, is_strict: bool = False, most: int = MOST_BYTES
) -> dict[str, Any] | None:
    """The JSON object in a small file, None if there is none; raises CheckpointError. Strict: every
    number in it is finite and can be computed with, as a checkpoint's are."""
    data = find_bytes(path, most)
    if data is None:
        return None
    hooks: dict[str, Any] = {}
    if is_strict:
        hooks = {"parse_int": partial(_number, int, MOST_INT)}
        hooks["parse_float"] = hooks["parse_constant"] = partial(_number, float, MOST_FLOAT)
    try:
        content = json.loads(data, **hooks)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, str(error)) from None
    if not isinstance(content, dict):
        raise _unreadable(path, "it holds no JSON object")
    return content


def last_words(log: Path, begin: int) -> str:
    """The words in a log, since a place in it, that say why a process ended: an environment prints
    there too."""
    words = b""
    with contextlib.suppress(OSError), open(log, "rb", opener=open_regular) as file:
        file.seek(max(begin, file.seek(0, os.SEEK_END) - MOST_LAST_BYTES))
        words = file.read(MOST_LAST_BYTES)
    return reason_in(words)


def reason_in(words: bytes) -> str:
    """The error in the last words of a process, or else its last line."""
    # A line of its work, as `start_logging` writes it, is no reason of a death.
    lines = [x for x in words.decode(errors="replace").splitlines() if x[8:14] != " INFO "]
    if errors := [line for line in lines if line.startswith("error: ")]:
        return errors[-1].removeprefix("error: ")
    return f"the last line of its log: {lines[-1][:MOST_QUOTED]}" if lines else "it said nothing"


def open_regular(path: str, flags: int) -> int:
    """An opener for `open`, which would otherwise wait until somebody writes to a pipe. A device is
    not opened, which may have an effect of its own."""
    with contextlib.suppress(FileNotFoundError):
        _check_regular(os.stat(path, follow_symlinks=not flags & os.O_NOFOLLOW))
    # Another file may be there by now.
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, PUBLIC)
    try:
        _check_regular(os.fstat(fd))
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")


def _number(kind: type[int | float], most: float, text: str) -> float:
    number = kind(text)
    if not abs(number) <= most:
        raise ValueError(f"{text[:20]} is no number to compute with")
    return number


def _unreadable(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read: {why}")
