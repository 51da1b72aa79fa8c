"""The short cut for actors on this host: a private folder with ipc sockets and a nonce.

An actor that can read the nonce shares this machine and this user, so ipc will work for it.
"""

import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from impala_async.wire.sockets import IPC_PATH_MAX_BYTES

_LONGEST = "weights"
_MAX_NONCE_BYTES = 64


class LocalLink:
    """Owns a folder of mode 0700 for as long as its process serves."""

    def __init__(self) -> None:
        root = os.environ.get("XDG_RUNTIME_DIR")
        usable = root if root and os.access(root, os.W_OK) else None
        self._folder = Path(tempfile.mkdtemp(prefix="impala-", dir=usable))
        if len(os.fsencode(self._folder / _LONGEST)) > IPC_PATH_MAX_BYTES:
            self._folder.rmdir()
            self._folder = Path(tempfile.mkdtemp(prefix="impala-", dir="/tmp"))
        self.data_path = str(self._folder / "data")
        self.weights_path = str(self._folder / _LONGEST)
        self.nonce_path = str(self._folder / "nonce")
        self.nonce = secrets.token_bytes(16)
        Path(self.nonce_path).write_bytes(self.nonce)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def read_nonce(path: str) -> bytes | None:
    """What a nonce file holds, if it can be one: the path came from a stranger, and may name a
    device without end or a pipe that nobody writes to."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        return os.read(fd, _MAX_NONCE_BYTES) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    except OSError:
        return None
    finally:
        os.close(fd)
