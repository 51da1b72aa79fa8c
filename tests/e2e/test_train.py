"""The train door: CartPole solved by real processes, and what it leaves behind."""

import os
import pty
import re
import signal
import sys

import psutil
import pytest

from tests import matrix
from tests.e2e.harness import ENDLESS, given, identities_hold, is_alive, module, wait_until
from tests.e2e.zygote import Forked, children

pytestmark = pytest.mark.e2e


def plays(site, policy, num_episodes):
    """The trained policy of a run, or of a checkpoint."""
    door = site.open("evaluate", policy, "--episodes", str(num_episodes))
    assert door.wait_exit(30) == 0, door.log
    found = re.search(rf"mean return of {num_episodes} greedy episodes: ([\d.]+)", door.log)
    assert found, door.log
    assert float(found[1]) > 30


@pytest.mark.parametrize("seed", matrix.SEEDS)
def test_cartpole_is_solved(site, seed):
    door = site.train(f"seed={seed}")
    assert door.wait_exit(100) == 0, door.log
    summary = site.summary
    assert summary["exit_reason"] == "mean_return"
    # Within how many steps is for a quiet machine to tell: `bench.learning`.
    assert summary["mean_return_100"] >= 475
    assert summary["lag_quantiles"][2] <= 4
    assert summary["num_actors"] == 1
    assert all(identities_hold(report) for report in site.reports())
    picture = (site.run_dir / "learning_curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert "mean return of 100 episodes" in door.log
    plays(site, str(site.run_dir), 5)
    plays(site, str(site.checkpoints()[-1]), 2)
    assert children() == []


def test_no_child_outlives_a_killed_parent(site):
    door = site.train(*ENDLESS, "actor.sampler=serial")  # auto would try env workers meanwhile
    site.wait_report("training", lambda r: r["updates"] > 5)
    family = psutil.Process(door.process.pid).children(recursive=True)
    # The learner, what watches it, and an actor.
    assert len(family) == 3
    door.kill()
    wait_until("all have ended", lambda: not any(map(is_alive, family)), within_s=2.0)


def test_ctrl_c_ends_everybody_in_good_order(site):
    door = site.train(*ENDLESS)
    site.wait_report("training", lambda r: r["updates"] > 5)
    door.ends(signal.SIGINT, 130)
    assert "CartPole-v1: ended (interrupted)" in door.log
    assert f"\nrun folder: {site.run_dir}\n" in door.log
    assert children() == []


FLAKY = """
from pathlib import Path
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Flaky(CartPoleEnv):
    num_steps = 0

    def step(self, action):
        # The failure must not come while samplers are still measured.
        self.num_steps += 1
        if self.num_steps > 20_000 and not Path("{flag}").exists():
            Path("{flag}").touch()
            raise RuntimeError("the simulator crashed")
        return super().step(action)
"""


@pytest.mark.parametrize("number", matrix.ENDS_OF_ACTORS)
def test_an_actor_that_fails_or_was_ended_is_started_again(site, number):
    flaky = FLAKY.format(flag=site.folder / "flaked")
    two = ("train.num_actors=2", "actor.num_envs=8", "learner.num_passes=1")
    door = site.train("env.id=flaky:Flaky", *two, *ENDLESS, **module(site.folder, "flaky", flaky))
    wait_until("an actor fails", lambda: "ended with exit code 2 (" in door.log, 40.0)
    assert "the simulator crashed" in "".join(
        log.read_text() for log in (site.run_dir / "actors").iterdir()
    )
    site.wait_report("two actors", lambda r: r["num_actors"] == 2)
    opened = site.reports()[-1]["sessions/opened"]
    pids = psutil.Process(door.process.pid).children()
    actor = next(p for p in pids if os.readlink(f"/proc/{p.pid}/fd/1").endswith("actor-0.log"))
    num_restarts = door.log.count("starting it again")
    os.kill(actor.pid, number)
    wait_until("a new actor", lambda: door.log.count("starting it again") > num_restarts)
    site.wait_report("a new session", lambda r: r["sessions/opened"] > opened)
    site.wait_report("two at work", lambda r: r["num_actors"] == 2)
    door.ends()


def test_a_terminal_that_nobody_reads_holds_up_no_training_and_no_end(site):
    often = ("env.id=CartPole-v1", "train.num_actors=1", "learner.report_every_s=0.02")
    ours, its = pty.openpty()
    door = Forked(
        [sys.executable, "-m", "impala_async.train", "--run-dir", str(site.run_dir), *given(often)],
        **dict.fromkeys(("stdin", "stdout", "stderr"), its),
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
    )
    try:
        site.wait_report("training", lambda report: report["updates"] > 0)
        full = os.open(os.ttyname(its), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        os.close(its)
        with os.fdopen(full, "wb", buffering=0) as terminal:
            while terminal.write(bytes(4096)):
                pass
        num_reports, last = len(site.reports()), site.reports()[-1]["updates"]
        wait_until("ten that are not shown", lambda: len(site.reports()) > num_reports + 10)
        site.wait_report("more", lambda report: report["updates"] > last + 20)
        door.send_signal(signal.SIGTERM)
        assert door.wait(30) == 0
    finally:
        os.close(ours)
        door.kill()
        door.wait()
