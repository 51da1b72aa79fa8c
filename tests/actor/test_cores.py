import os
from pathlib import Path

import pytest

from impala_async.actor import cores
from impala_async.actor.cores import count_cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight cores, and control groups without a word about them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    monkeypatch.setattr(cores, "OWN_CGROUP", tmp_path / "own")
    (tmp_path / "own").write_text("0::/outer/inner\n")
    (tmp_path / "outer/inner").mkdir(parents=True)
    return tmp_path


def test_those_of_the_affinity(machine: Path) -> None:
    assert count_cores() == 8
    (machine / "own").unlink()
    assert count_cores() == 8


@pytest.mark.parametrize("group", [".", "outer", "outer/inner"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8), ("", 8)],
)
def test_no_more_than_the_quota_of_any_group_around_it(
    machine: Path, group: str, text: str, expected: int
) -> None:
    (machine / group / "cpu.max").write_text(text + "\n")
    assert count_cores() == expected


def test_this_machine_has_some() -> None:
    assert 1 <= count_cores() <= (os.cpu_count() or 1)
