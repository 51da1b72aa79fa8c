"""Environments of other shapes through real processes: images, own modules, both autoresets."""

import pytest

from tests import matrix
from tests.e2e.harness import module

pytestmark = pytest.mark.e2e

OWN_ENVS = '''
import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Tuple


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


class Image(Rows):
    """The bright half of an image says which action is paid."""

    observation_space = Dict(
        {"image": Box(0, 255, (32, 32), np.uint8), "noise": Box(-1, 1, (2,), np.float64)}
    )
    action_space = Discrete(2, start=5)

    def _look(self):
        self.answer = int(self.np_random.integers(2))
        image = np.zeros((32, 32), np.uint8)
        image[:, 16 * self.answer : 16 * self.answer + 16] = 1
        return {"image": image, "noise": self.np_random.uniform(-1, 1, 2)}

    def _pay(self, action):
        return action - 5 == self.answer


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
OWN = ("trajectory.rows=20", "algorithm.gamma=0.5", "stop.wall_s=60")


@pytest.mark.parametrize("probe", matrix.PROBES)
def test_images_in_a_dict_of_a_users_own_module(site, probe):
    # Columns of 22 kB, four to a message and six to a batch: three frames, split over two slots.
    widths = ("actor.num_envs=4", "learner.batch_columns=6")
    settings = ("env.id=own:Image", f"env.probe={probe}", *OWN, *widths, "stop.mean_return=9.5")
    summary = site.trained(*settings, **module(site.folder, "own", OWN_ENVS))
    assert summary["exit_reason"] == "mean_return"


@pytest.mark.parametrize("name", matrix.SPACES)
def test_spaces_of_all_kinds_are_learned(site, name):
    settings = (f"env.id=own:{name}", *OWN, "algorithm.lr=2e-3", "stop.mean_return=9.2")
    summary = site.trained(*settings, **module(site.folder, "own", OWN_ENVS))
    assert summary["exit_reason"] == "mean_return"


@pytest.mark.parametrize("autoreset", matrix.AUTORESETS)
def test_vector_environments_of_either_autoreset(site, autoreset):
    env = ("env.id=bench.probes:CountingVector", f'env.kwargs.autoreset="{autoreset}"')
    site.trained(*env, "actor.sampler=vector", "actor.num_envs=4", "stop.env_steps=5000")
    last = site.reports()[-1]
    # Episodes of three and five steps: a quarter and a sixth of all rows are resets.
    valid_share = last["batch/valid_rows_mean"] / (16 * 64)
    assert valid_share == pytest.approx((3 / 4 + 5 / 6) / 2, abs=0.02)
    assert last["episodes/length_mean"] == pytest.approx(2 / (1 / 4 + 1 / 6) - 1, abs=0.1)


@pytest.mark.parametrize("is_squashed", matrix.ARE_SQUASHED)
def test_numbers_as_actions_are_trained_on_in_passes_that_count_once(site, is_squashed):
    env = ("env.id=Pendulum-v1", f"env.squash_actions={is_squashed}")
    seen = ("env.last_action=true", "env.last_reward=true")
    passes = ("algorithm.reward_scale=0.1", "learner.num_passes=3", "trajectory.rows=50")
    site.trained(*env, *seen, *passes, "stop.env_steps=20000")
    last = site.reports()[-1]
    # The last window may be too short for an end of an episode.
    assert {report["episodes/length_mean"] for report in site.reports()} - {None} == {200}
    assert last["passes/done"] == 3 * last["trajectories/trained"] + last["passes/partial"]
    assert last["updates"] >= 3 * (last["trajectories/trained"] // 16) > 60
    # Masked rows are no steps; what was dropped at the end was counted at its first pass.
    rows, dropped = (50 * last[f"trajectories/{name}"] for name in ("trained", "dropped"))
    assert 0.9 * rows < last["env_steps_trained"] <= rows + dropped
