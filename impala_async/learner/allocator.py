"""Keeps the C library from giving freed memory back to the kernel between batches.

By its own rules glibc maps a large block anew and unmaps it as soon as it is freed, or shrinks its
heap: then every message and every activation is paid for in page faults. A learner needs the same
blocks again in the next moment.

Runs on: the main thread, once, before there are others
"""

import ctypes

# From malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = (1 << 31) - 1
# More than this an older glibc refuses.
_LARGE = 32 << 20


def keep_freed_memory() -> None:
    """Does nothing where the C library is another one, or will not."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    # Without the first, the second would only end glibc's own adapting, for the worse.
    if mallopt(_MMAP_THRESHOLD, _NEVER) or mallopt(_MMAP_THRESHOLD, _LARGE):
        mallopt(_TRIM_THRESHOLD, _NEVER)
