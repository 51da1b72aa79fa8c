"""When ingest has a process of its own, and that it ends."""

import os

import psutil
import pytest

from impala_async.errors import ConfigError
from impala_async.learner.ingest_process import start_ingest
from tests.learner.columns import small_schema
from tests.learner.world import config_of


def started(process: str | None = None, *, is_recording: bool = False, **sections: object) -> bool:
    """Whether there is one; it ends at once."""
    if process is not None:
        sections["ingest"] = {"process": process}
    ingest = start_ingest(config_of(small_schema(), **sections), is_recording=is_recording)
    if ingest is None:
        return False
    (child,) = psutil.Process().children()
    assert ingest.end() == ingest.end() == 0
    assert not child.is_running()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ingest.memory.fd)
    return True


def test_settings_say_whether_there_is_one() -> None:
    assert started("child")
    assert not started("inline")
    assert not started("inline", is_recording=True)


def test_by_itself_it_is_apart_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started() == (len(os.sched_getaffinity(0)) >= 2)
    assert not started(is_recording=True)
    assert not started(pace={"mode": "lockstep"}, learner={"batch_columns": 2})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert not started()


def test_a_child_does_not_record() -> None:
    with pytest.raises(ConfigError, match=r"ingest\.process: .*record"):
        started("child", is_recording=True)


def test_a_child_does_not_go_with_lockstep() -> None:
    with pytest.raises(ValueError, match=r"ingest\.process child"):
        started("child", pace={"mode": "lockstep"}, learner={"batch_columns": 2})
