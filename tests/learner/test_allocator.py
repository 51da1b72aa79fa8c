"""Freed memory stays: what is allocated again is not paid for in page faults again."""

import platform
import subprocess
import sys

import pytest

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


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from impala_async.learner import allocator

    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    allocator.keep_freed_memory()
