"""A batch is kept whole, or the disk is to blame."""

import errno
import os

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from impala_async.training.kept_batch import keep_batch


def test_all_of_a_batch_is_in_the_file(tmp_path, make_batch):
    batch, is_failed_B = make_batch(), torch.tensor([True, False, True, True, False])
    batch.rewards_BT[0, 0] = torch.nan
    path = tmp_path / "kept.safetensors"
    said = keep_batch(path, batch, is_failed_B, {"not_finite": "loss/value"})
    assert said == f"the last batch is kept in {path}"
    kept = load_file(path)
    assert torch.equal(kept["obs/"], batch.obs[""])
    assert torch.equal(kept["actions/"], batch.actions[""])
    assert torch.equal(kept["mask_BT"], batch.mask_BT)
    assert torch.equal(kept["is_failed_B"], is_failed_B)
    assert kept["rewards_BT"][0, 0].isnan()
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"not_finite": "loss/value"}


def test_half_of_a_batch_does_not_stay_on_a_full_disk(tmp_path, make_batch, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    said = keep_batch(tmp_path / "kept", make_batch(), torch.ones(5, dtype=torch.bool), {})
    assert said.endswith("cannot be kept in {}: full".format(tmp_path / "kept"))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_does_not_take_it_is_told(tmp_path, make_batch):
    path = tmp_path / "nowhere" / "kept"
    said = keep_batch(path, make_batch(), torch.ones(5, dtype=torch.bool), {})
    assert said == f"the last batch cannot be kept in {path}: No such file or directory"
