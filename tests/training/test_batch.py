"""A batch shows what its slot holds: the columns' own memory, and stacks frame by frame."""

import dataclasses

import numpy as np
import torch

from impala_async.training.batch import Batch


def test_a_batch_views_the_columns_memory(make_columns):
    columns = make_columns()
    batch = Batch.over(columns)
    columns.rewards_CT[2, 3] = 77
    columns.obs[""][1, 6, 2] = 88
    columns.actions[""][0, 0] = 3
    columns.mask_CT[4, 5] = ~columns.mask_CT[4, 5]
    assert batch.rewards_BT[2, 3] == 77
    assert batch.obs[""][1, 6, 2] == 88
    assert batch.actions[""][0, 0] == 3
    for name in ("log_probs", "terminated", "truncated", "mask", "rewards"):
        tensor, array = getattr(batch, f"{name}_BT"), getattr(columns, f"{name}_CT")
        assert np.shares_memory(tensor.numpy(), array)
        assert tensor.tolist() == array.tolist()


def test_columns_are_taken_out_of_every_tensor(make_batch):
    batch = make_batch()
    taken = batch.take(torch.tensor([3, 1]))
    for name in ("rewards_BT", "mask_BT", "log_probs_BT"):
        assert torch.equal(getattr(taken, name), getattr(batch, name)[[3, 1]])
    assert torch.equal(taken.obs[""], batch.obs[""][[3, 1]])
    assert torch.equal(taken.actions[""], batch.actions[""][[3, 1]])


def test_a_stack_is_seen_through_the_windows_over_its_frames(make_batch):
    frames_BF = torch.arange(10).view(5, 2)
    window_BSK = torch.tensor([0, 1, 1]).expand(5, 7, 3)
    batch = dataclasses.replace(
        make_batch(), obs={"": frames_BF}, windows={"": window_BSK.contiguous()}
    )
    rows = batch.rows_of_obs()[""]
    assert rows.shape == (5, 7, 3)
    assert rows[4, 6].tolist() == [8, 9, 9]
