"""The train door: CartPole solved by real processes, and what it leaves behind."""

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import matrix
from tests.e2e.harness import Door, Site, identities_hold, wait_until
from tests.e2e.zygote import children

pytestmark = pytest.mark.e2e

SUMMARY_KEYS = {
    *("env_steps_trained", "updates", "wall_s", "env_steps_per_s", "mean_return_100"),
    *("lag_quantiles", "dropped", "bottleneck", "exit_reason", "num_actors"),
}


def train(site: Site, *settings: str, is_started: bool = False) -> Door:
    flags = [part for setting in settings for part in ("--set", setting)]
    return site.open("train", "--run-dir", str(site.run_dir), *flags, is_started=is_started)


def is_alive(process: psutil.Process) -> bool:
    """Whoever inherits an ended orphan may be slow to collect it: a zombie is not alive."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def plays(site: Site, policy: str, num_episodes: int) -> None:
    """The trained policy of a run, or of a checkpoint."""
    door = site.open("evaluate", policy, "--episodes", str(num_episodes))
    assert door.wait_exit(30) == 0, door.log
    found = re.search(rf"mean return of {num_episodes} greedy episodes: ([\d.]+)", door.log)
    assert found, door.log
    assert float(found[1]) > 30


@pytest.mark.parametrize("seed", matrix.SEEDS)
def test_cartpole_is_solved(site: Site, seed: int) -> None:
    door = train(site, f"seed={seed}")
    assert door.wait_exit(100) == 0, door.log
    summary = site.read("summary.json")
    assert summary is not None
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["exit_reason"] == "mean_return"
    assert summary["mean_return_100"] >= 475
    assert summary["env_steps_trained"] <= 300_000
    assert summary["lag_quantiles"][2] <= 4
    assert summary["num_actors"] == 2
    assert all(identities_hold(report) for report in site.reports())
    picture = (site.run_dir / "learning_curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert "mean return of 100 episodes" in door.log
    plays(site, str(site.run_dir), 5)
    (newest, *_) = sorted((site.run_dir / "checkpoints").glob("ckpt-*"), reverse=True)
    plays(site, str(newest), 2)
    assert children() == []


def test_every_batch_has_three_passes_and_counts_once(site: Site) -> None:
    settings = ("stop.mean_return=none", "stop.env_steps=40000", "learner.num_passes=3")
    door = train(site, *settings)
    assert door.wait_exit(60) == 0, door.log
    last = site.reports()[-1]
    assert last["passes/done"] == 3 * last["trajectories/trained"] + last["passes/partial"]
    rows = 50 * last["trajectories/trained"]
    # Masked rows are no steps; what was dropped at the end was counted at its first pass.
    dropped = 50 * last["trajectories/dropped"]
    assert 0.9 * rows < last["env_steps_trained"] <= rows + dropped
    assert last["updates"] >= 3 * (last["trajectories/trained"] // 16)


def test_no_child_outlives_a_killed_parent(site: Site) -> None:
    door = train(site, "stop.mean_return=none", "stop.env_steps=none")
    site.wait_report("training", lambda r: r["updates"] > 5, 40)
    family = psutil.Process(door.process.pid).children(recursive=True)
    # The learner, what watches it, and two actors.
    assert len(family) == 4
    door.signal(signal.SIGKILL)
    door.wait_exit()
    wait_until("all have ended", lambda: not any(map(is_alive, family)), within_s=2.0)


def test_ctrl_c_ends_everybody_in_good_order(site: Site) -> None:
    door = train(site, "stop.mean_return=none", "stop.env_steps=none", is_started=True)
    site.wait_report("training", lambda r: r["updates"] > 5, 40)
    door.signal(signal.SIGINT)
    assert door.wait_exit(15) == 130, door.log
    assert "CartPole-v1: ended (interrupted)" in door.log
    assert f"\nrun folder: {site.run_dir}\n" in door.log
    assert children() == []


@pytest.mark.parametrize("number", matrix.ENDS_OF_ACTORS)
def test_an_actor_that_was_ended_is_started_again(site: Site, number: int) -> None:
    door = train(site, "stop.mean_return=none", "stop.env_steps=none")
    site.wait_report("two actors", lambda r: r["num_actors"] == 2, 40)
    pids = wait_until("three children", lambda: psutil.Process(door.process.pid).children())
    actor = next(p for p in pids if os.readlink(f"/proc/{p.pid}/fd/1").endswith("actor-0.log"))
    os.kill(actor.pid, number)
    wait_until("a new actor", lambda: "starting it again" in door.log)
    site.wait_report("a third session", lambda r: r["sessions/opened"] >= 3, 30)
    site.wait_report("two at work", lambda r: r["num_actors"] == 2)
    door.signal(signal.SIGTERM)
    assert door.wait_exit(15) == 0


FLAKY = """
from pathlib import Path
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Flaky(CartPoleEnv):
    num_steps = 0

    def step(self, action):
        # Not yet while samplers are measured.
        self.num_steps += 1
        if self.num_steps > 2000 and not Path("{flag}").exists():
            Path("{flag}").touch()
            raise RuntimeError("the simulator crashed")
        return super().step(action)
"""


def test_an_environment_that_raises_once_does_not_end_the_run(site: Site) -> None:
    # As long as the actor that ends is noticed meanwhile.
    flags = ("--set", "env.id=flaky:Flaky", "--set", "stop.env_steps=150000")
    environment = {"PYTHONPATH": f"{site.folder}:{Path.cwd()}"}
    (site.folder / "flaky.py").write_text(FLAKY.format(flag=str(site.folder / "flaked")))
    door = site.open("train", "--run-dir", str(site.run_dir), *flags, **environment)
    assert door.wait_exit(60) == 0, door.log
    assert "ended with exit code 2 (" in door.log
    assert "the simulator crashed" in "".join(
        log.read_text() for log in (site.run_dir / "actors").iterdir()
    )


def test_a_terminal_that_nobody_reads_holds_up_no_training(site: Site) -> None:
    settings = ("env.id=CartPole-v1", "train.num_actors=1", "learner.report_every_s=0.02")
    flags = [part for setting in settings for part in ("--set", setting)]
    ours, its = pty.openpty()
    door = subprocess.Popen(
        [sys.executable, "-m", "impala_async.train", "--run-dir", str(site.run_dir), *flags],
        **{"stdin": its, "stdout": its, "stderr": its, "start_new_session": True},
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
    )
    os.close(its)
    try:
        # A terminal holds 68 KB at most, and each report is drawn there with some hundred bytes.
        site.wait_report("updates", lambda report: report["updates"] > 0, 60.0)
        wait_until("250 reports", lambda: len(site.reports()) > 250, 60.0)
        last = site.reports()[-1]["updates"]
        site.wait_report("more", lambda report: report["updates"] > last + 20)
        door.send_signal(signal.SIGTERM)
        while door.poll() is None:
            try:
                os.read(ours, 1 << 16)
            except OSError:  # everybody has closed it
                break
        assert door.wait(30) == 0
    finally:
        os.close(ours)
        door.kill()
        door.wait()
