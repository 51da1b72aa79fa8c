"""Memory of two processes: the same parts on both sides, and gone with both."""

import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from impala_async.errors import ConfigError
from impala_async.learner.shared_memory import SharedMemory

OTHER_SIDE = """
import sys
from impala_async.learner.shared_memory import SharedMemory
memory = SharedMemory(int(sys.argv[1]))
first, second = memory.allocate(10), memory.allocate(5000)
assert first.tolist() == [7] * 10, first
second[-1] = 9
"""


def test_both_sides_have_the_same_parts() -> None:
    memory = SharedMemory.new()
    first, second = memory.allocate(10), memory.allocate(5000)
    first[:] = 7
    subprocess.run(
        [sys.executable, "-c", OTHER_SIDE, str(memory.fd)], pass_fds=[memory.fd], check=True
    )
    assert second[-1] == 9
    assert not second[:-1].any()
    memory.close()
    assert first.tolist() == [7] * 10


def test_a_part_is_all_zeros_and_as_long_as_was_asked_for() -> None:
    memory = SharedMemory.new()
    for num_bytes in (0, 1, 4096, 4097):
        part = memory.allocate(num_bytes)
        assert (part.dtype, part.shape) == (np.uint8, (num_bytes,))
        assert not part.any()
        part[:] = 255
    memory.close()


def test_closing_gives_the_descriptor_back() -> None:
    memory = SharedMemory.new()
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory.fd)


def test_memory_that_the_system_does_not_give_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(fd: int, size: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    memory = SharedMemory.new()
    monkeypatch.setattr(os, "ftruncate", too_large)
    with pytest.raises(ConfigError, match=r"4,096 bytes of shared memory: File too large: raise"):
        memory.allocate(10)
    memory.close()
