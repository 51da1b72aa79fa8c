"""A checkpoint is whole or not there; what is damaged is passed over, what is old removed."""

import errno
import hashlib
import json
import os
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open

from impala_async.errors import CheckpointError
from impala_async.metrics.host import Memory
from impala_async.training import checkpoint
from impala_async.weights import Version

TENSORS = {"model": {"w": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor(3)}}
STATE = {"env_steps_trained": 1200, "watermarks": {"a": [1, 2]}, "best_return": None}
MODEL, MANIFEST = "model.safetensors", "manifest.json"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def save(folder, epoch, update, state=STATE, tensors=TENSORS):
    return checkpoint.save_checkpoint(folder, Version(epoch, update), tensors, state)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_state_that_could_not_be_read_again_is_not_written(folder, monkeypatch):
    monkeypatch.setattr("impala_async.training.checkpoint.MOST_BYTES", 10)
    with pytest.raises(
        CheckpointError, match=r"state.json is longer than can be read again, \d+ b"
    ):
        save(folder, 1, 1)
    assert not folder.exists()


def test_what_is_saved_is_what_is_loaded_and_what_the_manifest_says(folder):
    path = save(folder, 2, 15)
    assert path == folder / "ckpt-2-15"
    found = next(checkpoint.whole_checkpoints(folder), None)
    assert (found.path, found.version, found.state) == (path, Version(2, 15), STATE)
    # It has the ids of actors.
    assert (path / "state.json").stat().st_mode & 0o777 == 0o600
    assert found.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS["model"].items():
        assert torch.equal(found.tensors["model"][name], tensor)
        assert found.tensors["model"][name].dtype == tensor.dtype
    manifest = json.loads((path / MANIFEST).read_text())
    assert (manifest["schema"], manifest["epoch"], manifest["update"]) == (1, 2, 15)
    assert names(path) == [MANIFEST, MODEL, "state.json"]
    assert sorted(manifest["files"]) == [MODEL, "state.json"]
    for name, entry in manifest["files"].items():
        data = (path / name).read_bytes()
        assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    with safe_open(path / MODEL, framework="np") as file:
        assert sorted(file.keys()) == ["steps", "w"]
    digest = hashlib.sha256((path / MODEL).read_bytes()).hexdigest()
    assert checkpoint.read_digests(folder, Version(2, 15)) == {MODEL: digest}
    assert checkpoint.read_digests(folder, Version(2, 16)) == {}


def test_the_newest_is_first_by_epoch_then_by_update_as_numbers(folder):
    assert next(checkpoint.whole_checkpoints(folder), None) is None
    assert checkpoint.highest_epoch(folder) == 0
    for name in ("ckpt-1", "ckpt-1-2-3", "ckpt-01-2", "ckpt-a-b", ".partial-ckpt-1-2", "old-1-2"):
        (folder / name).mkdir(parents=True)
    # No epoch of ours: an actor could not be told of it.
    (folder / "ckpt-99999999999-1").mkdir()
    assert next(checkpoint.whole_checkpoints(folder), None) is None
    for epoch, update in ((1, 900), (2, 9), (2, 10), (1, 1000)):
        save(folder, epoch, update)
    assert next(checkpoint.whole_checkpoints(folder), None).version == Version(2, 10)
    # That of a damaged one counts too.
    (save(folder, 3, 1) / MANIFEST).unlink()
    assert checkpoint.highest_epoch(folder) == 3
    assert checkpoint.last_good(folder).name == "ckpt-2-10"


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(folder):
    folder.symlink_to(folder)
    with pytest.raises(CheckpointError, match="cannot be read: Too many levels"):
        next(checkpoint.whole_checkpoints(folder), None)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.prune(folder, keep=1)
    assert checkpoint.last_good(folder) is None


# -------------------- damage


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def edit_manifest(saved, **fields):
    path = saved / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def list_file(saved, name, **entry):
    files = json.loads((saved / MANIFEST).read_text())["files"]
    edit_manifest(saved, files={**files, name: {**files[MODEL], **entry}})


def replace_by_pipe(saved, name):
    if name == MODEL:
        list_file(saved, MODEL, size=0)
    (saved / name).unlink()
    os.mkfifo(saved / name)


def rubbish_of_the_right_digest(saved):
    (saved / MODEL).write_bytes(b"rubbish")
    list_file(saved, MODEL, size=7, sha256=hashlib.sha256(b"rubbish").hexdigest())


def tensor_of_a_size_that_no_tensor_has(saved):
    header = json.dumps({"w": {"dtype": "F32", "shape": [0, 2**64 - 1], "data_offsets": [0, 0]}})
    data = len(header).to_bytes(8, "little") + header.encode()
    (saved / MODEL).write_bytes(data)
    list_file(saved, MODEL, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def one_digit_of_the_state(saved):
    path = saved / "state.json"
    path.write_text(path.read_text().replace("1200", "1300"))


DAMAGE = {
    "a flipped bit of a tensor": lambda path: flip(path / MODEL),
    "a changed digit of the state": one_digit_of_the_state,
    "rubbish of the right digest": rubbish_of_the_right_digest,
    "a tensor of a size that no tensor has": tensor_of_a_size_that_no_tensor_has,
    "a torn file": lambda path: os.truncate(path / MODEL, 50),
    "a missing file": lambda path: (path / MODEL).unlink(),
    "no manifest": lambda path: (path / MANIFEST).unlink(),
    "a manifest of rubbish": lambda path: (path / MANIFEST).write_bytes(b"\xff\x00[["),
    "a manifest of another shape": lambda path: (path / MANIFEST).write_text("[1]"),
    "a manifest that is a pipe": lambda path: replace_by_pipe(path, MANIFEST),
    "text for a number": lambda path: edit_manifest(path, update="2"),
    "tensors that are a pipe": lambda path: replace_by_pipe(path, MODEL),
    "files of another shape": lambda path: edit_manifest(path, files=[1, 2]),
    "a file entry of another shape": lambda path: edit_manifest(path, files={"state.json": 1}),
    "no state listed": lambda path: edit_manifest(path, files={}),
    "another schema": lambda path: edit_manifest(path, schema=2),
    "another version": lambda path: edit_manifest(path, update=7),
    "a file elsewhere": lambda path: list_file(path, "../ckpt-1-1/model.safetensors"),
    "a file of no known kind": lambda path: list_file(path, "model.pt"),
    "a name that no disk takes": lambda path: list_file(path, "a\0b.safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_one_is_skipped_with_a_warning(folder, caplog, damage):
    save(folder, 1, 1)
    damage(save(folder, 1, 2))
    assert next(checkpoint.whole_checkpoints(folder), None).version == Version(1, 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ckpt-1-2" in caplog.text


def test_one_that_memory_cannot_hold_is_damaged(folder, caplog, monkeypatch):
    save(folder, 1, 1)
    held = (save(folder, 1, 2) / MODEL).stat().st_size
    # As a hole in a file may be: it takes nothing on the disk.
    os.truncate(folder / "ckpt-1-2" / MODEL, 1 << 30)
    list_file(folder / "ckpt-1-2", MODEL, size=1 << 30)
    monkeypatch.setattr(checkpoint, "find_memory", lambda: Memory(held, held))
    assert next(checkpoint.whole_checkpoints(folder), None).version == Version(1, 1)
    assert "model.safetensors (1073741824 bytes) is larger than the memory here" in caplog.text


def test_where_the_memory_cannot_be_asked_for_the_last_good_one_is_found_and_none_is_read(
    folder, monkeypatch
):
    """As where no descriptor is left: a run goes on, and says which one there is."""
    save(folder, 1, 1)
    monkeypatch.setattr(checkpoint, "find_memory", Mock(side_effect=OSError(errno.EMFILE, "many")))
    assert checkpoint.last_good(folder).name == "ckpt-1-1"
    with pytest.raises(CheckpointError, match=r"cannot be read: .*many"):
        checkpoint.open_checkpoint(folder / "ckpt-1-1")


def test_one_that_a_learner_removes_while_it_is_read_is_not_damaged(folder, caplog, monkeypatch):
    save(folder, 1, 1)
    real = checkpoint._verified

    def verified(path, version):
        if version.update == 1:
            save(folder, 1, 2)
            checkpoint.prune(folder, keep=1)
        return real(path, version)

    monkeypatch.setattr(checkpoint, "_verified", verified)
    assert next(checkpoint.whole_checkpoints(folder), None).version == Version(1, 2)
    assert caplog.messages == []


def test_a_folder_is_listed_once_however_many_are_damaged(folder, caplog, monkeypatch):
    save(folder, 1, 1)
    for update in range(2, 12):
        (folder / f"ckpt-1-{update}").touch()
    real, listed = checkpoint._found, []
    monkeypatch.setattr(checkpoint, "_found", lambda path: listed.append(path) or real(path))
    assert next(checkpoint.whole_checkpoints(folder)).version == Version(1, 1)
    assert (len(listed), len(caplog.messages)) == (1, 10)


def test_a_count_is_a_whole_number():
    assert checkpoint.count_in({"n": 5}, "n") == 5
    for wrong in (-5, 1e99, 2.5, "5", None):
        with pytest.raises(checkpoint.CheckpointError, match="its 'n' is "):
            checkpoint.count_in({"n": wrong}, "n")


def test_what_is_not_finite_is_neither_written_nor_resumed_from(folder, caplog, monkeypatch):
    good = save(folder, 1, 4)
    tensors = {"model": {"w": torch.ones(3), "v": torch.tensor([1.0, torch.inf])}}
    with pytest.raises(CheckpointError, match="ckpt-1-5/model: v is not finite"):
        save(folder, 1, 5, tensors=tensors)
    assert names(folder) == [good.name]
    with monkeypatch.context() as patch:
        # As somebody else wrote it.
        patch.setattr(checkpoint, "_check_finite", lambda path, tensors: None)
        save(folder, 1, 5, tensors=tensors)
    assert next(checkpoint.whole_checkpoints(folder), None).path == good
    assert "v is not finite" in caplog.text
    # Numbers of which torch cannot say it are none of ours.
    small = {"model": {"w": torch.zeros(3).to(torch.float8_e4m3fn)}}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_check_finite", lambda path, tensors: None)
        save(folder, 1, 6, tensors=small)
    assert next(checkpoint.whole_checkpoints(folder), None).path == good


@pytest.mark.parametrize("name", [MODEL, "state.json"])
def test_a_file_lost_after_it_was_listed_is_damage(folder, monkeypatch, caplog, name):
    save(folder, 1, 1)
    sized_files = checkpoint._sized_files

    def lose(path, version):
        listed = sized_files(path, version)
        (path / name).unlink()
        return listed

    monkeypatch.setattr(checkpoint, "_sized_files", lose)
    assert next(checkpoint.whole_checkpoints(folder), None) is None
    assert f"{name} cannot be read" in caplog.text


# -------------------- writing


def test_a_full_disk_leaves_the_last_good_one_and_nothing_else(folder, monkeypatch):
    save(folder, 1, 1)
    calls = []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"ckpt-1-2.*No space left"):
            save(folder, 1, 2)
    with pytest.raises(ValueError, match="not JSON compliant"):
        save(folder, 1, 2, {"best_return": float("nan")})
    assert names(folder) == ["ckpt-1-1"]
    save(folder, 1, 2)
    assert next(checkpoint.whole_checkpoints(folder), None).version == Version(1, 2)


def test_one_whose_name_is_not_on_the_disk_is_said_to_be_there(folder, monkeypatch):
    real = checkpoint.sync

    def sync(path):
        if path == folder:
            raise OSError(errno.EIO, "Input/output error")
        real(path)

    monkeypatch.setattr(checkpoint, "sync", sync)
    with pytest.raises(CheckpointError, match=r"ckpt-1-2 is written, but may not be there after"):
        save(folder, 1, 2)
    assert names(folder) == ["ckpt-1-2"]


def test_everything_is_on_the_disk_before_the_rename_and_the_name_after(folder, monkeypatch):
    events = []
    real_fsync, real_rename = os.fsync, type(folder).rename

    def fsync(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def rename(path, target):
        events.append(f"{path.name} to {target.name}")
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(type(folder), "rename", rename)
    save(folder, 1, 2)
    files, partial = [MODEL, "state.json", MANIFEST], ".partial-ckpt-1-2"
    assert events == [*files, partial, f"{partial} to ckpt-1-2", "checkpoints"]


class Killed(BaseException):
    """A process that ends in the middle."""


def test_what_a_crash_leaves_is_not_found_and_is_pruned(folder, monkeypatch):
    save(folder, 1, 1)

    def die(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(type(folder), "rename", die)
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            save(folder, 1, 2)
    assert names(folder) == [".partial-ckpt-1-2", "ckpt-1-1"]
    assert next(checkpoint.whole_checkpoints(folder), None).version == Version(1, 1)
    checkpoint.prune(folder, keep=3)
    assert names(folder) == ["ckpt-1-1"]


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("target", [None, "moved", "nowhere"])
def test_one_of_the_same_version_is_replaced_whatever_it_is(
    folder, tmp_path, monkeypatch, target, can_exchange
):
    """It may be damaged, or a link, and leftovers of the same names are no obstacle."""
    first = save(folder, 1, 2)
    os.truncate(first / MODEL, 10)
    for name in (".partial-ckpt-1-2", ".partial-old-ckpt-1-2"):
        (folder / name).mkdir()
        (folder / name / MODEL).write_bytes(b"half")
    if target is not None:
        first.rename(tmp_path / "moved")
        first.symlink_to(tmp_path / target)
    if can_exchange:
        monkeypatch.setattr(type(folder), "rename", lambda *_: pytest.fail("a moment without it"))
    else:
        monkeypatch.setattr(checkpoint, "_RENAME_EXCHANGE", 1 << 20)  # no flag of Linux
    save(folder, 1, 2, {"env_steps_trained": 5})
    checkpoint.prune(folder, keep=1)
    assert names(folder) == ["ckpt-1-2"]
    assert next(checkpoint.whole_checkpoints(folder), None).state == {"env_steps_trained": 5}
    assert target is None or len(names(tmp_path / "moved")) == 3


# -------------------- pruning


def test_pruning_keeps_the_newest_and_what_is_spared_and_counts_no_damaged_one(folder):
    checkpoint.prune(folder, keep=1)
    assert not folder.exists()
    for update in range(1, 8):
        save(folder, 1, update)
    checkpoint.prune(folder, 3, Version(1, 2), None, Version(1, 4), Version(2, 1))
    assert names(folder) == ["ckpt-1-2", "ckpt-1-4", "ckpt-1-5", "ckpt-1-6", "ckpt-1-7"]
    checkpoint.prune(folder, 3, Version(1, 2))
    assert names(folder) == ["ckpt-1-2", "ckpt-1-5", "ckpt-1-6", "ckpt-1-7"]
    os.truncate(folder / "ckpt-1-7" / MODEL, 10)
    checkpoint.prune(folder, 1, Version(1, 6))
    assert names(folder) == ["ckpt-1-6", "ckpt-1-7"]


def test_links_and_plain_files_are_pruned_and_no_link_is_followed(folder, tmp_path):
    """Somebody has moved a checkpoint to another disk, or left a file."""
    moved = tmp_path / "moved"
    save(folder, 1, 1).rename(moved)
    (folder / "ckpt-1-1").symlink_to(moved)
    (folder / ".partial-x").write_text("notes")
    (folder / ".partial-y").symlink_to(moved)
    (folder / ".partial-z").symlink_to("nowhere")
    save(folder, 1, 2)
    checkpoint.prune(folder, keep=1)
    assert names(folder) == ["ckpt-1-2"]
    assert names(moved) == [MANIFEST, MODEL, "state.json"]


def test_one_that_cannot_be_removed_is_named_and_keeps_no_other(folder, monkeypatch):
    for update in (1, 2, 3, 4):
        save(folder, 1, update)
    rmtree = checkpoint.shutil.rmtree

    def remove(path):
        if path.name.endswith("ckpt-1-2"):
            raise PermissionError(errno.EACCES, "Permission denied", MODEL)
        rmtree(path)

    monkeypatch.setattr("shutil.rmtree", remove)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.prune(folder, keep=1)
    left = folder / ".partial-old-ckpt-1-2"
    says = f"cannot remove old checkpoints: {left}: Permission denied: remove it by hand"
    assert str(caught.value) == says
    assert names(folder) == [left.name, "ckpt-1-4"]
