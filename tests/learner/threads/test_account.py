"""One batch with the learner: which columns live, and what passes they had."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.learner.loop.ledger import Settlement
from impala_async.learner.threads.account import BatchAccount


def which(*columns: int, of: int = 4) -> np.ndarray:
    mask = np.zeros(of, np.bool_)
    mask[list(columns)] = True
    return mask


def test_a_batch_with_all_its_passes_is_trained() -> None:
    account = BatchAccount(7, np.ones(4, np.bool_))
    for _ in range(3):
        account.use()
    assert account.settle(3) == Settlement(7, trained=4, passes_done=12)


def test_the_first_fill_of_a_ring_may_have_fewer_passes() -> None:
    account = BatchAccount(1, np.ones(4, np.bool_))
    account.use()
    assert account.settle(3) == Settlement(1, trained=4, passes_done=4, passes_init_short=8)


def test_what_is_dropped_keeps_its_passes_as_partial() -> None:
    account = BatchAccount(1, np.ones(4, np.bool_))
    account.drop(which(0), "stale")
    account.use()
    account.drop(which(0, 1), "stale")
    account.use()
    account.drop(which(2), "nonfinite_update")
    account.use()
    assert account.alive_B.tolist() == [False, False, False, True]
    assert account.settle(3) == Settlement(
        1,
        trained=1,
        dropped={"stale": 2, "nonfinite_update": 1},
        passes_done=6,
        passes_partial={"stale": 1, "nonfinite_update": 2},
    )


def test_a_place_that_was_never_filled_is_in_no_account() -> None:
    account = BatchAccount(1, which(0, 2))
    account.use()
    account.drop(which(0, 1), "nonfinite_update")
    assert account.settle(1) == Settlement(
        1,
        trained=1,
        dropped={"nonfinite_update": 1},
        passes_done=2,
        passes_partial={"nonfinite_update": 1},
    )


def test_what_a_slot_is_filled_with_later_does_not_change_the_account() -> None:
    filled_B = which(0, 2)
    account = BatchAccount(1, filled_B)
    filled_B.fill(True)
    assert account.alive_B.tolist() == [True, False, True, False]


def test_a_column_is_dropped_once() -> None:
    account = BatchAccount(1, np.ones(4, np.bool_))
    account.drop(which(1, 2), "stale")
    account.drop(which(1, 2), "shutdown")
    account.drop(np.zeros(4, np.bool_), "shutdown")
    settlement = account.settle(1)
    assert settlement.dropped == {"stale": 2}
    assert settlement.num_columns == 4


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.lists(st.booleans(), min_size=3, max_size=3), st.booleans()), max_size=4),
)
def test_passes_add_up(num_passes: int, story: list[tuple[list[bool], bool]]) -> None:
    account = BatchAccount(1, np.ones(3, np.bool_))
    for mask, is_stale in story[:num_passes]:
        account.drop(np.array(mask), "stale" if is_stale else "shutdown")
        account.use()
    had = account.settle(num_passes)
    assert had.num_columns == 3
    partial = sum(had.passes_partial.values())
    assert had.passes_done + had.passes_init_short == num_passes * had.trained + partial
