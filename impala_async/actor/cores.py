"""How many cores this process may use: those of its affinity, and no more than its quota.

Runs on: sampler thread
"""

import os
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def count_cores() -> int:
    """At least one. A container's quota counts in whole cores."""
    return max(1, min(len(os.sched_getaffinity(0)), *_quotas()))


def _quotas() -> list[int]:
    """Of this control group and those around it; containers see their own as the root."""
    try:
        (own,) = [
            line[3:] for line in OWN_CGROUP.read_text().splitlines() if line.startswith("0::")
        ]
    except (OSError, ValueError):
        own = "/"
    found = [os.cpu_count() or 1]
    for group in (PurePosixPath(own), *PurePosixPath(own).parents):
        try:
            quota, period = (CGROUPS / str(group).lstrip("/") / "cpu.max").read_text().split()
            found.append(int(quota) // int(period))
        except (OSError, ValueError):
            continue  # there is no such file, or it says "max"
    return found
