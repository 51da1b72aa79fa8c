"""What holds for all tests, which share the cores with other processes."""

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# Before anything imports torch: its pool of threads spins while it waits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# How long an example takes says nothing.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


class FilesAndProcesses(LoadScopeScheduling):
    """A file goes to one worker as a whole. So does `tests/e2e`: its many processes have time
    limits, and do not run beside one another."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/e2e" if nodeid.startswith("tests/e2e/") else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesAndProcesses | None:
    return FilesAndProcesses(config, log) if config.getvalue("dist") == "loadfile" else None
