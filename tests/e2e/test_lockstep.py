"""Lockstep with real processes: two runs with one seed are equal to the last bit, whatever the
scheduling; and what becomes of a run that loses an actor, or its learner."""

import hashlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import matrix
from tests.e2e.harness import Site, identities_hold, site, wait_until

pytestmark = pytest.mark.e2e

CARTPOLE = "configs/cartpole.toml"
SAME = ("exit_reason", "env_steps_trained", "updates", "mean_return_100", "episodes")
# Of the last report: of the learning itself.
LEARNED = ("loss/total", "loss/policy", "grad/norm", "policy/entropy", "lag/mean")
PACE = {lag: ("pace.mode=lockstep", f"pace.lag={lag}") for lag in (0, 1)}
# Three actors, so that there is an order.
THREE_ACTORS = ("train.num_actors=3", "actor.num_envs=4", "learner.batch_columns=12")
PPO = (
    *("algorithm.name=ppo", "algorithm.num_minibatches=4", "learner.num_passes=3"),
    *("stop.mean_return=none", "stop.env_steps=10000"),
)
QUICK_LEASE = ("learner.lease_s=2",)
ENDLESS = ("stop.mean_return=none", "stop.env_steps=none")

SLEEPY_ENV = """
import os
import random
import time

from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.wrappers import TimeLimit

# Neither the environment's seed nor numpy's generators know of it.
moods = random.Random(os.urandom(8))


class Sleepy(CartPoleEnv):
    def step(self, action):
        if moods.random() < float(os.environ["SLEEPY"]):
            time.sleep(moods.uniform(0, 0.02))
        return super().step(action)


def make():
    return TimeLimit(Sleepy(), 500)
"""


@contextmanager
def disturbed(process: psutil.Process) -> Iterator[list[int]]:
    """Stops a random one of its children for a random moment, again and again; which ones."""
    is_over, stopped = threading.Event(), list[int]()

    def disturb() -> None:
        while not is_over.wait(random.uniform(0, 0.1)):
            try:
                child = random.choice(process.children())
                child.suspend()
                stopped.append(child.pid)
                is_over.wait(random.uniform(0, 0.25))
                child.resume()
            except (psutil.NoSuchProcess, IndexError):
                continue

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    try:
        yield stopped
    finally:
        is_over.set()
        thread.join()


def outcome(run_dir: Path) -> dict[str, Any]:
    """All that must not depend on the clock."""
    summary = json.loads((run_dir / "summary.json").read_text())
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    checkpoints = sorted((run_dir / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
    files = ("model.safetensors", "optimizer.safetensors")
    assert last["trajectories/rejected"] == 0
    return {
        **{name: summary[name] for name in (*SAME, "lag_quantiles")},
        **{name: last[name] for name in LEARNED},
        **{
            name: hashlib.sha256((checkpoints[-1] / name).read_bytes()).hexdigest()
            for name in files
        },
    }


def twice(folder: Path, *settings: str, **environment: tuple[str, str]) -> list[dict[str, Any]]:
    """Two runs of `train` side by side, of which the second is disturbed.

    Each of the environment's variables has a value for the one and one for the other.
    """
    (folder / "sleepy.py").write_text(SLEEPY_ENV)
    flags = ["--config", CARTPOLE]
    for setting in settings:
        flags += ["--set", setting]
    with site(folder / "first") as calm, site(folder / "second") as restless:
        doors = []
        for number, each in enumerate((calm, restless)):
            each.folder.mkdir()
            variables = {name: values[number] for name, values in environment.items()}
            variables["PYTHONPATH"] = os.pathsep.join([str(folder), os.getcwd()])
            # The restless one has hash seeds of its own, as runs of users have.
            told = ("--run-dir", str(each.run_dir), *flags)
            doors.append(each.open("train", *told, is_started=number == 1, **variables))
        with disturbed(psutil.Process(doors[1].process.pid)) as stopped:
            for door in doors:
                assert door.wait_exit(100) == 0, door.log
        assert len(set(stopped)) >= 3
        return [outcome(each.run_dir) for each in (calm, restless)]


@pytest.mark.parametrize("lag", matrix.LAGS)
def test_two_runs_are_equal_though_processes_are_stopped_and_environments_sleep(
    tmp_path: Path, lag: int
) -> None:
    # With a lag there are three actors, with orders of their own.
    more = THREE_ACTORS if lag else ()
    settings = ("env.id=sleepy:make", *PACE[lag], *PPO, *more)
    first, second = twice(tmp_path, *settings, SLEEPY=("0", "0.005"))
    assert first == second
    assert first["exit_reason"] == "env_steps"
    # One update of each batch, whatever is made of it: some of its rows are no steps.
    assert first["updates"] == pytest.approx(10_000 / (12 if lag else 16) / 50, abs=2)
    assert first["lag_quantiles"][1:] == [lag] * 4


@pytest.mark.slow
def test_async_needs_not_many_more_steps_than_lockstep(tmp_path: Path) -> None:
    steps: dict[str, int] = {}
    for mode in ("async", "lockstep"):
        for seed in range(3):
            with site(tmp_path / f"{mode}-{seed}") as opened:
                opened.folder.mkdir()
                flags = ["--set", f"seed={seed}", "--set", f"pace.mode={mode}"]
                door = opened.open("train", "--run-dir", str(opened.run_dir), *flags)
                assert door.wait_exit(60) == 0, door.log
                summary = opened.read("summary.json")
                assert summary is not None
                assert summary["exit_reason"] == "mean_return"
                steps[mode] = steps.get(mode, 0) + summary["env_steps_trained"]
    assert steps["async"] <= 1.5 * steps["lockstep"]


def test_a_run_goes_on_without_a_killed_actor_and_with_its_successor(site: Site) -> None:
    learner = site.learner(*ENDLESS, *QUICK_LEASE, *PACE[1], config=CARTPOLE)
    actors = [site.actor() for _ in range(2)]
    site.wait_report("two actors", lambda r: r["num_actors"] == 2 and r["updates"] > 10)
    extra = site.actor()
    wait_until("it is not needed", lambda: "already has its 2 actors" in extra.log)
    killed_at = time.monotonic()
    actors[0].signal(signal.SIGKILL)
    site.wait_report("the lease of the dead ends", lambda r: r["num_actors"] == 1)
    assert time.monotonic() - killed_at > 1.5
    # The extra one takes the place.
    back = site.wait_report("its successor", lambda r: r["num_actors"] == 2)
    more = site.wait_report("more updates", lambda r: r["updates"] > back["updates"] + 50)
    assert more["lag/quantiles"] == [1] * 5
    assert more["trajectories/rejected"] == 0
    learner.signal(signal.SIGTERM)
    assert learner.wait_exit(10) == 0
    assert all(identities_hold(report) for report in site.reports())


@pytest.mark.slow
def test_a_learner_is_killed_and_resumed_under_the_same_actors(site: Site) -> None:
    settings = (*ENDLESS, *QUICK_LEASE, *PACE[1], "checkpoint.every_s=0.5")
    learner = site.learner(*settings, config=CARTPOLE)
    actors = [site.actor() for _ in range(2)]
    checkpoints = site.run_dir / "checkpoints"
    wait_until("a checkpoint", lambda: len(list(checkpoints.glob("ckpt-1-*"))) >= 2)
    learner.signal(signal.SIGKILL)
    learner.wait_exit()
    saved = max(int(path.name.split("-")[2]) for path in checkpoints.glob("ckpt-1-*"))
    resumed = site.learner(*site.same_ports, resume=True)
    more = site.wait_report("training", lambda r: r["updates"] > saved + 50, 30)
    assert more["num_actors"] == 2
    assert more["trajectories/rejected"] == 0
    assert more["lag/quantiles"] == [1] * 5
    assert all(actor.process.poll() is None for actor in actors)
    resumed.signal(signal.SIGTERM)
    assert resumed.wait_exit(10) == 0
    assert all(identities_hold(report) for report in site.reports())
