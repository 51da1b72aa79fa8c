"""How much of its host a process may have: cores and memory, of which a container's are fewer.

A container sees its own control group as the root's. Any group around it may have a limit besides.
Both versions of control groups are read, as hosts have one or the other.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def count_cores() -> int:
    """How many cores this process may use: those of its affinity, but no more than its quota has
    whole ones, and at least one."""
    found = [len(os.sched_getaffinity(0))]
    for group in _groups("cpu"):
        quotas = _numbers(group / "cpu.max") or [
            *_numbers(group / "cpu.cfs_quota_us"),
            *_numbers(group / "cpu.cfs_period_us"),
        ]
        # Without a quota it is "max", or -1.
        if len(quotas) == 2 and quotas[0] > 0 and quotas[1] > 0:
            found.append(quotas[0] // quotas[1])
    return max(1, min(found))


class Memory(NamedTuple):
    """In bytes: all that this process may have, and so much of it as is free."""

    total: int
    free: int


def find_memory() -> Memory:
    """The host's, or less where a control group has a limit. A group that reaches it is killed."""
    host = psutil.virtual_memory()
    total, free = host.total, host.available
    for group in _groups("memory"):
        for limit_file, used_file, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, used = _numbers(group / limit_file), _numbers(group / used_file)
            if limit and used:
                # Pages of files are given back before anything is killed.
                cached = sum(_file_pages(group / "memory.stat", prefix))
                total, free = min(total, *limit), min(free, limit[0] - used[0] + cached)
    return Memory(total, max(0, free))


def _groups(controller: str) -> Iterator[Path]:
    """The control groups around this process whose limits of something count."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines or ["0::/"]:
        _, controllers, own = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = CGROUPS / (controller if controllers else ".")
            for group in (PurePosixPath(own), *PurePosixPath(own).parents):
                yield root / str(group).lstrip("/")


def _numbers(path: Path) -> list[int]:
    """Those of a file; none where there is no such file, or it says "max"."""
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []


def _file_pages(path: Path, prefix: str) -> Iterator[int]:
    """Those that hold what is in files too."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, number = line.partition(" ")
        if name in {f"{prefix}active_file", f"{prefix}inactive_file"}:
            yield int(number)
