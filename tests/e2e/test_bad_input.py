"""Wrong settings, wrong environments, wrong peers: one clear line, the right exit code."""

from pathlib import Path

import pytest

from tests.e2e.harness import Site

pytestmark = pytest.mark.e2e

CARTPOLE = "configs/cartpole.toml"
ENDLESS = ("stop.mean_return=none", "stop.env_steps=none")
SHAPED_ENV = """
import os
import gymnasium
import numpy as np

class Shaped(gymnasium.Env):
    def __init__(self):
        size = int(os.environ["SHAPED_SIZE"])
        self.observation_space = gymnasium.spaces.Box(-1, 1, (size,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}
    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}
"""


WRONG = {
    "--set env.id=X --set learner.num_pases=2": "did you mean learner.num_pass",
    "--set env.id=CartPole-v1 --set learner.num_passes=0": "from 1 up, got 0",
    "--config /nowhere.toml": "/nowhere.toml: cannot read",
    "--set nonsense --set env.id=CartPole-v1": "section.key=value",
    "--resume": "--resume needs --run-dir",
    "--set env.id=CartPole-v9": "`v1`",
    "--set env.id=CartPole-v1 --set env.squash_actions=true": "Discrete(2)",
    "--set env.id=CartPole-v1 --set learner.device=gpu": "learner.device",
}


@pytest.mark.parametrize("door", ["learner", "train"])
def test_wrong_settings(site: Site, door: str) -> None:
    for flags, says in WRONG.items():
        folder = () if "--resume" in flags else ("--run-dir", str(site.run_dir))
        opened = site.open(door, *flags.split(), *folder)
        assert opened.wait_exit(40) == 2, (flags, opened.log)
        errors = [line for line in opened.log.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, (flags, opened.log)
        assert says in errors[0], flags
        assert "Traceback" not in opened.log
        assert not site.run_dir.exists(), flags


def test_a_second_learner_on_the_same_port_or_in_the_same_folder(site: Site) -> None:
    site.learner(*ENDLESS, config=CARTPOLE)
    other = str(site.folder / "other")
    for flags, says in (
        (["--run-dir", other, "--set", f"bind.data={site.service['data_url']}"], "bind.data"),
        (["--run-dir", str(site.run_dir)], "already holds a run"),
    ):
        second = site.open("learner", "--config", CARTPOLE, *flags)
        assert second.wait_exit(30) == 2
        assert says in second.log
        assert "Traceback" not in second.log


def test_an_actor_whose_environment_is_missing_or_another_exits_78(site: Site) -> None:
    (site.folder / "shaped.py").write_text(SHAPED_ENV)
    path = {"PYTHONPATH": f"{site.folder}:{Path.cwd()}"}
    site.learner("env.id=shaped:Shaped", **path, SHAPED_SIZE="3")
    for environment, says in (
        ({"SHAPED_SIZE": "3"}, ["shaped"]),
        ({**path, "SHAPED_SIZE": "5"}, ["shape", "(3,)", "(5,)"]),
    ):
        actor = site.actor(**environment)
        assert actor.wait_exit(30) == 78
        (error,) = [line for line in actor.log.splitlines() if line.startswith("error: ")]
        assert all(word in error for word in says)
        assert "Traceback" not in actor.log
    fits = site.actor(**path, SHAPED_SIZE="3")
    site.wait_report("the right actor works", lambda r: r["num_actors"] == 1 and r["updates"] > 0)
    assert fits.process.poll() is None


def test_no_learner_there_exits_75(site: Site) -> None:
    actor = site.open("actor", "--learner", "tcp://127.0.0.1:9", "--connect-s", "1")
    assert actor.wait_exit(20) == 75
    assert "no learner answered at tcp://127.0.0.1:9" in actor.log
