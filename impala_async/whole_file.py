"""Files that readers see whole or not at all: written beside their place, then renamed.

On a full disk what was there before stays, and nothing half-written does.
"""

import contextlib
import os
from pathlib import Path

PUBLIC = 0o666


def write_whole(path: Path, data: bytes, mode: int = PUBLIC) -> None:
    """Write through to the disk; raises OSError."""
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
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def beside(path: Path) -> Path:
    """Where this process writes it first."""
    return path.with_name(f".{path.name}.{os.getpid()}")
