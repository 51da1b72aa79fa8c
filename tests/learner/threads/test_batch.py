"""One batch with the learner: which columns live, and what passes they had."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.learner.loop.ledger import Settlement
from impala_async.learner.threads.batch import LoadedBatch


def which(*columns: int, of: int = 4) -> np.ndarray:
    mask = np.zeros(of, np.bool_)
    mask[list(columns)] = True
    return mask


def batch_of(number: int, filled_B: np.ndarray) -> LoadedBatch:
    tensors: Any = None
    counts_B = np.zeros(len(filled_B), np.int64)
    return LoadedBatch(
        0, tensors, batch=number, filled_B=filled_B, updates_B=counts_B, valid_rows_B=counts_B
    )


def test_a_batch_with_all_its_passes_is_trained() -> None:
    loaded = batch_of(7, np.ones(4, np.bool_))
    for _ in range(3):
        loaded.use()
    assert loaded.settle(3, slot=2) == Settlement(7, trained=4, passes_done=12, slot=2)


def test_the_first_fill_of_a_ring_may_have_fewer_passes() -> None:
    loaded = batch_of(1, np.ones(4, np.bool_))
    loaded.use()
    assert loaded.settle(3) == Settlement(1, trained=4, passes_done=4, passes_init_short=8)


def test_what_is_dropped_keeps_its_passes_as_partial() -> None:
    loaded = batch_of(1, np.ones(4, np.bool_))
    loaded.drop(which(0), "stale")
    loaded.use()
    loaded.drop(which(0, 1), "stale")
    loaded.use()
    loaded.drop(which(2), "nonfinite_update")
    loaded.use()
    assert loaded.alive_B.tolist() == [False, False, False, True]
    assert loaded.settle(3) == Settlement(
        1,
        trained=1,
        dropped={"stale": 2, "nonfinite_update": 1},
        passes_done=6,
        passes_partial={"stale": 1, "nonfinite_update": 2},
    )


def test_a_place_that_was_never_filled_is_not_counted() -> None:
    loaded = batch_of(1, which(0, 2))
    loaded.use()
    loaded.drop(which(0, 1), "nonfinite_update")
    assert loaded.settle(1) == Settlement(
        1,
        trained=1,
        dropped={"nonfinite_update": 1},
        passes_done=2,
        passes_partial={"nonfinite_update": 1},
    )


def test_what_a_slot_is_filled_with_later_does_not_change_the_batch() -> None:
    filled_B = which(0, 2)
    loaded = batch_of(1, filled_B)
    filled_B.fill(True)
    assert loaded.alive_B.tolist() == [True, False, True, False]


def test_a_column_is_dropped_once() -> None:
    loaded = batch_of(1, np.ones(4, np.bool_))
    loaded.drop(which(1, 2), "stale")
    loaded.drop(which(1, 2), "shutdown")
    loaded.drop(np.zeros(4, np.bool_), "shutdown")
    settlement = loaded.settle(1)
    assert settlement.dropped == {"stale": 2}
    assert settlement.num_columns == 4


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.lists(st.booleans(), min_size=3, max_size=3), st.booleans()), max_size=4),
)
def test_passes_add_up(num_passes: int, story: list[tuple[list[bool], bool]]) -> None:
    loaded = batch_of(1, np.ones(3, np.bool_))
    for mask, is_stale in story[:num_passes]:
        loaded.drop(np.array(mask), "stale" if is_stale else "shutdown")
        loaded.use()
    had = loaded.settle(num_passes)
    assert had.num_columns == 3
    partial = sum(had.passes_partial.values())
    assert had.passes_done + had.passes_init_short == num_passes * had.trained + partial
