"""Ranks on two hosts and actors on a third, which are namespaces of this one: all goes by wire."""

import json
import os
import shutil
import signal
import subprocess
import time

import pytest

from impala_async.config.ranks import Place
from tests.e2e.harness import Site, given, identities_hold, wait_until
from tests.engines.hosts import hosts


def has_namespaces():
    if not shutil.which("ip"):
        return False
    tried = ["ip", "netns", "exec", "impala-none", "true"]
    said = subprocess.run(tried, capture_output=True, text=True, check=False).stderr
    made = subprocess.run(["unshare", "-nm", "true"], capture_output=True, check=False)
    return "No such file" in said and made.returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_namespaces(), reason="needs root, and network namespaces"),
]

SETTINGS = (
    *("env.id=CartPole-v1", "algorithm.num_minibatches=2", "learner.report_every_s=0.2"),
    *("bind.data=tcp://0.0.0.0:*", "bind.weights=tcp://0.0.0.0:*", "learner.lease_s=2"),
    *("trajectory.rows=20", "learner.batch_columns=16", "actor.num_envs=8"),
)


def test_ranks_and_actors_on_three_hosts_of_which_one_is_cut_off_and_one_is_late(tmp_path):
    with hosts(3, tmp_path / "hosts") as (first, second, third):
        run = tmp_path / "run"
        site = Site(tmp_path)
        site.run_dir = run
        meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.name}:29500")
        learner = ("-m", "impala_async.learner", "--run-dir", str(run), *given(SETTINGS))
        torchrun = ("torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meet)
        torchruns = [host.open(*torchrun, *learner) for host in (first, second)]
        watchers = [third.open("impala_async.actors", "--learner", str(run), "--num", "2")]
        site.wait_report("both ranks train", is_training(1, 1), within_s=60)
        service = json.loads((run / "service.json").read_text())
        assert service["data_url"].startswith(f"tcp://{first.address}:")
        assert service["is_encrypted"]
        # Weights of every version come that way: nobody has found a path on a disk that all have.
        received = third.received()
        time.sleep(2)
        assert third.received() - received > 20_000

        third.cut()
        site.wait_report("leases are over", lambda report: report["num_actors"] == 0, within_s=30)
        third.cut(is_cut=False)
        healed = time.monotonic()
        site.wait_report("they are back", is_training(1, 1), within_s=60)
        assert time.monotonic() - healed < 20
        # Those of a host that comes late are sent on as well.
        key = {"IMPALA_ASYNC_KEY": (run / "key").read_text()}
        where = ("--learner", service["data_url"])
        late = second.open("impala_async.actors", *where, "--num", "2", **key)
        watchers.append(late)
        site.wait_report("a late host", is_training(2, 2), within_s=60)

        told = json.loads((Place(1, 2).folder(run) / "service.json").read_text())
        os.kill(told["pid"], signal.SIGTERM)
        assert [process.wait(20) for process, _ in torchruns] == [0, 0]
        for process, _ in watchers:
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        for number in range(2):
            site.run_dir = Place(number, 2).folder(run)
            site._reports, site._num_read = [], 0
            assert all(identities_hold(report) for report in site.reports())
        for _, log in (*torchruns, *watchers):
            assert "impala_async/" not in log.read_text().partition("Traceback")[2]
        wait_until("the folder is told of no learner", lambda: not (run / "service.json").exists())


def is_training(*num_actors):
    """Whether each rank has so many actors, and updates have been made since."""
    since = []

    def holds(report):
        if report["ranks/num_actors"] != list(num_actors):
            since.clear()
            return False
        since.append(report["updates"])
        return since[-1] > since[0]

    return holds
