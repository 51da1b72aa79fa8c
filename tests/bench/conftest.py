"""Benchmarks start Python again and again: where a test needs no interpreter, it is forked."""

import subprocess

import pytest

from tests.e2e.zygote import Forked, zygote


@pytest.fixture(scope="session")
def fork_children():
    """Lets the children of this process be forked until a patch is undone."""

    def fork(patch):
        # Now, since a benchmark may end all that begins within its block.
        zygote()
        patch.setattr(subprocess, "Popen", Forked)

    return fork


@pytest.fixture
def forks(fork_children, monkeypatch):
    fork_children(monkeypatch)
