"""Living columns are dealt into nearly equal parts, in an order that hangs on the seeds alone."""

import pytest
import torch

from impala_async.training.parts import living_mask, parts_of, split_columns, whole

SEEDS = (0, 0)


@pytest.mark.parametrize(("num_parts", "sizes"), [(2, [4, 3]), (3, [3, 2, 2]), (7, [1] * 7)])
def test_every_living_column_is_in_one_part(num_parts, sizes):
    alive_B = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1, 1]).bool()
    parts = split_columns(alive_B, num_parts, SEEDS)
    assert [len(part) for part in parts] == sizes
    assert sorted(torch.cat(parts).tolist()) == [0, 1, 3, 4, 6, 7, 8]


def test_no_part_is_empty_but_of_no_columns():
    assert [len(part) for part in split_columns(torch.ones(2) > 0, 5, SEEDS)] == [1, 1]
    for alive_B in (torch.zeros(3) > 0, torch.tensor([False, True, False])):
        (part,) = split_columns(alive_B, 5, SEEDS)
        assert part.tolist() == alive_B.nonzero().flatten().tolist()


def test_a_single_part_keeps_its_order():
    (part,) = split_columns(torch.ones(9) > 0, 1, SEEDS)
    assert part.tolist() == list(range(9))


def test_the_order_is_the_seeds_and_no_others():
    def order(*seeds):
        torch.manual_seed(len(orders))
        return tuple(torch.cat(split_columns(torch.ones(20) > 0, 4, seeds)).tolist())

    orders = {}
    for seeds in ((0, 0), (0, 1), (1, 0), (3, 7)):
        orders[seeds] = order(*seeds)
        assert order(*seeds) == orders[seeds]
    assert len(set(orders.values())) == 4


def test_what_does_not_live_is_masked(make_batch):
    batch = make_batch()
    alive_B = torch.tensor([True, False, True, True, False])
    part = whole(batch, alive_B)
    assert part.batch is batch
    assert torch.equal(part.is_in_B, alive_B)
    assert torch.equal(part.mask_BT, batch.mask_BT & alive_B.unsqueeze(-1))
    everybody = torch.ones_like(alive_B)
    assert torch.equal(living_mask(batch, everybody), batch.mask_BT)


def test_parts_hold_each_living_column_once(make_batch):
    batch = make_batch()
    alive_B = torch.tensor([True, False, True, True, True])
    parts = list(parts_of(batch, alive_B, 3, SEEDS))
    assert len(parts) == 3
    assert torch.equal(torch.stack([part.is_in_B for part in parts]).sum(0), alive_B.int())
    rewards = torch.cat([part.batch.rewards_BT for part in parts])
    assert sorted(rewards[:, 0].tolist()) == sorted(batch.rewards_BT[alive_B][:, 0].tolist())


def test_one_part_is_the_batch_itself(make_batch):
    batch = make_batch()
    for alive_B in (torch.ones(5, dtype=torch.bool), torch.arange(5) == 2):
        (part,) = parts_of(batch, alive_B, 1 if alive_B.all() else 4, SEEDS)
        assert part.batch is batch
