"""Runs from a program, by real processes: trained, interrupted, and left by a caller that dies."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest

import impala_async
from impala_async.errors import ConfigError
from tests.e2e.harness import is_alive, wait_until

pytestmark = pytest.mark.e2e

QUICK = {"env.id": "CartPole-v1", "actor.sampler": "serial", "learner.report_every_s": 0.2}
ENDLESS = {**QUICK, "stop.env_steps": 10**9}


def test_a_run_trains_and_leaves_all_that_its_policy_needs(tmp_path, forks):
    run = impala_async.run(overrides={**QUICK, "stop.env_steps": 20_000}, run_dir=tmp_path / "run")
    assert run.summary["exit_reason"] == "env_steps"
    trained = run.metrics["env_steps_trained"]
    assert trained[-1] >= 20_000
    assert (np.diff(trained) >= 0).all()
    policy = impala_async.load_policy(run.folder)
    assert policy.act(np.zeros((5, 4), np.float32)).action.shape == (5,)


def test_a_fault_of_the_environment_is_raised_with_its_line(tmp_path, forks):
    with pytest.raises(ConfigError, match=r"bench\.probes:Failing failed to be made"):
        impala_async.run(
            overrides={"env.id": "bench.probes:Failing", "env.kwargs": {"no_such": 1}},
            run_dir=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_an_interrupt_saves_ends_and_is_raised(tmp_path, forks):
    def press():
        metrics = tmp_path / "run/metrics.jsonl"
        wait_until("reports", lambda: metrics.exists() and metrics.read_text().count("\n") > 3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        impala_async.run(overrides=ENDLESS, run_dir=tmp_path / "run")
    thread.join()
    run = impala_async.Run(tmp_path / "run")
    assert run.summary["exit_reason"] == "interrupted"
    assert impala_async.load_policy(run.folder).checkpoint.exists()
    assert not [p for p in psutil.Process().children(recursive=True) if "train" in p.cmdline()]


CALLER = """
import sys
import impala_async
impala_async.run(overrides={overrides!r}, run_dir=sys.argv[1])
"""


def test_its_processes_end_with_a_caller_that_is_killed(tmp_path):
    code = CALLER.format(overrides=ENDLESS)
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as caller:
        try:
            service = tmp_path / "run/service.json"
            wait_until("the learner serves", service.exists, within_s=40.0)
            family = psutil.Process(caller.pid).children(recursive=True)
        finally:
            caller.kill()
    assert len(family) >= 3
    wait_until("all have ended", lambda: not any(map(is_alive, family)), within_s=5.0)
