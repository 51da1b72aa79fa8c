"""The short cut for actors on this host: a private folder with ipc sockets, and a nonce: who can
read it shares this machine and this user, so ipc will work for it."""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import socket
import tempfile
import time
from pathlib import Path

from impala_async.errors import ConfigError
from impala_async.files import open_regular
from impala_async.wire.sockets import IPC_PATH_MAX_BYTES

PREFIX = "impala-async-ipc-"
# One that is younger may belong to a process that does not hold it yet.
MIN_AGE_S = 10.0
_LONGEST = "weights"
_FILES = {"data", "nonce", _LONGEST}
_MAX_NONCE_BYTES = 64


class LocalLink:
    """Owns a folder of mode 0700 for as long as its process serves, and holds it meanwhile."""

    def __init__(self, nonce: bytes | None = None) -> None:
        root = os.environ.get("XDG_RUNTIME_DIR")
        usable = root if root and os.access(root, os.W_OK) else None
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=usable))
            if len(os.fsencode(self._folder / _LONGEST)) > IPC_PATH_MAX_BYTES:
                self._folder.rmdir()
                self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
            self._hold = _open_folder(self._folder)
            # Some network file systems lock no folders: there nobody clears any either.
            with contextlib.suppress(OSError):
                fcntl.flock(self._hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.nonce_path = str(self._folder / "nonce")
            self.nonce = nonce or new_nonce()
            Path(self.nonce_path).write_bytes(self.nonce)
        except OSError as error:
            where = "XDG_RUNTIME_DIR" if usable else "TMPDIR"
            raise ConfigError(
                f"{where}: cannot make a folder for the sockets of this host: "
                f"{error.strerror or error}: name one that can be written"
            ) from None
        self.data_path = str(self._folder / "data")
        self.weights_path = str(self._folder / _LONGEST)
        clear_left_behind(self._folder.parent)

    def close(self) -> None:
        if self._hold >= 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._hold)
            self._hold = -1


def new_nonce() -> bytes:
    return secrets.token_bytes(16)


def read_nonce(path: str) -> bytes | None:
    """Return what a nonce file holds, if it can be one: the path came from a stranger, and may
    name a device without end or a pipe that nobody writes to."""
    try:
        with open(path, "rb", opener=lambda at, how: open_regular(at, how | os.O_NOFOLLOW)) as file:
            return file.read(_MAX_NONCE_BYTES)
    except (OSError, ValueError):
        return None


def is_served(path: str) -> bool:
    """Whether somebody listens at a socket there: one that nobody serves stays when its process is
    killed, and this path came from a stranger too."""
    if not path.startswith("/") or len(os.fsencode(path)) > IPC_PATH_MAX_BYTES:
        return False
    # A stream would be a connection there, and counted as a stranger who leaves without a word.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as trial:
        try:
            trial.connect(path)
        except (OSError, ValueError) as error:
            return getattr(error, "errno", None) == errno.EPROTOTYPE
    return False


def clear_left_behind(root: Path) -> None:
    """Remove the folders there whose processes were killed: nobody holds them any more."""
    for path in root.glob(f"{PREFIX}*"):
        # Others may write to this place too: whatever does not look like ours is left alone.
        with contextlib.suppress(OSError):
            hold = _open_folder(path)
            try:
                found, names = os.fstat(hold), {inner.name for inner in path.iterdir()}
                is_old = time.time() - found.st_mtime > MIN_AGE_S
                if is_old and found.st_uid == os.getuid() and names <= _FILES:
                    fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
            finally:
                os.close(hold)


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
