"""A checkpoint is whole or not there, and training goes on from it bit for bit."""

import errno
import hashlib
import json
import logging
import os

import pytest
import torch
from safetensors import safe_open

from impala_async.errors import CheckpointError
from impala_async.training import checkpoint
from impala_async.training.checkpoint import (
    highest_epoch,
    last_good,
    newest_checkpoint,
    prune,
    read_digests,
    save_checkpoint,
)
from impala_async.training.state import TrainingState
from impala_async.weights import Version

TENSORS = {"model": {"w": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor(3)}}
STATE = {"env_steps_trained": 1200, "watermarks": {"a": [1, 2]}, "best_return": None}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def save(folder, epoch, update, state=STATE):
    return save_checkpoint(folder, Version(epoch, update), TENSORS, state)


def found_in(folder):
    found = newest_checkpoint(folder)
    return TrainingState(found.tensors, found.state)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def train(step, make_batch, seeds):
    for seed in seeds:
        assert step.run(make_batch(seed=seed), torch.ones(5, dtype=torch.bool), seed * 20).applied


def test_what_is_saved_is_what_is_loaded(folder):
    path = save(folder, 2, 15)
    assert path == folder / "ckpt-2-15"
    found = newest_checkpoint(folder)
    assert (found.path, found.version, found.state) == (path, Version(2, 15), STATE)
    tensors = found.tensors
    assert tensors["model"].keys() == TENSORS["model"].keys()
    for name, tensor in TENSORS["model"].items():
        assert torch.equal(tensors["model"][name], tensor)
        assert tensors["model"][name].dtype == tensor.dtype


def test_the_manifest_gives_every_file_its_size_and_digest(folder):
    path = save(folder, 2, 15)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["schema"], manifest["epoch"], manifest["update"]) == (1, 2, 15)
    assert names(path) == ["manifest.json", "model.safetensors", "state.json"]
    assert sorted(manifest["files"]) == ["model.safetensors", "state.json"]
    for name, entry in manifest["files"].items():
        data = (path / name).read_bytes()
        assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    with safe_open(path / "model.safetensors", framework="np") as file:
        assert sorted(file.keys()) == ["steps", "w"]


SCHEDULE = {"lr": 1e-2, "lr_end": 1e-3, "schedule_env_steps": 150}
STATISTICS = {"normalize_obs": True, "normalize_returns": True}
RUNS = {
    "impala": SCHEDULE,
    "impala, RMSProp": SCHEDULE
    | {"optimizer": "rmsprop_tf", "optimizer_options": {"momentum": 0.5}}
    | STATISTICS,
    "appo": SCHEDULE
    | STATISTICS
    | {"name": "appo", "kl_coeff": 0.7, "tau": 0.5, "target_update_every_updates": 3},
    "appo, parts": SCHEDULE
    | {"name": "appo", "num_minibatches": 3, "target_update_every_updates": 4},
    "ppo": SCHEDULE | STATISTICS | {"name": "ppo", "num_minibatches": 3, "optimizer": "adamw"},
    "a2c": SCHEDULE | {"name": "a2c", "optimizer": "rmsprop"},
}


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS.keys())
@pytest.mark.parametrize("num_before", [0, 4])
def test_training_goes_on_bit_for_bit(folder, make_step, make_batch, num_before, settings):
    step = make_step(**settings)
    train(step, make_batch, range(num_before))
    captured = step.capture()
    save_checkpoint(folder, Version(1, num_before), captured.tensors, captured.state)
    train(step, make_batch, range(num_before, 9))

    resumed = make_step(seed=5, **settings)
    resumed.restore(found_in(folder))
    train(resumed, make_batch, range(num_before, 9))
    mine, theirs = resumed.capture(), step.capture()
    assert json.dumps(mine.state) == json.dumps(theirs.state)
    for group, tensors in theirs.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(mine.tensors[group][name], tensor), (group, name)


def test_the_target_network_has_its_own_file(folder, make_step, make_batch):
    step = make_step(name="appo")
    train(step, make_batch, range(2))
    captured = step.capture()
    path = save_checkpoint(folder, Version(1, 2), captured.tensors, captured.state)
    assert (path / "target.safetensors").exists()
    found = newest_checkpoint(folder)
    tensors, state = found.tensors, found.state
    assert tensors["target"].keys() == tensors["model"].keys()
    target = {"kl_coeff": 0.0, "kl_settings": [0.0, 0.01], "age": 2}
    assert state["algorithm"]["target"] == target
    # Without it such a run cannot go on; a run of another algorithm has none.
    with pytest.raises(CheckpointError, match=r"^it has no 'target'"):
        make_step(name="appo").restore(make_step().capture())
    assert "target" not in make_step().capture().tensors


def test_a_capture_is_a_copy_that_training_does_not_touch(make_step, make_batch):
    step = make_step(name="appo", normalize_returns=True)
    train(step, make_batch, range(2))
    captured = step.capture()
    state = json.dumps(captured.state)
    kept = {
        group: {name: tensor.clone() for name, tensor in members.items()}
        for group, members in captured.tensors.items()
    }
    train(step, make_batch, range(2, 5))
    assert kept["optimizer"]
    assert json.dumps(captured.state) == state
    for group, members in captured.tensors.items():
        for name, tensor in members.items():
            assert torch.equal(tensor, kept[group][name])


def test_weights_in_another_memory_order_are_saved_by_their_indices(folder, make_step):
    step = make_step()
    weight = step.policy.model.policy_head.weight
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous()
    captured = step.capture()
    save_checkpoint(folder, Version(1, 0), captured.tensors, captured.state)
    tensors = newest_checkpoint(folder).tensors
    assert torch.equal(tensors["model"]["policy_head.weight"], weight.detach())


def test_restoring_twice_from_one_capture_gives_two_independent_steps(make_step, make_batch):
    step = make_step()
    train(step, make_batch, range(2))
    captured = step.capture()
    first, second = make_step(seed=1), make_step(seed=2)
    first.restore(captured)
    train(first, make_batch, range(2, 5))
    second.restore(captured)
    train(second, make_batch, range(2, 5))
    for mine, theirs in zip(first.policy.tensors, second.policy.tensors, strict=True):
        assert torch.equal(mine, theirs)


def test_the_newest_is_first_by_epoch_then_by_update_as_numbers(folder):
    for epoch, update in ((1, 900), (2, 9), (2, 10), (1, 1000)):
        save(folder, epoch, update)
    assert newest_checkpoint(folder).version == Version(2, 10)


def test_without_a_folder_or_with_other_things_in_it_there_is_none(folder):
    assert newest_checkpoint(folder) is None
    for name in ("ckpt-1", "ckpt-1-2-3", "ckpt-01-2", "ckpt-a-b", ".partial-ckpt-1-2", "old-1-2"):
        (folder / name).mkdir(parents=True)
    assert newest_checkpoint(folder) is None


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def edit_manifest(checkpoint, **fields):
    path = checkpoint / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def list_file(checkpoint, name):
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    edit_manifest(checkpoint, files={**files, name: files["model.safetensors"]})


def put(path, make, size=None):
    """Something else in the place of a file, of the size that the manifest says."""
    path.unlink()
    make(path)
    if size is not None:
        files = json.loads((path.parent / "manifest.json").read_text())["files"]
        files[path.name]["size"] = size
        edit_manifest(path.parent, files=files)


DAMAGE = {
    "a flipped bit of a tensor": lambda path: flip(path / "model.safetensors"),
    "a changed digit of the state": lambda path: (path / "state.json").write_text(
        (path / "state.json").read_text().replace("1200", "1300")
    ),
    "a torn file": lambda path: os.truncate(path / "model.safetensors", 50),
    "a missing file": lambda path: (path / "model.safetensors").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "an empty manifest": lambda path: (path / "manifest.json").write_bytes(b""),
    "a manifest of rubbish": lambda path: (path / "manifest.json").write_bytes(b"\xff\x00[["),
    "a manifest of another shape": lambda path: (path / "manifest.json").write_text("[1]"),
    "a manifest too deep": lambda path: (path / "manifest.json").write_text("[" * 100_000),
    "a manifest that is a pipe": lambda path: put(path / "manifest.json", os.mkfifo),
    "a manifest that is a folder": lambda path: put(path / "manifest.json", os.mkdir),
    "a manifest that is a loop": lambda path: put(
        path / "manifest.json", lambda name: os.symlink(name, name)
    ),
    "a manifest that is huge": lambda path: os.truncate(path / "manifest.json", 1 << 40),
    "text for a number": lambda path: edit_manifest(path, update="2"),
    "no number": lambda path: edit_manifest(path, update=float("nan")),
    "tensors that are a pipe": lambda path: put(path / "model.safetensors", os.mkfifo, size=0),
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
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(folder).version == Version(1, 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ckpt-1-2" in caplog.text


def test_one_that_a_learner_removes_while_it_is_read_is_not_damaged(folder, caplog, monkeypatch):
    save(folder, 1, 1)
    real = checkpoint._verified

    def verified(path, version):
        if version.update == 1:
            save(folder, 1, 2)
            prune(folder, keep=1)
        return real(path, version)

    monkeypatch.setattr(checkpoint, "_verified", verified)
    assert newest_checkpoint(folder).version == Version(1, 2)
    assert caplog.messages == []


def test_what_is_not_finite_is_neither_written_nor_resumed_from(folder, caplog, monkeypatch):
    good = save(folder, 1, 4)
    bad = {"model": {"w": torch.ones(3), "v": torch.tensor([1.0, torch.inf])}}
    with pytest.raises(CheckpointError, match=r"ckpt-1-5/model: v is not finite"):
        save_checkpoint(folder, Version(1, 5), bad, STATE)
    assert names(folder) == [good.name]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_check_finite", lambda path, tensors: None)
        save_checkpoint(folder, Version(1, 5), bad, STATE)
    found = newest_checkpoint(folder)
    assert found is not None
    assert found.path == good
    assert "v is not finite" in caplog.text


def test_a_number_type_that_torch_cannot_look_at_is_damage(folder, caplog, monkeypatch):
    good = save(folder, 1, 4)
    odd = {"model": {"w": torch.zeros(3).to(torch.float8_e4m3fn)}}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_check_finite", lambda path, tensors: None)
        save_checkpoint(folder, Version(1, 5), odd, STATE)
    found = newest_checkpoint(folder)
    assert found is not None
    assert found.path == good
    assert "Float8_e4m3fn" in caplog.text


def test_the_highest_epoch_counts_damaged_ones_too(folder):
    assert highest_epoch(folder) == 0
    save(folder, 2, 9)
    (save(folder, 3, 1) / "manifest.json").unlink()
    # No epoch of ours: an actor could not be told of it.
    (folder / "ckpt-99999999999-1").mkdir()
    assert highest_epoch(folder) == 3
    assert last_good(folder).name == "ckpt-2-9"


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(folder):
    folder.symlink_to(folder)
    with pytest.raises(CheckpointError, match="cannot be read: Too many levels"):
        newest_checkpoint(folder)
    assert last_good(folder) is None


def test_only_damaged_ones_are_none(folder, caplog):
    flip(save(folder, 1, 1) / "state.json")
    assert newest_checkpoint(folder) is None
    assert "ckpt-1-1" in caplog.text


def test_tensors_are_loaded_once_and_only_of_those_that_are_looked_at(folder, monkeypatch):
    loads = []
    load = checkpoint.load
    monkeypatch.setattr(checkpoint, "load", lambda data: (loads.append(data), load(data))[1])
    for update in (1, 2, 3):
        save(folder, 1, update)
    found = newest_checkpoint(folder)
    assert found.tensors.keys() == TENSORS.keys()
    assert len(loads) == 1


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_a_file_lost_after_it_was_listed_is_damage(folder, monkeypatch, caplog, name):
    save(folder, 1, 1)
    sized_files = checkpoint._sized_files

    def lose(path, version):
        listed = sized_files(path, version)
        (path / name).unlink()
        return listed

    monkeypatch.setattr(checkpoint, "_sized_files", lose)
    assert newest_checkpoint(folder) is None
    assert f"{name} cannot be read" in caplog.text


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
    assert names(folder) == ["ckpt-1-1"]
    assert newest_checkpoint(folder).version == Version(1, 1)
    save(folder, 1, 2)
    assert newest_checkpoint(folder).version == Version(1, 2)


def test_one_whose_name_is_not_on_the_disk_is_said_to_be_there(folder, monkeypatch):
    real = checkpoint._sync

    def sync(path):
        if path == folder:
            raise OSError(errno.EIO, "Input/output error")
        real(path)

    monkeypatch.setattr(checkpoint, "_sync", sync)
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
    assert events == [
        "model.safetensors",
        "state.json",
        "manifest.json",
        ".partial-ckpt-1-2",
        ".partial-ckpt-1-2 to ckpt-1-2",
        "checkpoints",
    ]


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
    assert newest_checkpoint(folder).version == Version(1, 1)
    prune(folder, keep=3)
    assert names(folder) == ["ckpt-1-1"]


def test_a_leftover_of_the_same_name_is_no_obstacle(folder):
    leftover = folder / ".partial-ckpt-1-2"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    save(folder, 1, 2)
    assert names(folder) == ["ckpt-1-2"]
    assert newest_checkpoint(folder).version == Version(1, 2)


@pytest.mark.parametrize("can_exchange", [True, False])
def test_the_same_version_again_replaces_the_earlier_one(folder, monkeypatch, can_exchange):
    save(folder, 1, 2, {"env_steps_trained": 4})
    if can_exchange:
        monkeypatch.setattr(type(folder), "rename", lambda *_: pytest.fail("a moment without it"))
    else:
        monkeypatch.setattr(checkpoint, "_RENAME_EXCHANGE", 1 << 20)  # no flag of Linux
    save(folder, 1, 2, {"env_steps_trained": 5})
    assert names(folder) == ["ckpt-1-2"]
    assert newest_checkpoint(folder).state == {"env_steps_trained": 5}


def test_a_damaged_one_of_the_same_version_is_replaced(folder):
    save(folder, 1, 2)
    os.truncate(folder / "ckpt-1-2" / "model.safetensors", 10)
    save(folder, 1, 2, {"env_steps_trained": 5})
    prune(folder, keep=1)
    assert names(folder) == ["ckpt-1-2"]
    assert newest_checkpoint(folder).state == {"env_steps_trained": 5}


def test_pruning_keeps_the_newest_and_the_best(folder):
    for update in range(1, 8):
        save(folder, 1, update)
    prune(folder, keep=3, best=Version(1, 2))
    assert names(folder) == ["ckpt-1-2", "ckpt-1-5", "ckpt-1-6", "ckpt-1-7"]
    prune(folder, keep=1, best=Version(1, 7))
    assert names(folder) == ["ckpt-1-7"]


def test_links_and_plain_files_are_pruned_and_no_link_is_followed(folder, tmp_path):
    """Somebody has moved a checkpoint to another disk, or left a file."""
    moved = tmp_path / "moved"
    save(folder, 1, 1).rename(moved)
    (folder / "ckpt-1-1").symlink_to(moved)
    (folder / ".partial-x").write_text("notes")
    (folder / ".partial-y").symlink_to(moved)
    (folder / ".partial-z").symlink_to("nowhere")
    for update in (2, 3):
        save(folder, 1, update)
    prune(folder, keep=2)
    assert names(folder) == ["ckpt-1-2", "ckpt-1-3"]
    assert names(moved) == ["manifest.json", "model.safetensors", "state.json"]


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("target", ["moved", "nowhere"])
def test_a_link_of_the_same_version_is_replaced(
    folder, tmp_path, monkeypatch, target, can_exchange
):
    save(folder, 1, 2).rename(tmp_path / "moved")
    for name in ("ckpt-1-2", ".partial-ckpt-1-2", ".partial-old-ckpt-1-2"):
        (folder / name).symlink_to(tmp_path / target)
    if not can_exchange:
        monkeypatch.setattr(checkpoint, "_RENAME_EXCHANGE", 1 << 20)
    save(folder, 1, 2, {"env_steps_trained": 5})
    prune(folder, keep=1)
    assert names(folder) == ["ckpt-1-2"]
    assert newest_checkpoint(folder).state == {"env_steps_trained": 5}
    assert len(names(tmp_path / "moved")) == 3


def test_one_that_cannot_be_removed_is_named_and_keeps_no_other(folder, monkeypatch):
    for update in (1, 2, 3, 4):
        save(folder, 1, update)
    rmtree = checkpoint.shutil.rmtree

    def remove(path):
        if path.name.endswith("ckpt-1-2"):
            raise PermissionError(errno.EACCES, "Permission denied", "model.safetensors")
        rmtree(path)

    monkeypatch.setattr("shutil.rmtree", remove)
    with pytest.raises(CheckpointError) as caught:
        prune(folder, keep=1)
    left = folder / ".partial-old-ckpt-1-2"
    says = f"cannot remove old checkpoints: {left}: Permission denied: remove it by hand"
    assert str(caught.value) == says
    assert names(folder) == [left.name, "ckpt-1-4"]


def test_damaged_ones_do_not_push_good_ones_out(folder):
    for update in range(1, 5):
        save(folder, 1, update)
    for update in (3, 4):
        os.truncate(folder / f"ckpt-1-{update}" / "model.safetensors", 10)
    prune(folder, keep=1)
    assert names(folder) == ["ckpt-1-2", "ckpt-1-3", "ckpt-1-4"]


def test_pruning_without_a_folder_is_nothing(folder):
    prune(folder, keep=1)
    assert not folder.exists()


def test_a_state_that_is_no_strict_json_is_refused_and_leaves_nothing(folder):
    with pytest.raises(ValueError, match="not JSON compliant"):
        save(folder, 1, 1, {"best_return": float("nan")})
    assert names(folder) == []


def test_a_checkpoint_of_another_model_does_not_fit(folder, make_step):
    captured = make_step(hidden=(16, 16)).capture()
    for other in ((16, 8), (16,), (16, 16, 16)):
        with pytest.raises(CheckpointError, match=r"shape|it has"):
            make_step(hidden=other).restore(captured)


@pytest.mark.parametrize("group", ["model", "optimizer", "target"])
def test_a_checkpoint_of_other_numbers_does_not_fit(make_step, make_batch, group):
    step = make_step(name="appo")
    train(step, make_batch, range(2))
    captured = step.capture()
    tensors = {**captured.tensors}
    tensors[group] = {name: tensor.to(torch.int64) for name, tensor in tensors[group].items()}
    with pytest.raises(CheckpointError, match=r"torch\.int64"):
        make_step(name="appo").restore(TrainingState(tensors, captured.state))


@pytest.mark.parametrize("missing", ["model", "optimizer", "algorithm"])
def test_a_checkpoint_without_a_part_is_named(make_step, missing):
    captured = make_step().capture()
    tensors = {name: group for name, group in captured.tensors.items() if name != missing}
    state = {name: part for name, part in captured.state.items() if name != missing}
    with pytest.raises(CheckpointError, match=f"it has no '{missing}'"):
        make_step().restore(TrainingState(tensors, state))


def test_the_digests_of_a_checkpoint_are_those_of_its_tensors(folder):
    checkpoint = save(folder, 1, 7)
    names = [path.name for path in checkpoint.iterdir() if path.suffix == ".safetensors"]
    assert read_digests(folder, Version(1, 7)) == {
        name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in names
    }
    assert names
    assert read_digests(folder, Version(1, 8)) == {}
