"""A batch shows its slot's memory, and its columns and rows are taken out of every tensor."""

import dataclasses

import torch
from safetensors import safe_open
from safetensors.torch import load_file


def test_a_stack_is_seen_through_the_windows_over_its_frames(make_batch):
    windows = {"": torch.tensor([0, 1, 1]).repeat(5, 7, 1)}
    batch = dataclasses.replace(
        make_batch(), obs={"": torch.arange(10).view(5, 2)}, windows=windows
    )
    rows = batch.rows_of_obs()[""]
    assert rows.shape == (5, 7, 3)
    assert rows[4, 6].tolist() == [8, 9, 9]
    # Columns are taken out of every tensor.
    taken = batch.take(torch.tensor([3, 1]))
    for name in ("rewards_BT", "mask_BT", "log_probs_BT"):
        assert torch.equal(getattr(taken, name), getattr(batch, name)[[3, 1]])
    assert torch.equal(taken.actions[""], batch.actions[""][[3, 1]])
    assert torch.equal(taken.rows_of_obs()[""], rows[[3, 1]])


def test_rows_of_all_columns_are_taken_in_any_order(make_batch):
    batch, steps = make_batch(), torch.arange(6)
    windows = {"": torch.stack([(steps - 1).clamp(min=0), steps], -1).repeat(5, 1, 1)}
    windows[""] = torch.cat([windows[""], windows[""][:, -1:]], 1)
    known = {"targets_BT": torch.rand(5, 6), "advantages_BT": torch.rand(5, 6)}
    numbers_N = torch.tensor([29, 0, 6, 7, 13])
    columns_N, rows_N = numbers_N // 6, numbers_N % 6
    for each in (batch, dataclasses.replace(batch, windows=windows)):
        part = each.in_one_column(known).rows(numbers_N, 6)
        assert part.mask_BT.shape == (1, 5)
        for name in ("rewards_BT", "mask_BT", "log_probs_BT", "terminated_BT"):
            assert torch.equal(getattr(part, name)[0], getattr(each, name)[columns_N, rows_N])
        assert torch.equal(part.actions[""][0], each.actions[""][columns_N, rows_N])
        for name, numbers_BT in known.items():
            assert torch.equal(part.known[name][0], numbers_BT[columns_N, rows_N])
        # There is one more row of observations, which nobody looks at.
        shown = part.rows_of_obs()[""]
        assert shown.shape[:2] == (1, 6)
        assert torch.equal(shown[0, :5], each.rows_of_obs()[""][columns_N, rows_N])


ABOUT = {"not_finite": "loss/value, loss/total", "stats": "{'grad/norm': 2.0}"}


def test_all_of_a_batch_is_in_the_file(tmp_path, make_batch):
    batch, path = make_batch(), tmp_path / "kept.safetensors"
    is_failed_B = torch.tensor([True, False, True, True, False])
    batch.rewards_BT[0, 0] = torch.nan
    said = batch.keep(path, ABOUT, is_failed_B=is_failed_B)
    assert said == f"the last batch is kept in {path}"
    kept = load_file(path)
    assert torch.equal(kept["obs/"], batch.obs[""])
    assert torch.equal(kept["actions/"], batch.actions[""])
    assert torch.equal(kept["mask_BT"], batch.mask_BT)
    assert torch.equal(kept["is_failed_B"], is_failed_B)
    assert kept["rewards_BT"][0, 0].isnan()
    with safe_open(path, "pt") as file:
        assert file.metadata() == ABOUT
    path = tmp_path / "missing" / "kept"
    said = batch.keep(path, ABOUT)
    assert said == f"the last batch cannot be kept in {path}: No such file or directory"
