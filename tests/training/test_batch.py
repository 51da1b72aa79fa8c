"""A batch shows its slot's memory, and its living columns are dealt into nearly equal parts."""

import dataclasses

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from impala_async.training.batch import MAX_TRIES, deal, find_culprits

SEEDS = (0, 0)


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


@pytest.mark.parametrize(("num_parts", "sizes"), [(2, [4, 3]), (3, [3, 2, 2]), (9, [1] * 7)])
def test_parts_hold_each_living_column_once(num_parts, sizes):
    alive_B = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1, 1]).bool()
    parts = deal(alive_B, num_parts, SEEDS)
    assert [len(columns_N) for columns_N in parts] == sizes
    assert sorted(torch.cat(parts).tolist()) == [0, 1, 3, 4, 6, 7, 8]


def test_the_order_is_the_seeds_and_no_others():
    def order(*seeds):
        torch.manual_seed(len(orders))
        return tuple(torch.cat(deal(torch.ones(20) > 0, 4, seeds)).tolist())

    orders = {}
    for seeds in ((0, 0), (0, 1), (1, 0), (3, 7)):
        orders[seeds] = order(*seeds)
        assert order(*seeds) == orders[seeds]
    assert len(set(orders.values())) == 4


def test_one_part_is_in_order_and_the_dead_are_masked(make_batch):
    batch = make_batch()
    some_B = torch.tensor([True, False, True, True, False])
    for alive_B, num_parts in ((torch.ones(5) > 0, 1), (some_B, 1), (torch.arange(5) == 2, 4)):
        (columns_N,) = deal(alive_B, num_parts, SEEDS)
        assert columns_N.tolist() == alive_B.nonzero().flatten().tolist()
        living = batch.living(alive_B)
        assert torch.equal(living.mask_BT, batch.mask_BT & alive_B.unsqueeze(-1))
        assert living.rewards_BT is batch.rewards_BT
    assert [len(part) for part in deal(torch.zeros(5) > 0, 4, SEEDS)] == [0]


@pytest.mark.parametrize(
    "bad", [[], [0], [63], [5, 40], [20, 21, 22, 23], list(range(64))], ids=str
)
def test_the_bad_ones_are_found_in_few_tries(bad):
    tried = []

    def is_good(columns_N):
        tried.append(columns_N)
        return not set(columns_N.tolist()) & set(bad)

    found = sorted(find_culprits(torch.arange(64), is_good).tolist())
    assert len(tried) <= MAX_TRIES
    assert set(bad) <= set(found)
    assert len(found) <= max(len(bad), 1) * 2
    if len(bad) <= 2:
        assert found == bad


def test_what_is_not_decided_counts_as_found():
    bad = set(range(0, 4096, 2))
    found = find_culprits(torch.arange(4096), lambda columns: not bad & set(columns.tolist()))
    assert bad <= set(found.tolist())


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
