"""The parts of a batch that are learned from, one update each.

A part has whole columns: a recurrent state runs along a column, and returns run back along it. Or
it has rows, in any order, where there is no such state and returns are known. All ranks deal alike
what all of them have, and each takes its own share of a part.

    B columns of a batch, T action rows, N columns or rows of a part
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from impala_async.training.batch import Batch
from impala_async.training.ranks import Ranks

# Tries to find the columns at fault, each a forward and a backward pass. The undecided are found.
MAX_TRIES = 32


@dataclass(frozen=True)
class Part:
    """One update learns from it; where there are ranks, this is the share of one."""

    source: Batch
    """The batch; or all its rows in one column, whose returns are known, to take rows from."""
    numbers_N: Tensor
    """They are those of columns; or of rows, one column's behind the other's."""
    per_column: int = 1
    """So many numbers a column has."""
    num_valid: int | None = None
    """The valid rows of all ranks; None where there is one, which counts its own."""
    is_whole: bool = False

    @property
    def has_rows(self) -> bool:
        return bool(self.source.known)

    @property
    def columns(self) -> Tensor:
        """The columns that have something in it."""
        found: Tensor = torch.unique(self.numbers_N // self.per_column)
        return found

    def batch(self) -> Batch:
        """As a batch of its own; where there is nothing, a masked row or column has the shapes."""
        numbers_N, source = self.numbers_N, self.source
        if self.is_whole:
            return source
        if not len(numbers_N):
            numbers_N = numbers_N.new_zeros(1)
            # A masked row has no advantage.
            known = {name: torch.zeros_like(each) for name, each in source.known.items()}
            source = replace(source, mask_BT=torch.zeros_like(source.mask_BT), known=known)
        return source.rows(numbers_N, self.per_column) if self.has_rows else source.take(numbers_N)

    def without(self, columns_N: Tensor, ranks: Ranks) -> "Part":
        """All but these columns, each rank without its own."""
        is_out_N = torch.isin(self.numbers_N // self.per_column, columns_N)
        rest_N, num_valid = self.numbers_N[~is_out_N], None
        if ranks.are_many:
            own = _valid_of(self.source)[rest_N].sum()
            num_valid = int(ranks.totals(float(own))[0])
        return replace(self, numbers_N=rest_N, num_valid=num_valid, is_whole=False)


def make_parts(
    source: Batch,
    alive_B: Tensor,
    max_parts: int,
    seeds: tuple[int, ...],
    ranks: Ranks,
    *,
    per_column: int = 1,
    num_rows: int | None = None,
) -> Iterator[Part]:
    """Deal the columns of a batch that are alive; or the rows of these, masked ones too, where it
    lies in one column. `num_rows`: the valid rows of all ranks, if their number is known."""
    alive_N = alive_B.repeat_interleave(per_column)
    shares: Sequence[tuple[Tensor, int | None]]
    if not ranks.are_many:
        shares = [(numbers_N, None) for numbers_N in deal(alive_N, max_parts, seeds)]
    elif max_parts == 1 and num_rows is not None:
        shares = [(deal(alive_N, 1, seeds)[0], num_rows)]
    else:
        valid_N = _valid_of(source)
        all_N = ranks.join(torch.where(alive_N, valid_N, -1))
        parts = deal(all_N >= 0, max_parts, seeds)
        size = len(alive_N)
        shares = [(ranks.own(each_N, size), int(all_N[each_N].sum())) for each_N in parts]
    for own_N, num_valid in shares:
        has_all = len(own_N) == len(alive_B) or (num_valid is None and len(shares) == 1)
        yield Part(source, own_N, per_column, num_valid, has_all and not source.known)


def deal(alive_N: Tensor, max_parts: int, seeds: tuple[int, ...]) -> list[Tensor]:
    """The numbers of the living, a tensor on the CPU, dealt to so many parts if they suffice: to
    one alone in order, else as the seeds alone decide. Sizes differ by one at most, and no part is
    empty but one alone."""
    numbers_N = alive_N.nonzero().flatten()
    num_parts = min(max_parts, len(numbers_N))
    if num_parts <= 1:
        return [numbers_N]
    order = np.random.default_rng(seeds).permutation(len(numbers_N))
    return list(numbers_N[torch.from_numpy(order)].tensor_split(num_parts))


def find_culprits(columns_N: Tensor, is_good: Callable[[Tensor], bool]) -> Tensor:
    """Those of these columns that are not good, without which the others are, by halving."""
    found = []
    groups, num_tries = deque([columns_N]), 0
    while groups:
        group = groups.popleft()
        num_tries += 1
        if num_tries <= MAX_TRIES and is_good(group):
            continue
        if num_tries >= MAX_TRIES or len(group) == 1:
            found.append(group)
        else:
            groups.extend(group.tensor_split(2))
    return torch.cat(found) if found else columns_N[:0]


def _valid_of(source: Batch) -> Tensor:
    """How many rows are valid, of each column; or of each row."""
    mask_BT = source.mask_BT.cpu()
    return mask_BT[0].long() if source.known else mask_BT.sum(1)
