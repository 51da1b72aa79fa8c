"""A job on a real cluster of Slurm: a controller and two nodes, which are all this machine.

It wants the commands of Slurm and munge (in Debian: slurmctld, slurmd, slurm-client, munge).
"""

import getpass
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import ENDLESS, given, wait_until
from tests.engines.harness import (
    HERE,
    ends_by,
    free_ports,
    goes_on_after_a_kill,
    launch,
    learns,
    run_flags,
)

ROOT = Path(__file__).parents[2]
RANKS = str(ROOT / "deploy/slurm/ranks.sh")
COMMANDS = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(
        any(
            shutil.which(each, path=f"{os.environ['PATH']}:/usr/sbin") is None for each in COMMANDS
        ),
        reason=f"wants {', '.join(COMMANDS)}",
    ),
]
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1
ReturnToService=2
MpiDefault=none
KillWait=5
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={one} CPUs=2
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={two} CPUs=2
PartitionName=all Nodes=one,two Default=YES State=UP OverSubscribe=FORCE
"""


MUNGE_FILES = ("key-file", "socket", "pid-file", "log-file", "seed-file")


@pytest.fixture
def cluster(tmp_path_factory, monkeypatch):
    """A cluster of two nodes: PATH and SLURM_CONF lead to it, and all ends with the test."""
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    for name in ("state", "one", "two"):
        (folder / name).mkdir()
    controller, one, two = free_ports(3)
    where = {"folder": folder, "host": socket.gethostname(), "user": getpass.getuser()}
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(controller=controller, one=one, two=two, **where))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    monkeypatch.setenv("SLURM_CONF", str(config))
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin")
    munge = [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in MUNGE_FILES]
    commands = {
        "munged": ["munged", "--foreground", "--force", *munge],
        "slurmctld": ["slurmctld", "-D"],
        "one": ["slurmd", "-D", "-N", "one"],
        "two": ["slurmd", "-D", "-N", "two"],
    }
    started = []
    for name, command in commands.items():
        with (folder / f"{name}.log").open("wb") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log))
        if name == "munged":
            wait_until("munge answers", (folder / "munge.socket").exists)
    try:
        wait_until("both nodes are idle", lambda: said("sinfo", "-h", "-o", "%D %t") == "2 idle")
        yield folder
    finally:
        said("scancel", "--user", getpass.getuser())
        wait_until("no job", lambda: not said("squeue", "-h"))
        for process in reversed(started):
            process.terminate()
            process.wait(20)


def said(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()


def state_of(job):
    return re.search(r"JobState=(\w+)", said("scontrol", "show", "job", job))[1]


def submitted(*flags):
    """The number of a job."""
    told = launch("slurm", *flags, "--nodes", "2", "--", "--time", "5:00", "--comment=two words")
    return re.fullmatch(r"Submitted batch job (\d+)", told.splitlines()[0])[1]


def output_of(site, job):
    return (site.run_dir / "slurm" / f"{job}.out").read_text()


def test_one_command_learns_cartpole_on_two_nodes(cluster, site):
    job = submitted(*run_flags(site))
    learns(site)
    wait_until("the job ends", lambda: state_of(job) == "COMPLETED")
    assert "Comment=two words" in said("scontrol", "show", "job", job)
    assert output_of(site, job).count("starting 1 actor for the learner at ") == 2
    # The same script again has nothing to do.
    again = said("sbatch", "--parsable", str(site.run_dir / "slurm/job.sh"))
    wait_until("it ends, too", lambda: state_of(again) == "COMPLETED")
    assert "the run is over: " in output_of(site, again)


def test_a_killed_actor_and_a_killed_learner_are_back_and_an_ended_job_goes_on(cluster, site):
    job = submitted(*run_flags(site, *ENDLESS, "checkpoint.every_s=1"))
    goes_on_after_a_kill(site, str(site.run_dir), num_actors=2)
    assert "was killed (SIGKILL)" in output_of(site, job)
    psutil.Process(site.service["pid"]).kill()
    site.wait_report("it is back", lambda r: r["weights/version_epoch"] == 2)
    site.wait_report("all have found it", lambda r: r["num_actors"] == 2)
    said("scancel", "--signal=HUP", job)
    wait_until("the job ends", lambda: state_of(job) == "COMPLETED")
    assert site.summary["exit_reason"] == "terminated"
    end = site.summary["updates"] + 300
    submitted(*run_flags(site, *ENDLESS, f"stop.updates={end}"))
    ends_by(site, "updates")
    assert (site.run_dir / "epoch").read_text() == "3"


def test_a_job_that_slurm_refuses_is_one_line(cluster, site):
    refused = launch("slurm", *run_flags(site), "--", "--partition=none", code=2)
    assert refused == (
        f"error: sbatch refused {site.run_dir}/slurm/job.sh: Batch job submission failed: Invalid "
        "partition name specified\n"
    )


def test_ranks_on_two_nodes_learn_cartpole_and_go_on_after_the_time_of_a_job(cluster, site):
    """Each of them has actors of its own, and torchrun comes between."""
    log = site.run_dir.parent / "job.out"
    flags = ["--config", "cartpole_ddppo", "--run-dir", str(site.run_dir)]

    def submitted(*settings):
        all_flags = (*flags, *given((*HERE, *settings)))
        job = said("sbatch", "--parsable", f"--output={log}", RANKS, *all_flags)
        assert job.isdecimal()
        return job

    first = submitted("stop.mean_return=none")
    site.wait_report("both train", lambda r: r["updates"] > 20 and r["num_actors"] == 2)
    said("scancel", "--signal=HUP", first)
    wait_until("the job ends", lambda: state_of(first) in ("COMPLETED", "FAILED"), 60.0)
    assert site.summary["exit_reason"] == "terminated", log.read_text()
    second = submitted("stop.mean_return=475")
    learns(site)
    wait_until("the job ends", lambda: state_of(second) == "COMPLETED", 60.0)
    assert (site.run_dir / "epoch").read_text() == "2"
    assert (site.run_dir / "ranks/1/metrics.jsonl").exists()
