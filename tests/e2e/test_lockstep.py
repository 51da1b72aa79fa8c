"""Lockstep with real processes: two runs with one seed are equal to the last bit, whatever the
scheduling, whoever steps the environments, and however frames are sent."""

import random
import threading
from contextlib import contextmanager, suppress

import psutil
import pytest

from tests import matrix
from tests.e2e.harness import CARTPOLE, given, module, site

pytestmark = pytest.mark.e2e

LOCKSTEP = "pace.mode=lockstep"
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
PPO = (
    *("env.id=sleepy:make", "algorithm.name=ppo", "algorithm.num_minibatches=4"),
    *("learner.num_passes=3", "stop.mean_return=none", "stop.env_steps=6000"),
)
# Three actors, so that there is an order.
CASES = {
    "lag 1": (*PPO, "pace.lag=1", "train.num_actors=3", "actor.num_envs=4",
              "learner.batch_columns=12"),
    "lag 0": (*PPO, "pace.lag=0", "train.num_actors=2", "actor.num_envs=8"),
    # Two actors of four games, and a column for each side.
    "a team": ("actor.num_envs=4", "learner.batch_columns=16", "algorithm.name=appo",
               "learner.num_passes=2", "model.core=lstm", "model.core_size=16",
               "trajectory.rows=10", "policies.copy_every_updates=3", "stop.env_steps=3000"),
}  # fmt: skip


@contextmanager
def disturbed(process):
    """Stops a random one of its children for a random moment, again and again; which ones."""
    is_over, stopped = threading.Event(), set()

    def disturb():
        while not is_over.wait(random.uniform(0, 0.1)):
            with suppress(psutil.NoSuchProcess, IndexError):
                child = random.choice(process.children())
                child.suspend()
                stopped.add(child.pid)
                is_over.wait(random.uniform(0, 0.25))
                child.resume()

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    try:
        yield stopped
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("name", matrix.LOCKSTEPS)
def test_two_runs_are_equal_though_processes_are_stopped_and_environments_sleep(tmp_path, name):
    path = module(tmp_path, "sleepy", SLEEPY_ENV)
    config = "configs/self_play.toml" if name == "a team" else CARTPOLE
    with site(tmp_path / "first") as calm, site(tmp_path / "second") as restless:
        # The restless one has hash seeds of its own, as runs of users have.
        doors = [
            each.train(LOCKSTEP, *CASES[name], config=config, SLEEPY=share, is_started=own, **path)
            for each, share, own in ((calm, "0", False), (restless, "0.005", name == "lag 1"))
        ]
        with disturbed(psutil.Process(doors[1].process.pid)) as stopped:
            assert [door.wait_exit(100) for door in doors] == [0, 0], [door.log for door in doors]
        first, second = (each.outcome() for each in (calm, restless))
        assert len(stopped) >= 3
        assert first == second
        assert {each.summary["rejected"] for each in (calm, restless)} == {0}
    if name != "a team":
        # One update of each batch, whatever is made of it: some of its rows are no steps.
        num_columns = 12 if name == "lag 1" else 16
        assert first["updates"] == pytest.approx(6_000 / num_columns / 50, abs=2)
        assert first["lag_quantiles"][1:] == [int(name == "lag 1")] * 4


STACK_ENV = """
import gymnasium as gym
import numpy as np
from gymnasium.wrappers import FrameStackObservation

class Blinking(gym.Env):
    observation_space = gym.spaces.Box(0, 255, (8, 8), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 30))
        return self.look(), {}

    def step(self, action):
        self.left -= 1
        return self.look(), float(action == self.left % 3), self.left == 0, False, {}

    def look(self):
        return self.np_random.integers(0, 85 * (self.left % 3 + 1), (8, 8), np.uint8)

def make():
    return FrameStackObservation(Blinking(), 4)
"""


def test_workers_and_frames_sent_once_and_compressed_make_the_same_weights(tmp_path):
    path = module(tmp_path, "stacks", STACK_ENV)
    settings = (
        *("env.id=stacks:make", "model.name=small_cnn", "trajectory.rows=10", "seed=5"),
        *("algorithm.name=ppo", "algorithm.num_minibatches=2", LOCKSTEP),
        *("actor.num_envs=4", "learner.num_passes=2", "stop.env_steps=2000"),
    )
    outcomes = []
    for way in (
        ("env.frame_stack=off", "actor.sampler=serial"),
        ("env.frame_stack=on", "actor.compress=on", "actor.sampler=parallel"),
    ):
        with site(tmp_path / str(len(outcomes))) as opened:
            opened.trained(*settings, *way, **path)
            outcomes.append(opened.outcome())
    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["updates"] > 20


# No seed and no choice changes an episode, which a trajectory of ten rows holds with its reset.
SAME_ENV = """
import gymnasium as gym
import numpy as np

class Same(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self.look(), {}

    def step(self, action):
        self.age += 1
        return self.look(), float(self.age % 4 == 0), self.age == 9, False, {}

    def look(self):
        return np.cos(self.age * np.arange(1, 4)).astype(np.float32)
"""


def test_a_resumed_run_goes_on_as_if_it_had_not_ended_where_episodes_are_the_same(tmp_path):
    """With all that a step remembers: a reward of one's own, passes and parts, statistics."""
    path = module(tmp_path, "same", SAME_ENV)
    settings = (
        *("env.id=same:Same", "algorithm.name=ppo", "algorithm.num_minibatches=2", LOCKSTEP),
        *("algorithm.intrinsic_reward=examples.rnd:RND", "trajectory.rows=10"),
        *("actor.num_envs=4", "learner.num_passes=2", "algorithm.schedule_env_steps=3000"),
    )
    with site(tmp_path / "whole") as whole, site(tmp_path / "halves") as halves:
        whole.trained(*settings, "stop.env_steps=2000", **path)
        half = halves.trained(*settings, "stop.env_steps=1000", **path)["updates"]
        changes = given(("stop.env_steps=2000",))
        door = halves.open("train", "--resume", "--run-dir", str(halves.run_dir), *changes, **path)
        assert door.wait_exit(60) == 0, door.log
        assert whole.checkpoints()[-1].name == f"ckpt-1-{whole.summary['updates']}"
        assert halves.checkpoints()[-1].name == f"ckpt-2-{whole.summary['updates']}"
        assert 10 < half < whole.summary["updates"]
        first, second = (each.outcome() for each in (whole, halves))
        names = ["intrinsic.safetensors", "model.safetensors", "optimizer.safetensors"]
        assert [first[name] for name in names] == [second[name] for name in names]
        assert whole.reports()[-1]["reward/intrinsic"] > 0
