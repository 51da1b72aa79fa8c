"""A figure must be read with these: when, of which commit, and on what it was measured."""

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any


def about_this_machine() -> dict[str, Any]:
    import torch

    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit_of(Path.cwd()),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "torch": torch.__version__,
    }


def commit_of(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return commit or "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
