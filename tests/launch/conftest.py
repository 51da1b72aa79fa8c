"""Everything is quick, and in a folder of its own."""

from pathlib import Path

import pytest

from impala_async import processes
from impala_async.launch import actors, children, local


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(local, "POLL_S", 0.005)
    monkeypatch.setattr(children, "POLL_S", 0.005)
    monkeypatch.setattr(children, "ASKED_END_S", 2.0)
    monkeypatch.setattr(actors, "RESTART_AFTER_S", 0.02)
    monkeypatch.setattr(local, "GOODBYE_S", 0.1)
    monkeypatch.setattr(processes, "ECHO_S", 0.0)
    Path("events").touch()
