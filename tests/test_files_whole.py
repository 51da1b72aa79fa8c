"""A file is whole or as it was, whatever the disk does."""

import errno
import os
import stat
from pathlib import Path

import pytest

from impala_async.files import beside, write_whole


def test_it_is_written_beside_and_on_the_disk_before_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "page", []
    path.write_bytes(b"before")
    beside(path).write_bytes(b"left over")
    fsync = os.fsync

    def look(descriptor: int) -> None:
        seen.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), path.read_bytes()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    write_whole(path, b"after", 0o600)
    assert seen == [(False, b"before"), (True, b"after")]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_on_a_full_disk_all_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    path = tmp_path / "page"
    path.write_bytes(b"before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        write_whole(path, b"after")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
