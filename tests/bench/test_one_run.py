"""A training that a benchmark starts is the real one, is timed from outside, and leaves nothing."""

import os
import subprocess
import sys

import psutil
import pytest

from bench.one_run import CONFIGS, OneRun, one_run, steps_per_s
from bench.processes import PeakMemory, held_by_each
from tests.e2e.harness import is_alive, wait_until

CARTPOLE = CONFIGS / "cartpole.toml"


@pytest.mark.e2e
def test_a_real_run_is_timed_and_weighed(forks):
    num_seen, alone_s, trained_s = 1, 0.0, []
    with one_run(CARTPOLE, ["stop.updates=60", "learner.report_every_s=0.05"]) as run:
        peak = PeakMemory(run.pid)
        for second in run.moments(0.05):
            peak.look()
            report = run.last_report()
            num_seen = max(num_seen, len(held_by_each(run.pid)))
            alone_s = second if num_seen < 2 else alone_s
            if report and report["updates"]:
                trained_s.append(second)
        assert run.summary()["updates"] == run.reports()[-1]["updates"] >= 60
        assert steps_per_s(run.reports()) > 0
        # Not before there was a learner, and not after it was seen.
        assert alone_s < run.first_update_after_s <= trained_s[0] + 0.25
        assert run.first_update_after_s < run.last_report_after_s
        # PyTorch alone, in three processes, is more than that.
        assert 0.2e9 < peak.rss_bytes < 4e9
        assert peak.pss_bytes < peak.rss_bytes


def test_the_processes_of_a_run_are_known_by_their_command_lines():
    wait = [sys.executable, "-c", "print(flush=True); input()"]
    doors = ["-m impala_async.learner", "-m impala_async.actor --learner URL", ""]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = [subprocess.Popen([*wait, *door.split()], **pipes) for door in doors]
    for process in started:
        process.stdout.readline()  # it has begun
    held = held_by_each(os.getpid())
    for process in started:
        process.communicate(b"\n")
    kinds = [held[pid].kind for pid in (os.getpid(), *(process.pid for process in started))]
    assert kinds == ["train", "learner", "actor", "other"]
    assert all(each.rss_bytes > 1e6 and each.descriptors >= 3 for each in held.values())
    assert held_by_each(started[0].pid) == {}


@pytest.mark.e2e
def test_a_run_that_fails_or_does_not_end_says_so_and_leaves_nobody(forks):
    failed = pytest.raises(RuntimeError, match=r"exit code 2: (.|\n)*nonsense")
    with one_run(CARTPOLE, ["stop.nonsense=1"]) as run, failed:
        list(run.moments(0.05))
    with one_run(CARTPOLE, ["stop.updates=none"]) as run:
        process = psutil.Process(run.pid)
        wait_until("its learner and actors", lambda: len(process.children(recursive=True)) >= 3)
        family = [process, *process.children(recursive=True)]
        with pytest.raises(RuntimeError, match="still running after 0 s"):
            list(run.moments(0.05, limit_s=0))
        folder = run._log.parent
    wait_until("all have ended", lambda: not any(map(is_alive, family)))
    assert not folder.exists()


def test_speed_counts_from_a_moment_of_the_training():
    reports = [
        {"learner/wall_s": wall_s, "time_s": time_s, "env_steps_trained": steps}
        for wall_s, time_s, steps in [(None, 1, 0), (0.5, 2, 100), (1.5, 3, 300), (2.5, 4, 600)]
    ]
    assert steps_per_s(reports) == 250
    assert steps_per_s(reports, after_s=1) == 300
    with pytest.raises(RuntimeError, match="1 reports 2 s after"):
        steps_per_s(reports, after_s=2)


def test_the_newest_report_is_found_in_a_long_file(tmp_path):
    run = OneRun.__new__(OneRun)
    run._metrics = tmp_path / "metrics.jsonl"
    assert run.last_report() is None
    run._metrics.write_text("".join(f'{{"n": {n}, "more": "{"x" * 4000}"}}\n' for n in range(40)))
    assert run.last_report()["n"] == 39
    with run._metrics.open("a") as file:
        file.write('{"n": 40, "mo')
    assert run.last_report()["n"] == 39
