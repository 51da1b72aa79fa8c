"""What an update came to, and the batch that made it fail: kept whole, or the disk is to blame."""

import errno
import math
import os
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from impala_async.training.result import Outcome, StepResult

NOTHING: Any = None


def outcome(is_applied, num_valid, stats, columns=(0,)):
    is_in_B = torch.zeros(3, dtype=torch.bool).index_fill(0, torch.tensor(columns), True)
    return Outcome(is_in_B, is_applied, num_valid, NOTHING, stats)


def failed(what, columns=(0,)):
    return outcome(False, 3, {"loss/value": 1.0, what: math.nan}, columns)


def test_a_result_is_of_what_was_taken():
    result = StepResult.of(
        [
            outcome(True, 3, {"a": 1.0, "b": 2.0}),
            failed("grad/norm", (1,)),
            outcome(True, 4, {"a": 3.0, "b": 6.0}, (2,)),
        ],
        5,
        {"c": 7.0},
    )
    assert (result.applied, result.num_updates, result.num_valid_rows) == (True, 2, 10)
    assert result.stats == {"a": 2.0, "b": 4.0, "c": 7.0}
    assert result.is_failed_B.tolist() == [False, True, False]
    assert (result.num_failed_in_a_row, result.not_finite) == (0, ("grad/norm",))


def test_what_failed_is_counted_in_a_row_and_named_once():
    result = StepResult.of(
        [
            outcome(True, 3, {"loss/value": 1.0}),
            outcome(False, 0, {"loss/value": math.nan}),
            failed("grad/norm"),
            failed("loss/total", (1, 2)),
            failed("grad/norm"),
        ],
        5,
        {},
    )
    assert (result.num_failed_in_a_row, result.not_finite) == (3, ("grad/norm", "loss/total"))
    assert result.is_failed_B.all()
    unknown = StepResult.of([outcome(False, 3, {"grad/norm": 1.0})], 5, {})
    assert (unknown.num_failed_in_a_row, unknown.not_finite) == (6, ("weights",))
    nothing = StepResult.of([outcome(False, 0, {})], 5, {})
    assert (nothing.num_failed_in_a_row, nothing.not_finite, nothing.applied) == (5, (), False)


@pytest.fixture
def result():
    is_failed_B = torch.tensor([True, False, True, True, False])
    return StepResult(0, 9, is_failed_B, {"grad/norm": 2.0}, 1, ("loss/value", "loss/total"))


def test_all_of_a_batch_is_in_the_file(tmp_path, make_batch, result):
    batch, path = make_batch(), tmp_path / "kept.safetensors"
    batch.rewards_BT[0, 0] = torch.nan
    assert result.keep_batch(path, batch) == f"the last batch is kept in {path}"
    kept = load_file(path)
    assert torch.equal(kept["obs/"], batch.obs[""])
    assert torch.equal(kept["actions/"], batch.actions[""])
    assert torch.equal(kept["mask_BT"], batch.mask_BT)
    assert torch.equal(kept["is_failed_B"], result.is_failed_B)
    assert kept["rewards_BT"][0, 0].isnan()
    with safe_open(path, "pt") as file:
        assert file.metadata() == {
            "not_finite": "loss/value, loss/total",
            "stats": "{'grad/norm': 2.0}",
        }


def test_half_of_a_batch_does_not_stay_on_a_full_disk(tmp_path, make_batch, monkeypatch, result):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    said = result.keep_batch(tmp_path / "kept", make_batch())
    assert said.endswith("cannot be kept in {}: full".format(tmp_path / "kept"))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_does_not_take_it_is_told(tmp_path, make_batch, result):
    path = tmp_path / "nowhere" / "kept"
    said = result.keep_batch(path, make_batch())
    assert said == f"the last batch cannot be kept in {path}: No such file or directory"
