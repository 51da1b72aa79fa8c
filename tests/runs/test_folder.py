"""The run folder: an epoch that only grows, files that are whole, and what is refused."""

import errno
import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from impala_async.errors import CheckpointError, ConfigError
from impala_async.runs.folder import HOLD_VARIABLE, RunFolder, default_run_path
from tests.learner.columns import small_schema
from tests.learner.server_harness import config_of

CONFIG = config_of(small_schema(), algorithm={"lambda": 0.9}, env={"kwargs": {"size": [1, 2]}})


@pytest.fixture
def folder(tmp_path):
    made = RunFolder(tmp_path / "run")
    made.begin(CONFIG)
    return made


def test_a_new_run_has_settings_and_an_id(folder):
    assert folder.exists()
    assert folder.checkpoints.is_dir()
    assert folder.load_config() == CONFIG
    assert folder.load_settings()["algorithm"]["lambda"] == 0.9
    assert len(folder.run_id) == 16
    assert RunFolder.open(folder.path).run_id == folder.run_id


def test_every_run_has_an_id_of_its_own(folder, tmp_path):
    other = RunFolder(tmp_path / "other")
    other.begin(CONFIG)
    assert other.run_id != folder.run_id


def test_the_epoch_grows_by_one_at_every_start(folder):
    assert [RunFolder(folder.path).next_epoch() for _ in range(3)] == [1, 2, 3]
    assert (folder.path / "epoch").read_text() == "3"


def test_an_epoch_that_could_not_be_written_was_not_used(folder, monkeypatch):
    folder.next_epoch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _disk_full)
        with pytest.raises(ConfigError, match=r"--run-dir: cannot write to .*: no space left"):
            folder.next_epoch()
    assert folder.next_epoch() == 2


def test_an_epoch_is_on_the_disk_before_it_is_used(folder, monkeypatch):
    """The file is flushed before it is renamed, and its name after."""
    told = []
    fsync, rename = os.fsync, Path.rename

    def noting_fsync(descriptor):
        kind = "folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file"
        told.append(f"fsync {kind}")
        fsync(descriptor)

    def noting_rename(path, target):
        told.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "rename", noting_rename)
    folder.next_epoch()
    assert told == ["fsync file", "rename", "fsync folder"]


@pytest.mark.parametrize("torn", ["", "two", "1.5", "nan", "-1", "9" * 20, "9" * 70])
def test_a_torn_epoch_is_refused_and_not_guessed(folder, torn):
    (folder.path / "epoch").write_text(torn)
    told = r"epoch: (wants a whole number from 0 to|cannot be read).*: write the number of starts"
    with pytest.raises(CheckpointError, match=told):
        folder.next_epoch()


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["a pipe", "a folder"])
def test_an_epoch_that_is_no_file_is_refused_at_once(folder, make):
    make(folder.path / "epoch")
    with pytest.raises(CheckpointError, match="epoch: cannot be read"):
        folder.next_epoch()


def test_an_epoch_is_never_behind_the_checkpoints(folder, caplog):
    (folder.path / "epoch").write_text("2\n")  # as an editor leaves it
    assert folder.next_epoch() == 3
    (folder.path / "epoch").write_text("2")
    assert folder.next_epoch(saved=7) == 8
    assert "2, but there are checkpoints of 7" in caplog.text
    assert folder.next_epoch(saved=7) == 9


def test_small_files_are_whole_or_not_there(folder, monkeypatch):
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


def test_a_folder_that_cannot_be_made_is_a_wrong_flag(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="--run-dir: cannot write to"):
        RunFolder(tmp_path / "file" / "run").begin(CONFIG)


def test_to_resume_there_must_be_a_run(tmp_path):
    with pytest.raises(ConfigError, match="--resume needs --run-dir"):
        RunFolder.open(None)
    with pytest.raises(CheckpointError, match="holds no run"):
        RunFolder.open(tmp_path)


RUN = '{"run_id": "' + 32 * "a" + '", "config": '


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", '{"run_id": "ab"}', '{"run_id": 1, "config": 2}'),
        *('{"run_id": "ab", "config": {}}', '{"run_id": [], "config": {}}'),
        *(RUN + '[["a", 1]]}', RUN + 9999 * '{"a":' + "1" + 9999 * "}" + "}"),
    ],
)
def test_damaged_settings_are_told(folder, text):
    (folder.path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        folder.load_config()


def test_settings_that_are_wrong_name_their_file(folder):
    (folder.path / "config.json").write_text(RUN + '{"env": {"id": 3}}}')
    with pytest.raises(ConfigError, match=r"config\.json: env\.id: "):
        folder.load_config()


def test_the_arguments_of_an_environment_are_private_from_the_first_byte(folder, monkeypatch):
    def mode(path):
        return stat.S_IMODE(path.stat().st_mode)

    seen = []
    fsync = os.fsync
    config = folder.path / "config.json"
    assert mode(config) == 0o600
    # Somebody has opened it to others, and the run is resumed.
    config.chmod(0o644)
    folder.let_go()
    monkeypatch.setattr(os, "fsync", lambda fd: (seen.append(os.fstat(fd).st_mode), fsync(fd)))
    resumed = RunFolder.open(folder.path)
    resumed.begin(CONFIG)
    resumed.confirm()
    assert mode(config) == stat.S_IMODE(seen[0]) == 0o600
    resumed.announce("tcp://a:1", "tcp://a:2", 1)
    assert mode(folder.path / "service.json") & 0o400


def test_settings_are_plain_json(folder):
    content = json.loads((folder.path / "config.json").read_text())
    assert content["config"]["env"]["kwargs"] == {"size": [1, 2]}


def test_a_default_folder_is_one_name():
    config = config_of(small_schema(), env={"id": "some.package:ALE/Pong-v5"})
    path = default_run_path(config)
    assert path.parent == Path("runs")
    assert path.name.startswith("some.package_ALE_Pong-v5-")


def _disk_full(descriptor):
    raise OSError("no space left on the disk")


def test_a_start_that_failed_leaves_nothing_in_the_way(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin(CONFIG)
    folder.next_epoch()
    folder.withdraw()
    assert not (tmp_path / "run").exists()
    folder.begin(CONFIG)
    (tmp_path / "run" / "note").write_text("mine")
    (tmp_path / "run" / f".epoch.{os.getpid()}").write_text("cut off")
    folder.metrics.write_text("{}")
    folder.withdraw()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["note"]


def test_a_folder_that_was_there_stays(tmp_path):
    folder = RunFolder(tmp_path)
    folder.begin(CONFIG)
    folder.withdraw()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("result", ["summary.json", "checkpoints/ckpt-1-0"])
def test_a_run_with_a_result_is_not_withdrawn(folder, result):
    (folder.path / result).touch()
    folder.withdraw()
    assert folder.load_config() == CONFIG


def test_a_run_of_an_earlier_start_is_not_withdrawn(folder):
    folder.let_go()
    resumed = RunFolder.open(folder.path)
    resumed.begin(CONFIG)
    resumed.withdraw()
    assert folder.load_config() == CONFIG


def test_that_there_is_a_checkpoint_need_not_be_noted(folder, monkeypatch):
    monkeypatch.setattr(os, "fsync", _disk_full)
    folder.note_saved("ckpt-1-1")
    folder.check_resumable()


def test_a_new_run_begins_in_a_new_or_an_empty_folder(tmp_path):
    RunFolder(tmp_path / "none").check_new()
    RunFolder(tmp_path).check_new()
    # Put there for a learner, by those who start it, or by a start that was killed.
    for name in ("actors", "lost+found", "checkpoints"):
        (tmp_path / name).mkdir()
    RunFolder(tmp_path).check_new()
    (tmp_path / "checkpoints" / "ckpt-1-1").mkdir()
    with pytest.raises(ConfigError, match=r"holds other files \(checkpoints\) and no run: name a"):
        RunFolder(tmp_path).check_new()


def test_a_folder_of_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"--run-dir: .* holds other files \(thesis\.tex\)"):
        RunFolder(tmp_path).check_new()


def test_a_folder_belongs_to_one_learner(tmp_path):
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    first.begin(config_of(small_schema()))
    with pytest.raises(ConfigError, match=r"in use by another learner .*: end it first"):
        second.begin(config_of(small_schema()))
    first.let_go()
    second.begin(config_of(small_schema()))
    second.let_go()


def test_a_learner_takes_the_folder_over_from_who_has_started_it(tmp_path, monkeypatch):
    starter, learner = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    held = starter.hold()
    monkeypatch.setenv(HOLD_VARIABLE, str(os.dup(held)))
    learner.begin(CONFIG)
    assert HOLD_VARIABLE not in os.environ
    # Whoever is left has it.
    starter.let_go()
    with pytest.raises(ConfigError, match="in use by another learner"):
        RunFolder(tmp_path / "run").hold()
    learner.let_go()
    RunFolder(tmp_path / "run").hold()


@pytest.mark.parametrize("value", ["another", "12345", "none"])
def test_a_hold_of_something_else_is_none(tmp_path, monkeypatch, value):
    folder, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "other")
    folder.hold()
    held = other.hold()
    monkeypatch.setenv(HOLD_VARIABLE, str(held) if value == "another" else value)
    with pytest.raises(ConfigError, match="in use by another learner"):
        RunFolder(tmp_path / "run").begin(CONFIG)


def test_what_a_killed_start_had_begun_to_write_is_cleared(tmp_path):
    for name in (".config.json.4711", ".epoch.4712", ".config.json.mine"):
        (tmp_path / name).touch()
    folder = RunFolder(tmp_path)
    with pytest.raises(ConfigError, match=r"other files \(\.config\.json\.mine\)"):
        folder.check_new()
    (tmp_path / ".config.json.mine").unlink()
    folder.check_new()
    folder.begin(CONFIG)
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "config.json"]


def test_a_resumed_run_has_its_new_settings_when_they_are_confirmed(folder):
    folder.let_go()
    run_id, changed = folder.run_id, CONFIG.model_copy(update={"seed": 9})
    resumed = RunFolder.open(folder.path)
    resumed.begin(changed)
    assert resumed.load_config() == CONFIG
    resumed.confirm()
    assert resumed.load_config() == changed
    assert resumed.run_id == run_id


def test_settings_that_cannot_be_confirmed_are_told(folder, monkeypatch):
    folder.let_go()
    resumed = RunFolder.open(folder.path)
    resumed.begin(CONFIG.model_copy(update={"seed": 9}))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _disk_full)
        with pytest.raises(ConfigError, match="--run-dir: cannot write to"):
            resumed.confirm()
    assert resumed.load_config() == CONFIG


def test_a_disk_that_does_not_let_a_learner_be_found_is_told(folder, monkeypatch):
    monkeypatch.setattr(os, "fsync", _disk_full)
    with pytest.raises(ConfigError, match=r"--run-dir: cannot write to .*: no space left"):
        folder.announce("tcp://a:1", "tcp://a:2", 1)
    # Nothing half-written stays beside.
    assert [path.name for path in folder.path.iterdir() if path.name.startswith(".")] == []


def test_what_cannot_be_removed_is_told(folder, caplog):
    (folder.path / "service.json").mkdir()
    folder.remove("service.json")
    assert "service.json cannot be removed: Is a directory" in caplog.text


@pytest.mark.parametrize("how", ["removed", "renamed", "emptied", "another is there"])
def test_a_folder_that_is_gone_is_known_and_not_written_into(folder, caplog, how):
    assert not folder.is_gone()
    if how == "emptied":
        (folder.path / "config.json").unlink()
    elif how == "removed":
        shutil.rmtree(folder.path)
    else:
        folder.path.rename(folder.path.with_name("moved"))
    if how == "another is there":
        folder.path.mkdir()
        for name in ("config.json", "service.json", "epoch"):
            (folder.path / name).write_text("theirs")
    before = sorted(folder.path.iterdir()) if folder.path.exists() else None
    assert folder.is_gone()
    with pytest.raises(OSError, match="its folder is gone"):
        folder.write_json("summary.json", {})
    folder.remove("service.json")
    folder.withdraw()
    assert (sorted(folder.path.iterdir()) if folder.path.exists() else None) == before
    # It does not come back, not even when nobody holds it any more, and is told once.
    assert folder.is_gone()
    assert caplog.text.count("it is gone, or another one lies there") == 1


def test_a_folder_that_fails_is_not_gone(folder):
    (folder.path / "config.json").unlink()
    (folder.path / "config.json").symlink_to("config.json")
    assert not folder.is_gone()


def test_checkpoints_that_cannot_be_written_are_told_at_the_start(tmp_path, monkeypatch):
    made = os.mkdir

    def make(path, mode=0o777):
        if Path(path).parent.name == "checkpoints":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        made(path, mode)

    monkeypatch.setattr(os, "mkdir", make)
    with pytest.raises(ConfigError, match=r"cannot write to .*/checkpoints/.*: Permission denied"):
        RunFolder(tmp_path / "run").begin(CONFIG)


def test_a_new_run_is_not_begun_in_what_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "checkpoints").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_dir", lambda path: path == tmp_path or _forbidden(path))
        with pytest.raises(ConfigError, match=r"cannot read .*/checkpoints: Permission denied"):
            RunFolder(tmp_path).check_new()


def _forbidden(path):
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


def test_an_epoch_that_may_not_be_read_is_not_to_be_written_anew(folder):
    (folder.path / "epoch").symlink_to("epoch")
    with pytest.raises(CheckpointError, match=r"epoch: cannot be read: Too many levels of [^:]*$"):
        folder.check_resumable()


def test_checkpoints_that_cannot_be_read_are_not_said_to_be_gone(folder):
    folder.checkpoints.rmdir()
    folder.checkpoints.symlink_to("checkpoints")
    with pytest.raises(CheckpointError, match=r"checkpoints: cannot be read: Too many levels"):
        folder.check_resumable()
    folder.checkpoints.unlink()
    folder.checkpoints.write_text("in the way")
    with pytest.raises(CheckpointError, match=r"checkpoints: cannot be read: Not a directory"):
        folder.check_resumable()


def test_reports_that_lead_nowhere_are_refused(folder):
    folder.metrics.symlink_to("nowhere/metrics.jsonl")
    with pytest.raises(ConfigError, match=r"cannot write to .*metrics\.jsonl: No such.*: move it"):
        folder.check_resumable()
