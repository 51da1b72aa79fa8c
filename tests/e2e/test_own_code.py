"""A user's torso, wrapper, algorithm and sink in one module, through a whole run and a resume."""

import os

import pytest

from tests.e2e.harness import Site

pytestmark = pytest.mark.e2e

MODULE = """
import gymnasium
import torch

from impala_async.algo.losses import impala_loss
from impala_async.models.mlp import MLPTorso
from impala_async.training.algorithms import Algorithm


class Torso(MLPTorso):
    pass


class Halved(gymnasium.RewardWrapper):
    def reward(self, reward):
        return 0.5 * reward


def algorithm(section):
    def loss(view, entropy_cost):
        given = view.values | view.policy | view.behaviour
        return impala_loss(**given, entropy_cost=entropy_cost)

    return Algorithm(loss, lambda view: {"user/reward": view.mean(view.rows.rewards_TB)})


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
    "model.name=own_everything:Torso",
    'env.wrappers=["own_everything:Halved"]',
    "algorithm.name=own_everything:algorithm",
    'report.sinks=[{name = "own_everything:Lines", kwargs = {name = "lines.txt"}}]',
    "stop.mean_return=none",
    "stop.env_steps=4000",
)


def test_all_of_them_work_together_and_in_a_resumed_run(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = site.run_dir.parent / "own"
    folder.mkdir()
    (folder / "own_everything.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    flags = [part for setting in SETTINGS for part in ("--set", setting)]
    door = site.open("train", "--run-dir", str(site.run_dir), *flags)
    assert door.wait_exit(60) == 0, door.log
    more = ("--resume", "--set", "stop.env_steps=8000")
    door = site.open("train", "--run-dir", str(site.run_dir), *more)
    assert door.wait_exit(60) == 0, door.log
    first, *lines = (site.run_dir / "lines.txt").read_text().splitlines()
    assert first == "from 0"
    again = [line for line in lines if line.startswith("from ")]
    assert len(again) == 1
    assert int(again[0].removeprefix("from ")) >= 4000
    assert lines[-1] == "0.5"
