"""A user's torso, wrapper, algorithm and sink, through a whole run and a resumed one."""

import os

import pytest

from tests.e2e.harness import Site, module

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

WRAPPER = """
import gymnasium


class Halved(gymnasium.RewardWrapper):
    def reward(self, reward):
        return 0.5 * reward
"""
LEARNING = """
from impala_async.algo.losses import impala_loss
from impala_async.models.torso import MLPTorso
from impala_async.training.algorithms import Algorithm


class Torso(MLPTorso):
    pass


def algorithm(section):
    def loss(view, entropy_cost):
        given = view.inputs | {"behaviour_log_probs_TB": view.behaviour_log_probs_TB}
        return impala_loss(**given, entropy_cost=entropy_cost)

    return Algorithm(loss, lambda view: {"user/reward": view.mean(view.rewards_TB)})


class Lines:
    def __init__(self, run, name):
        self.file = (run.folder / name).open("a")
        self.file.write(f"from {run.env_steps}\\n")

    def write(self, report):
        self.file.write(f"{report.get('user/reward')}\\n")

    def close(self):
        self.file.close()
"""
SETTINGS = (
    "model.name=own_learning:Torso",
    'env.wrappers=["own_wrapper:Halved"]',
    "algorithm.name=own_learning:algorithm",
    'report.sinks=[{name = "own_learning:Lines", kwargs = {name = "lines.txt"}}]',
    "stop.mean_return=none",
    "stop.env_steps=4000",
)


def test_all_of_them_work_together_and_in_a_resumed_run(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    module(site.folder, "own_wrapper", WRAPPER)
    module(site.folder, "own_learning", LEARNING)
    monkeypatch.setenv("PYTHONPATH", str(site.folder), prepend=os.pathsep)
    site.trained(*SETTINGS)
    more = ("--resume", "--set", "stop.env_steps=8000")
    door = site.open("train", "--run-dir", str(site.run_dir), *more)
    assert door.wait_exit(120) == 0, door.log
    first, *lines = (site.run_dir / "lines.txt").read_text().splitlines()
    assert first == "from 0"
    (again,) = (line for line in lines if line.startswith("from "))
    assert int(again.removeprefix("from ")) >= 4000
    # The wrapper halves each reward of 1, and the config of CartPole scales it.
    assert float(lines[-1]) == pytest.approx(0.05)
