"""A figure is of a commit, and of the cores that it was measured on."""

import os
import subprocess

from bench.machine import about_this_machine, commit_of


def test_code_that_differs_from_its_commit_is_told(tmp_path):
    def git(*flags):
        subprocess.run(["git", "-C", str(tmp_path), *flags], check=True, capture_output=True)

    def said():
        commit_of.cache_clear()
        return commit_of(tmp_path)

    assert said() == "unknown"
    git("init", "-q")
    (tmp_path / "bench/results").mkdir(parents=True)
    for name in ("code.py", "bench/results/page.json", "README.md"):
        (tmp_path / name).write_text("1")
    git("add", "-A")
    git("-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "first")
    commit = said()
    assert len(commit) >= 7
    (tmp_path / "bench/results/page.json").write_text("2")
    (tmp_path / "README.md").write_text("2")
    assert said() == commit
    (tmp_path / "code.py").write_text("2")
    # As it was when somebody asked first.
    assert commit_of(tmp_path) == commit
    assert said() == f"{commit}-dirty"
    (tmp_path / "code.py").write_text("1")
    assert said() == commit
    (tmp_path / "more.py").touch()
    assert said() == f"{commit}-dirty"


def test_cores_are_those_that_this_process_may_use():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert about_this_machine()["cores"] == 1
    finally:
        os.sched_setaffinity(0, allowed)
