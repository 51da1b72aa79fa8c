"""Living columns are dealt into nearly equal parts, in an order that hangs on the seeds alone."""

import pytest
import torch

from impala_async.training.parts import split_columns

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
