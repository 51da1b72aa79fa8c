"""Wrong settings, wrong environments, wrong peers: one clear line, the right exit code."""

import pytest

from tests.e2e.harness import CARTPOLE, module

pytestmark = pytest.mark.e2e

WRONG = {
    "train --set env.id=X --set learner.num_pases=2": "did you mean learner.num_pass",
    "learner --set env.id=CartPole-v1 --set learner.num_passes=0": "from 1 up, got 0",
    "train --config /nowhere.toml": "/nowhere.toml: cannot read",
    "learner --set nonsense --set env.id=CartPole-v1": "section.key=value",
    "train --resume": "--resume needs --run-dir",
    "learner --set env.id=CartPole-v9": "`v1`",
    "train --set env.id=CartPole-v1 --set env.squash_actions=true": "Discrete(2)",
    "learner --set env.id=CartPole-v1 --set learner.device=gpu": "learner.device",
    "train --config tictactoe_selfplay --set env.id=CartPole-v1": "has a single agent",
    "learner --config tictactoe_selfplay --set policies.mapping=nowhere:deal": "nowhere:deal",
}
OWN_ENV = """
import os
import time
import gymnasium
import numpy as np

class Own(gymnasium.Env):
    def __init__(self):
        shape = (int(os.environ["SIZE"]),)
        self.observation_space = gymnasium.spaces.Box(-1, 1, shape, np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.num_left = int(os.environ.get("FAILS_AFTER", -1))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        if self.num_left == 0:
            raise RuntimeError("the simulator crashed")
        self.num_left -= 1
        time.sleep(0.001)
        return self.observation_space.sample(), 0.0, False, False, {}
"""


@pytest.mark.parametrize("told", WRONG)
def test_wrong_settings_are_told_before_anything_is_begun(site, told):
    door, *flags = told.split()
    folder = () if "--resume" in flags else ("--run-dir", str(site.run_dir))
    assert WRONG[told] in " ".join(site.open(door, *flags, *folder).fails(2).split())
    assert not (site.run_dir / "checkpoints").exists()


def test_others_that_fail_are_told_why_and_the_learner_goes_on(site):
    path = module(site.folder, "own", OWN_ENV)
    learner = site.learner("env.id=own:Own", **path, SIZE="3")
    data, weights = site.service["data_url"], site.service["weights_url"]
    other = str(site.folder / "other")
    for flags, says in (
        (["--run-dir", other, "--set", f"bind.data={data}"], "bind.data"),
        (["--run-dir", str(site.run_dir)], "already holds a run"),
    ):
        assert says in site.open("learner", "--config", CARTPOLE, *flags).fails(2)
    for url, environment, code, words in (
        (weights, {**path, "SIZE": "3"}, 78, ["the weights port of a learner: dial its data"]),
        (data, {"SIZE": "3"}, 78, ["own"]),
        (data, {**path, "SIZE": "5"}, 78, ["shape", "(3,)", "(5,)"]),
        ("tcp://127.0.0.1:9", {}, 75, ["no learner answered at tcp://127.0.0.1:9"]),
    ):
        actor = site.open("actor", "--learner", url, "--connect-s", "1", **environment)
        error = actor.fails(code)
        assert all(word in error for word in words), error
    failing = site.actor(**path, SIZE="3", FAILS_AFTER="300")
    error = failing.fails(2, is_environments=True)
    assert "Own failed in step: RuntimeError: the simulator crashed" in error
    assert "own.py" in failing.log
    updates = site.wait_report("it left", lambda r: r["num_actors"] == 0)["updates"]
    assert updates > 0
    site.actor(**path, SIZE="3")
    site.wait_report("training goes on", lambda r: r["updates"] > updates)
    assert learner.process.poll() is None
