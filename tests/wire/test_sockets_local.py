"""The private folder of this host: who may enter, how long its paths are, that it goes away."""

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from impala_async.errors import ConfigError
from impala_async.wire.sockets import IPC_PATH_MAX_BYTES, LocalLink, read_nonce


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path, which the folder of a test is not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_only_this_user_may_enter(runtime_dir: Path) -> None:
    link = LocalLink()
    folder = Path(link.nonce_path).parent
    assert folder.parent == runtime_dir
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert Path(link.nonce_path).read_bytes() == link.nonce
    assert len(link.nonce) == 16
    assert {Path(path).parent for path in (link.data_path, link.weights_path)} == {folder}
    link.close()
    assert not folder.exists()
    link.close()


def test_every_link_has_a_nonce_and_a_folder_of_its_own(runtime_dir: Path) -> None:
    first, second = LocalLink(), LocalLink()
    assert first.nonce != second.nonce
    assert first.data_path != second.data_path
    first.close()
    second.close()
    assert list(runtime_dir.iterdir()) == []


def test_a_path_too_long_for_a_socket_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("ü" * 60)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    link = LocalLink()
    assert len(os.fsencode(link.weights_path)) <= IPC_PATH_MAX_BYTES
    assert Path(link.nonce_path).read_bytes() == link.nonce
    assert list(long.iterdir()) == []
    link.close()


@pytest.mark.parametrize("value", ["", "/nowhere/at/all"])
def test_without_a_runtime_folder_the_temporary_one_does(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    link = LocalLink()
    assert Path(link.nonce_path).exists()
    link.close()


def test_a_nonce_is_read_from_a_small_regular_file_only(tmp_path: Path) -> None:
    good, pipe, link = tmp_path / "good", tmp_path / "pipe", tmp_path / "link"
    good.write_bytes(b"n" * 16)
    link.symlink_to(good)
    os.mkfifo(pipe)
    (tmp_path / "large").write_bytes(b"n" * 100_000)
    assert read_nonce(str(good)) == b"n" * 16
    assert len(read_nonce(str(tmp_path / "large")) or b"") == 64
    for path in ("/dev/zero", "/dev/tty", "", "\0", "x" * 5000, *map(str, (pipe, link, tmp_path))):
        assert read_nonce(path) is None


def test_where_nothing_can_be_written_the_variable_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(**_: object) -> str:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    for runtime, named in (("", "TMPDIR"), ("/tmp", "XDG_RUNTIME_DIR")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        with pytest.raises(ConfigError, match=f"^{named}: .*: Read-only file system: name one"):
            LocalLink()
