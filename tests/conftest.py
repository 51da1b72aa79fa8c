"""Fixtures and limits for all tests, which share the cores with other processes."""

import os
import subprocess

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# Before anything imports torch: its pool of threads spins while it waits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A key of somebody who develops would be that of every run.
os.environ.pop("IMPALA_ASYNC_KEY", None)
# How long an example takes says nothing.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.fixture(scope="session")
def fork_children():
    """Lets the children of this process be forked, until a patch is undone."""
    from tests.e2e.zygote import Forked, zygote

    def fork(patch):
        # Now, since whoever is tested may end all that begins within a block.
        zygote()
        patch.setattr(subprocess, "Popen", Forked)

    return fork


@pytest.fixture
def forks(fork_children, monkeypatch):
    """A Python that the test starts is forked: see tests/e2e/zygote.py."""
    fork_children(monkeypatch)


@pytest.fixture
def fake_run(monkeypatch, tmp_path):
    """The train door starts no process, and writes to a folder of this test."""
    from impala_async import train
    from tests.fake_run import FakeRun

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FakeRun, "made", [], raising=False)
    monkeypatch.setattr(train, "LocalRun", FakeRun)


class FilesAndProcesses(LoadScopeScheduling):
    """A file goes to one worker as a whole. So does `tests/e2e`: its many processes have time
    limits, and do not run beside one another."""

    def _split_scope(self, nodeid):
        return "tests/e2e" if nodeid.startswith("tests/e2e/") else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") != "loadfile":
        return None
    # In the order in which they are collected, and not by their number of tests.
    config.option.loadscopereorder = False
    return FilesAndProcesses(config, log)


def pytest_collection_modifyitems(items):
    """The longest piece of work begins first, so that a worker does not end with it alone."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/e2e/"))
