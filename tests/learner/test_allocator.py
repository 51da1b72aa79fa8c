"""Freed memory stays: what is allocated again is not paid for in page faults again."""

import platform
import subprocess
import sys

import pytest

from impala_async.learner import allocator

NUM_ROUNDS = 20
CHURN = f"""
import resource, sys
import numpy as np
from impala_async.learner.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def churn():
    # A block beside it is freed last, as an activation is: so the heap could shrink each time.
    first, second = np.ones(24 << 20, np.uint8), np.ones(40 << 20, np.uint8)
churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({NUM_ROUNDS}):
    churn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    ran = subprocess.run(
        [sys.executable, "-c", CHURN, how], capture_output=True, text=True, check=True
    )
    return int(ran.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is another one")
def test_what_is_allocated_again_faults_no_more() -> None:
    kept, given_back = page_faults("keep"), page_faults("as it is")
    assert kept < 100 * NUM_ROUNDS
    # Otherwise this test shows nothing.
    assert given_back > 10 * kept


class Library:
    """A C library that refuses thresholds over a limit, and one that knows none."""

    def __init__(self, largest: int) -> None:
        self.set: dict[int, int] = {}

        def mallopt(option: int, value: int) -> int:
            if option == MMAP and value > largest:
                return 0
            self.set[option] = value
            return 1

        if largest >= 0:
            self.mallopt = mallopt


MMAP, TRIM = -3, -1


@pytest.mark.parametrize(
    ("largest", "options"),
    [(1 << 40, {MMAP, TRIM}), (32 << 20, {MMAP, TRIM}), (0, set()), (-1, set())],
    ids=["new", "old", "stubborn", "another"],
)
def test_both_thresholds_or_none(
    largest: int, options: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(largest)
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: library)
    allocator.keep_freed_memory()
    assert library.set.keys() == options
    assert library.set.get(MMAP, 0) <= largest or largest < 0
