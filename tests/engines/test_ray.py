"""Actors on a real cluster of Ray: two nodes, which are this machine under two addresses.

It wants ray (pip install 'impala-async[ray]').
"""

import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import ENDLESS, wait_until
from tests.engines.harness import (
    actors_of,
    free_ports,
    goes_on_after_a_kill,
    launch,
    learns,
    run_flags,
)

pytest.importorskip("ray", reason="pip install 'impala-async[ray]'")
pytestmark = [pytest.mark.e2e, pytest.mark.slow]
START = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
HEAD, SECOND, THIRD = "127.0.0.2", "127.0.0.3", "127.0.0.4"


class Cluster:
    """Nodes with a CPU each, one at each address of this machine; the first is the head."""

    def __init__(self, folder):
        (port,) = free_ports(1)
        self._folder, self._started = folder, {}
        self.address = f"{HEAD}:{port}"
        local = ["--include-dashboard=false", f"--temp-dir={folder}"]
        self.add(HEAD, "--head", f"--port={port}", *local)

    def add(self, node, *flags):
        log = self._folder / f"{node}.log"
        command = [*START, f"--node-ip-address={node}", *(flags or [f"--address={self.address}"])]
        with log.open("wb") as file:
            how = {"stdout": file, "stderr": file, "stdin": subprocess.DEVNULL}
            self._started[node] = subprocess.Popen(command, **how)
        wait_until(f"{node} is there", lambda: "Ray runtime started" in log.read_text(), 60.0)

    def end(self, node):
        """With all that it has started, however deep."""
        process = self._started.pop(node)
        below = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        for each in psutil.wait_procs(below, timeout=10)[1]:
            each.kill()
        process.wait(20)

    def close(self):
        for node in reversed([*self._started]):
            self.end(node)


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes, at which RAY_ADDRESS points."""
    # A token that nobody knows: a cluster runs the code that it is sent.
    for name, value in (("MODE", "token"), ("TOKEN", secrets.token_hex(32))):
        monkeypatch.setenv(f"RAY_AUTH_{name}", value)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # Its sockets have long paths.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray-") as folder:
        opened = Cluster(Path(folder))
        monkeypatch.setenv("RAY_ADDRESS", opened.address)
        try:
            opened.add(SECOND)
            yield opened
        finally:
            opened.close()


@pytest.fixture
def launched(site):
    """Runs the command beside the test."""

    def launch(*settings):
        flags = ["ray", *run_flags(site, *settings), "--actors", "2"]
        return site.open("launch", *flags, is_started=True)

    return launch


def test_one_command_learns_cartpole_on_two_nodes(cluster, launched, site):
    door = launched()
    learns(site)
    assert door.wait_exit(30) == 0, door.log
    for node in (HEAD, SECOND):
        assert f"Ray has placed an actor on {node}\n" in door.log


def is_back(site, what, lose):
    """An actor that is lost like this comes again."""
    site.wait_report("both are at work", lambda r: r["num_actors"] == 2)
    opened = site.reports()[-1]["sessions/opened"]
    lost_at = time.monotonic()
    lose()
    site.wait_report("another is there", lambda r: r["sessions/opened"] > opened, within_s=60.0)
    print(f"an actor was back {time.monotonic() - lost_at:.1f} s after {what}")


def test_actors_that_die_are_back_whatever_took_them(cluster, launched, site):
    door = launched(*ENDLESS, "learner.lease_s=2")
    wait_until("it serves", (site.run_dir / "service.json").exists)
    learner = site.service["data_url"]
    goes_on_after_a_kill(site, learner, num_actors=2)
    wait_until("it is told", lambda: "was killed (SIGKILL)" in door.log)

    def replace():
        cluster.end(SECOND)
        cluster.add(THIRD)

    is_back(site, "the end of its node", replace)
    # The process of Ray that holds one, and with it the process of ours.
    is_back(site, "a kill of Ray's process", lambda: actors_of(learner)[0].parent().kill())
    site.wait_report("both are at work", lambda r: r["num_actors"] == 2)
    door.ends(signal.SIGTERM, 0, within_s=20.0)
    assert site.summary["exit_reason"] == "terminated"
    wait_until("no actor is left", lambda: not actors_of(learner), 5.0)


def test_a_learner_that_dies_is_back_where_it_was(cluster, launched, site):
    door = launched(*ENDLESS, "checkpoint.every_s=1")
    wait_until("it serves", (site.run_dir / "service.json").exists)
    before = site.service
    site.wait_report("training", lambda r: r["num_actors"] == 2 and r["updates"] > 100)
    wait_until("a checkpoint", site.checkpoints)
    psutil.Process(before["pid"]).kill()
    site.wait_report("it is back", lambda r: r["weights/version_epoch"] == 2)
    assert site.service["data_url"] == before["data_url"]
    site.wait_report("all have found it", lambda r: r["num_actors"] == 2)
    assert "starting it again in 5 s" in door.log
    door.ends(signal.SIGINT, 130, within_s=20.0)


def test_actors_that_cannot_run_end_the_run_with_their_reason(cluster, launched, site):
    door = launched("env.id=lost:Lost", "env.probe=actor", "actor.sampler=serial")
    assert door.wait_exit(60) == 78, door.log
    assert re.search(
        r"ERROR actor \d cannot run: it ended with exit code 78 \(.*lost:Lost", door.log
    )
    assert site.summary["exit_reason"] == "actor_failed"


def test_where_no_cluster_answers_a_line_says_so(monkeypatch, site):
    (port,) = free_ports(1)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    said = launch("ray", *run_flags(site), code=75)
    assert said.startswith(f"error: no Ray cluster at RAY_ADDRESS (127.0.0.1:{port}): ")
    assert said.count("\n") == 1
    assert not site.run_dir.exists()
