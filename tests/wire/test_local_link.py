"""The private folder of this host: who may enter, how long its paths are, that it goes away."""

import os
import socket
import stat
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from impala_async.errors import ConfigError
from impala_async.wire import local_link
from impala_async.wire.sockets import IPC_PATH_MAX_BYTES


@pytest.fixture
def runtime_dir(monkeypatch):
    """A short path, which the folder of a test is not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_only_this_user_may_enter_and_where_the_runtime_folder_does_not_do_the_temporary_one_does(
    runtime_dir, tmp_path, monkeypatch
):
    link, other = local_link.LocalLink(), local_link.LocalLink()
    folder = Path(link.nonce_path).parent
    assert folder.parent == runtime_dir
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {Path(path).parent for path in (link.data_path, link.weights_path)} == {folder}
    assert Path(link.nonce_path).read_bytes() == link.nonce
    assert len(link.nonce) == 16
    assert link.nonce != other.nonce
    for each in (link, other, link):
        each.close()
    assert list(runtime_dir.iterdir()) == []
    long = tmp_path / ("ü" * 60)
    long.mkdir()
    for value in ("", "/nowhere/at/all", str(long)):
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        link = local_link.LocalLink()
        assert len(os.fsencode(link.weights_path)) <= IPC_PATH_MAX_BYTES
        assert Path(link.nonce_path).read_bytes() == link.nonce
        assert list(long.iterdir()) == []
        link.close()


def test_where_nothing_can_be_written_the_variable_is_named(monkeypatch):
    read_only = OSError(30, "Read-only file system")
    monkeypatch.setattr(tempfile, "mkdtemp", Mock(side_effect=read_only))
    for runtime, named in (("", "TMPDIR"), ("/tmp", "XDG_RUNTIME_DIR")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        with pytest.raises(ConfigError, match=f"^{named}: .*: Read-only file system: name one"):
            local_link.LocalLink()


def test_paths_of_a_stranger_may_name_anything(ends, tmp_path):
    good, pipe, link, listening = (tmp_path / name for name in ("good", "pipe", "link", "socket"))
    good.write_bytes(b"n" * 16)
    link.symlink_to(good)
    os.mkfifo(pipe)
    router = ends.router(ipc=listening)
    (tmp_path / "large").write_bytes(b"n" * 100_000)
    assert local_link.read_nonce(str(good)) == b"n" * 16
    assert len(local_link.read_nonce(str(tmp_path / "large")) or b"") == 64
    assert local_link.is_served(str(listening))
    router.connections.read()
    assert router.connections.num_left == 0, "nobody came and left"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(tmp_path / "stale"))
    assert not local_link.is_served(str(tmp_path / "stale")), "its process is gone"
    for path in ("/dev/zero", "/dev/tty", "", "\0", "x" * 5000, *map(str, (pipe, link, tmp_path))):
        assert local_link.read_nonce(path) is None
        assert not local_link.is_served(path)


def age(folder):
    long_ago = time.time() - 2 * local_link.MIN_AGE_S
    os.utime(folder, (long_ago, long_ago))


def test_the_next_start_clears_what_a_killed_process_left(runtime_dir):
    killed = local_link.LocalLink()
    # As the kernel does it.
    os.close(killed._hold)
    killed._hold = -1
    (left,) = runtime_dir.iterdir()
    age(left)
    link = local_link.LocalLink()
    assert list(runtime_dir.iterdir()) == [Path(link.nonce_path).parent]
    link.close()


def test_where_folders_cannot_be_locked_it_serves_and_clears_nothing(runtime_dir, monkeypatch):
    unlockable = OSError(9, "Bad file descriptor")
    monkeypatch.setattr(local_link.fcntl, "flock", Mock(side_effect=unlockable))
    first = local_link.LocalLink()
    age(Path(first.nonce_path).parent)
    second = local_link.LocalLink()
    assert local_link.read_nonce(first.nonce_path) == first.nonce
    first.close()
    second.close()
    assert list(runtime_dir.iterdir()) == []


def test_whatever_may_belong_to_somebody_stays(runtime_dir, monkeypatch):
    link = local_link.LocalLink()
    held = Path(link.nonce_path).parent
    names = ("young", "file", "link", "full")
    young, file, other, full = (runtime_dir / f"{local_link.PREFIX}{name}" for name in names)
    foreign, theirs = runtime_dir / "impala-other", runtime_dir / "theirs"
    young.mkdir()
    file.touch()
    for folder in (foreign, theirs, full):
        folder.mkdir()
        (folder / "mine").touch()
    other.symlink_to(theirs)
    for path in (held, file, foreign, theirs, full):
        age(path)
    local_link.clear_left_behind(runtime_dir)
    assert set(runtime_dir.iterdir()) == {held, young, file, other, foreign, theirs, full}
    assert (theirs / "mine").exists()
    assert (full / "mine").exists()
    assert Path(link.nonce_path).exists()
    link.close()
    # Another user's, which may well be old and not held.
    young.touch()
    age(young)
    monkeypatch.setattr(local_link.os, "getuid", lambda: os.geteuid() + 1)
    local_link.clear_left_behind(runtime_dir)
    assert young.exists()
