"""Counters: fixed names, never falling, the same after a restart."""

import pytest

from impala_async.metrics.counter import Counters


def test_counts_by_reason_with_zeros_shown() -> None:
    rejected = Counters(["stale", "duplicate", "invalid"], prefix="rejected/")
    rejected.add("stale")
    rejected.add("duplicate", 3)
    rejected.add("duplicate", 0)
    assert rejected.snapshot() == {
        "rejected/stale": 1,
        "rejected/duplicate": 3,
        "rejected/invalid": 0,
    }
    assert rejected["duplicate"] == 3
    assert rejected.total == 4


def test_snapshot_is_frozen() -> None:
    counters = Counters(["a"])
    before = counters.snapshot()
    counters.add("a")
    assert before == {"a": 0}
    before["a"] = 7
    assert counters["a"] == 1


def test_restore_goes_on_with_the_same_numbers() -> None:
    old = Counters(["a", "b"], prefix="x/")
    old.add("a", 5)
    new = Counters(["a", "b"], prefix="x/")
    new.add("b", 2)
    new.restore(old.snapshot())
    new.add("a")
    assert new.snapshot() == {"x/a": 6, "x/b": 0}


def test_restore_from_another_version() -> None:
    counters = Counters(["kept", "added"])
    counters.restore({"kept": 4, "removed": 9})
    assert counters.snapshot() == {"kept": 4, "added": 0}


def test_unknown_name_is_a_bug() -> None:
    counters = Counters(["a"])
    with pytest.raises(KeyError):
        counters.add("b")
    with pytest.raises(KeyError):
        counters["b"]
    assert counters.snapshot() == {"a": 0}


def test_falling_is_a_bug() -> None:
    counters = Counters(["a"])
    with pytest.raises(AssertionError):
        counters.add("a", -1)
    assert counters["a"] == 0


def test_same_name_twice_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        Counters(["a", "b", "a"])
