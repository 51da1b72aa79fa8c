"""Environments of other shapes through real processes: images, own modules, both autoresets."""

import json
import os
from pathlib import Path

import pytest

from tests import matrix
from tests.e2e.harness import Door, Site, identities_hold

pytestmark = pytest.mark.e2e

BANDIT_ENV = '''
import gymnasium
import numpy as np

class ImageBandit(gymnasium.Env):
    """The bright half of an image says which action is paid."""

    def __init__(self, side=32):
        self.observation_space = gymnasium.spaces.Dict(
            {
                "image": gymnasium.spaces.Box(0, 255, (side, side), np.uint8),
                "noise": gymnasium.spaces.Box(-1, 1, (2,), np.float64),
            }
        )
        self.action_space = gymnasium.spaces.Discrete(2, start=5)

    def _look(self):
        self.answer = int(self.np_random.integers(2))
        image = np.zeros((32, 32), np.uint8)
        image[:, 16 * self.answer : 16 * self.answer + 16] = 1
        return {"image": image, "noise": self.np_random.uniform(-1, 1, 2)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.rows = 0
        return self._look(), {}

    def step(self, action):
        assert action in (5, 6)
        reward = float(action - 5 == self.answer)
        self.rows += 1
        return self._look(), reward, self.rows == 10, False, {}
'''


def train(site: Site, *settings: str, **environment: str) -> Door:
    flags = [part for setting in settings for part in ("--set", setting)]
    door = site.open("train", "--run-dir", str(site.run_dir), *flags, **environment)
    assert door.wait_exit(90) == 0, door.log
    assert all(identities_hold(report) for report in site.reports())
    return door


def check_learned(site: Site) -> None:
    summary = site.read("summary.json")
    assert summary is not None
    assert summary["exit_reason"] == "mean_return"
    assert summary["rejected"] == 0


@pytest.mark.parametrize("probe", matrix.PROBES)
def test_images_in_a_dict_of_a_users_own_module(site: Site, probe: str) -> None:
    (site.folder / "bandit.py").write_text(BANDIT_ENV)
    # Columns of 22 kB, four to a message and six to a batch: three frames, split over two slots.
    train(
        site,
        "env.id=bandit:ImageBandit",
        f"env.probe={probe}",
        "actor.num_envs=4",
        "learner.batch_columns=6",
        "trajectory.rows=20",
        "algorithm.gamma=0.5",
        "stop.mean_return=9.5",
        "stop.wall_s=60",
        PYTHONPATH=f"{site.folder}:{Path.cwd()}",
    )
    check_learned(site)


@pytest.mark.parametrize("autoreset", matrix.AUTORESETS)
def test_vector_environments_of_either_autoreset(site: Site, autoreset: str) -> None:
    train(
        site,
        "env.id=bench.probes:CountingVector",
        f'env.kwargs.autoreset="{autoreset}"',
        "actor.sampler=vector",
        "actor.num_envs=4",
        "stop.env_steps=5000",
    )
    last = site.reports()[-1]
    assert last["trajectories/rejected"] == 0
    # Episodes of three and five steps: a quarter and a sixth of all rows are resets.
    valid_share = last["batch/valid_rows_mean"] / (16 * 50)
    assert valid_share == pytest.approx((3 / 4 + 5 / 6) / 2, abs=0.02)
    assert last["episodes/length_mean"] == pytest.approx(2 / (1 / 4 + 1 / 6) - 1, abs=0.1)


SPACES_ENVS = '''
import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple


class Rows(gymnasium.Env):
    """Ten rows, each pays 1 for the right action."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.rows = 0
        return self._look(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        reward = self._pay(action)
        self.rows += 1
        return self._look(), float(reward), self.rows == 10, False, {}


class Masked(Rows):
    """Action 2 pays, but only where it is legal; else 0 does. An illegal action is an error."""

    observation_space = Dict({"noise": Box(-1, 1, (2,)), "action_mask": Box(0, 1, (3,), np.int8)})
    action_space = Discrete(3)

    def _look(self):
        self.mask = np.array([1, 1, self.np_random.integers(2)], np.int8)
        return {"noise": self.np_random.random(2, np.float32), "action_mask": self.mask}

    def _pay(self, action):
        assert self.mask[action], "illegal"
        return action == (2 if self.mask[2] else 0)


class Several(Rows):
    """Each part of the action repeats its part of the observation."""

    observation_space = MultiDiscrete([2, 3])
    action_space = MultiDiscrete([2, 3], start=[5, -1])

    def _look(self):
        self.answer = self.np_random.integers([2, 3])
        return self.answer

    def _pay(self, action):
        return np.mean(action - [5, -1] == self.answer)


class Mixed(Rows):
    """A Tuple in, a Tuple out: the category, and whether the number is positive."""

    observation_space = Tuple((Discrete(3, start=1), Box(-1, 1, (1,))))
    action_space = Tuple((Discrete(3), Box(-1, 1, (), np.float32)))

    def _look(self):
        self.category = int(self.np_random.integers(1, 4))
        self.number = self.np_random.choice(np.float32([-1, 1]), 1)
        return self.category, self.number

    def _pay(self, action):
        return (action[0] + 1 == self.category) / 2 + (action[1] * self.number[0] > 0) / 2
'''


@pytest.mark.parametrize("name", matrix.SPACES)
def test_spaces_of_all_kinds_are_learned(site: Site, name: str) -> None:
    (site.folder / "spaces.py").write_text(SPACES_ENVS)
    train(
        site,
        f"env.id=spaces:{name}",
        "trajectory.rows=20",
        "algorithm.gamma=0.5",
        "algorithm.lr=2e-3",
        "stop.mean_return=9.2",
        "stop.wall_s=30",
        PYTHONPATH=f"{site.folder}:{Path.cwd()}",
    )
    check_learned(site)


@pytest.mark.parametrize("is_squashed", matrix.ARE_SQUASHED)
def test_numbers_as_actions_are_trained_on(site: Site, is_squashed: str) -> None:
    train(
        site,
        "env.id=Pendulum-v1",
        f"env.squash_actions={is_squashed}",
        "env.last_action=true",
        "env.last_reward=true",
        "algorithm.reward_scale=0.1",
        "stop.env_steps=20000",
    )
    last = site.reports()[-1]
    assert last["trajectories/rejected"] == 0
    # The last window may be too short for an end of an episode.
    assert {report["episodes/length_mean"] for report in site.reports()} - {None} == {200}
    assert last["updates"] >= 20


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


def test_frames_that_are_sent_once_or_compressed_make_the_same_weights(site: Site) -> None:
    (site.folder / "stacks.py").write_text(STACK_ENV)
    settings = (
        *("env.id=stacks:make", "model.name=small_cnn", "trajectory.rows=10", "seed=5"),
        *("algorithm.name=ppo", "algorithm.num_minibatches=2", "pace.mode=lockstep"),
        *("actor.num_envs=4", "learner.num_passes=2", "stop.env_steps=4000"),
    )
    weights, num_updates = {}, {}
    ways = {
        "whole": ["env.frame_stack=off"],
        "frames": ["env.frame_stack=on"],
        "squeezed": ["env.frame_stack=on", "actor.compress=on"],
    }
    for choice, way in ways.items():
        run_dir = site.folder / choice
        texts = (*settings, *way)
        flags = [part for text in texts for part in ("--set", text)]
        here = os.pathsep.join([str(site.folder), os.getcwd()])
        door = site.open("train", "--run-dir", str(run_dir), *flags, PYTHONPATH=here)
        assert door.wait_exit(60) == 0, door.log
        (checkpoint,) = (run_dir / "checkpoints").iterdir()
        weights[choice] = (checkpoint / "model.safetensors").read_bytes()
        last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
        assert last["trajectories/rejected"] == 0
        num_updates[choice] = last["updates"]
    assert set(num_updates.values()) == {num_updates["whole"]}
    assert num_updates["whole"] > 20
    assert weights["whole"] == weights["frames"] == weights["squeezed"]
