"""The run folder: an epoch that only grows, files that are whole, and what is refused."""

import json
import os
from pathlib import Path

import pytest

from impala_async.errors import CheckpointError, ConfigError
from impala_async.learner.run_folder import RunFolder, default_run_path
from tests.learner.columns import small_schema
from tests.learner.world import config_of

CONFIG = config_of(small_schema(), algorithm={"lambda": 0.9}, env={"kwargs": {"size": [1, 2]}})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.begin(CONFIG)
    return made


def test_a_new_run_has_settings_and_an_id(folder: RunFolder) -> None:
    assert folder.exists()
    assert folder.checkpoints.is_dir()
    assert folder.load_config() == CONFIG
    assert folder.load_settings()["algorithm"]["lambda"] == 0.9
    assert len(folder.run_id) == 16
    assert RunFolder.open(folder.path).run_id == folder.run_id


def test_every_run_has_an_id_of_its_own(folder: RunFolder, tmp_path: Path) -> None:
    other = RunFolder(tmp_path / "other")
    other.begin(CONFIG)
    assert other.run_id != folder.run_id


def test_the_epoch_grows_by_one_at_every_start(folder: RunFolder) -> None:
    assert [RunFolder(folder.path).next_epoch() for _ in range(3)] == [1, 2, 3]
    assert (folder.path / "epoch").read_text() == "3"


def test_an_epoch_that_could_not_be_written_was_not_used(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.next_epoch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _disk_full)
        with pytest.raises(OSError, match="disk"):
            folder.next_epoch()
    assert folder.next_epoch() == 2


def test_an_epoch_is_on_the_disk_before_it_is_used(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is flushed before it is renamed, and its name after."""
    told: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noting_fsync(descriptor: int) -> None:
        kind = "folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file"
        told.append(f"fsync {kind}")
        fsync(descriptor)

    def noting_rename(path: Path, target: Path) -> Path:
        told.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "rename", noting_rename)
    folder.next_epoch()
    assert told == ["fsync file", "rename", "fsync folder"]


@pytest.mark.parametrize("torn", ["", "two", "1.5"])
def test_a_torn_epoch_is_refused_and_not_guessed(folder: RunFolder, torn: str) -> None:
    (folder.path / "epoch").write_text(torn)
    with pytest.raises(CheckpointError, match="epoch: not a number"):
        folder.next_epoch()


def test_small_files_are_whole_or_not_there(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert folder.read_json("summary.json") is None
    folder.write_json("summary.json", {"a": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _disk_full)
        with pytest.raises(OSError, match="disk"):
            folder.write_json("summary.json", {"a": 2})
    assert folder.read_json("summary.json") == {"a": 1}
    folder.remove("summary.json")
    folder.remove("summary.json")
    assert folder.read_json("summary.json") is None


def test_a_folder_that_cannot_be_made_is_a_wrong_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="--run-dir: cannot write to"):
        RunFolder(tmp_path / "file" / "run").begin(CONFIG)


def test_to_resume_there_must_be_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--resume needs --run-dir"):
        RunFolder.open(None)
    with pytest.raises(CheckpointError, match="holds no run"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"run_id": "ab"}', '{"run_id": 1, "config": 2}']
)
def test_damaged_settings_are_told(folder: RunFolder, text: str) -> None:
    (folder.path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        folder.load_config()


def test_settings_are_plain_json(folder: RunFolder) -> None:
    content = json.loads((folder.path / "config.json").read_text())
    assert content["config"]["env"]["kwargs"] == {"size": [1, 2]}


def test_a_default_folder_is_one_name() -> None:
    config = config_of(small_schema(), env={"id": "some.package:ALE/Pong-v5"})
    path = default_run_path(config)
    assert path.parent == Path("runs")
    assert path.name.startswith("some.package_ALE_Pong-v5-")


def _disk_full(descriptor: int) -> None:
    raise OSError("no space left on the disk")


def test_a_start_that_failed_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.begin(CONFIG)
    folder.next_epoch()
    folder.withdraw()
    assert not (tmp_path / "run").exists()
    folder.begin(CONFIG)
    (tmp_path / "run" / "note").write_text("mine")
    folder.withdraw()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["note"]


def test_a_folder_belongs_to_one_learner(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    first.begin(config_of(small_schema()))
    first.write_json("service.json", {"pid": 4711})
    with pytest.raises(ConfigError, match=r"in use by another learner \(process 4711\)"):
        second.begin(config_of(small_schema()))
    first.let_go()
    second.begin(config_of(small_schema()))
    second.let_go()


def test_a_resumed_run_has_its_new_settings_when_they_are_confirmed(folder: RunFolder) -> None:
    folder.let_go()
    run_id, changed = folder.run_id, CONFIG.model_copy(update={"seed": 9})
    resumed = RunFolder.open(folder.path)
    resumed.begin(changed)
    assert resumed.load_config() == CONFIG
    resumed.confirm()
    assert resumed.load_config() == changed
    assert resumed.run_id == run_id


def test_settings_that_cannot_be_confirmed_are_told(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.let_go()
    resumed = RunFolder.open(folder.path)
    resumed.begin(CONFIG.model_copy(update={"seed": 9}))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _disk_full)
        with pytest.raises(ConfigError, match="--run-dir: cannot write to"):
            resumed.confirm()
    assert resumed.load_config() == CONFIG
