"""Living columns, or their rows, are dealt into nearly equal parts."""

import pytest
import torch

from impala_async.training.parts import MAX_TRIES, deal, find_culprits, make_parts
from impala_async.training.ranks import Ranks

SEEDS = (0, 0)
SOME_B = torch.tensor([True, False, True, True, False])


def test_parts_of_rows_hold_each_row_of_a_living_column_once(make_batch):
    batch = make_batch()
    # Each row is known by its target.
    known = {name: torch.arange(30.0).view(5, 6) for name in ("targets_BT", "advantages_BT")}
    source = batch.in_one_column(known)
    parts = list(make_parts(source, SOME_B, 4, SEEDS, Ranks(), per_column=6))
    assert [len(part.numbers_N) for part in parts] == [5, 5, 4, 4]
    seen = [part.batch().known["targets_BT"][0] for part in parts]
    wanted = [*range(6), *range(12, 24)]
    assert sorted(torch.cat(seen).tolist()) == wanted
    assert torch.cat(seen).tolist() != wanted
    for part, numbers_N in zip(parts, seen, strict=True):
        assert part.numbers_N.tolist() == numbers_N.tolist()
        assert part.columns.tolist() == sorted({number // 6 for number in numbers_N.tolist()})
        rest = part.without(torch.tensor([2]), Ranks())
        assert rest.numbers_N.tolist() == [n for n in numbers_N.tolist() if n // 6 != 2]
        assert rest.batch().mask_BT.shape == (1, len(rest.numbers_N))
    nothing = parts[0].without(torch.arange(5), Ranks()).batch()
    assert nothing.mask_BT.tolist() == [[False]]
    assert nothing.known["advantages_BT"].tolist() == [[0]]


def test_one_part_of_columns_is_the_batch_itself(make_batch):
    batch = make_batch()
    (part,) = make_parts(batch, SOME_B, 1, SEEDS, Ranks())
    assert part.batch() is batch
    rest = part.without(torch.tensor([2]), Ranks())
    assert torch.equal(rest.batch().rewards_BT, batch.rewards_BT[[0, 3]])


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
    for alive_B, num_parts in ((torch.ones(5) > 0, 1), (SOME_B, 1), (torch.arange(5) == 2, 4)):
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
