"""A figure must be read with these: when, of which commit, and on what it was measured."""

import functools
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any


def about_this_machine() -> dict[str, Any]:
    import torch

    from impala_async.models.torso import pick_precision

    images = pick_precision("auto", "nature_cnn", torch.device("cpu"))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit_of(Path.cwd()),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "images": str(images).removeprefix("torch."),
        "torch": torch.__version__,
    }


@functools.cache
def commit_of(checkout: Path) -> str:
    """As it is when somebody asks first. Where code differs from it, that is said."""
    git = ["git", "-C", str(checkout)]
    head = [*git, "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
    if not commit:
        return "unknown"
    # Pages are written while others are measured.
    changed = [*git, "status", "--porcelain", "--", ".", ":!bench/results", ":!*.md"]
    found = subprocess.run(changed, capture_output=True, check=False).stdout
    return f"{commit}{'-dirty' if found else ''}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
