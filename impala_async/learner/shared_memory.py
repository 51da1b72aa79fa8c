"""Memory that two processes write to: a descriptor that one inherits from the other.

It has no name, so the kernel frees it with the last process that has it, however that ends.
Whoever allocates the same sizes in the same order gets the same memory.

Runs on: event loop
"""

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from impala_async.errors import ConfigError


class SharedMemory:
    """Owns the descriptor, and how much of what is behind it is given out."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._num_bytes = 0

    @staticmethod
    def new() -> "SharedMemory":
        """Memory that nobody has a part of yet."""
        return SharedMemory(os.memfd_create("impala-async-slots"))

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """The next part: zeros, whose pages are there already, unless the other side wrote them."""
        start = self._num_bytes
        self._num_bytes += -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        if os.fstat(self.fd).st_size < self._num_bytes:
            try:
                os.ftruncate(self.fd, self._num_bytes)
            except OSError as error:  # a limit of the shell's (ulimit -f), for example
                raise ConfigError(
                    f"ingest.process: cannot have {self._num_bytes:,} bytes of shared memory: "
                    f"{error.strerror}: raise the limit (ulimit -f), or --set ingest.process=inline"
                ) from None
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        mapped = mmap.mmap(self.fd, self._num_bytes - start, flags, offset=start)
        return np.frombuffer(mapped, np.uint8)[:num_bytes]

    def close(self) -> None:
        """Let go of the descriptor; what is mapped stays."""
        os.close(self.fd)
