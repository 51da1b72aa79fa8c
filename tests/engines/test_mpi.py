"""The command of docs/fleets.md for MPI, by a real mpirun (in Debian: openmpi-bin)."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.e2e.harness import ENDLESS
from tests.engines.harness import goes_on_after_a_kill, learns, run_flags

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="wants mpirun"),
]
DOOR = (sys.executable, "-m", "impala_async")


@pytest.fixture
def mpirun(site):
    """Starts a learner and actors on two nodes, which are this machine."""
    log = (site.folder / "mpirun.log").open("w+")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    started = []

    def start(*settings):
        learner = [*DOOR, "learner", "--resume", "auto", *run_flags(site, *settings)]
        actors = [*DOOR, "actors", "--learner", str(site.run_dir)]
        command = ["mpirun", "--oversubscribe", "-n", "1", *learner, ":", "-n", "2", *actors]
        how = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
        started.append(subprocess.Popen(command, env={**os.environ, **allowed}, **how))
        return started[-1]

    yield start
    for process in started:
        process.terminate()
        process.wait(20)
    log.close()


def test_one_command_learns_cartpole(mpirun, site):
    process = mpirun()
    learns(site)
    assert process.wait(30) == 0


def test_a_killed_actor_is_back_and_the_learner_saves_at_the_end(mpirun, site):
    process = mpirun(*ENDLESS)
    goes_on_after_a_kill(site, str(site.run_dir), num_actors=2)
    process.terminate()
    process.wait(20)
    assert site.summary["exit_reason"] == "terminated"
