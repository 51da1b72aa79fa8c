"""Environments of other shapes through real processes: images, own modules, both autoresets."""

from pathlib import Path

import pytest

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


@pytest.mark.parametrize("probe", ["learner", "actor"])
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
    summary = site.read("summary.json")
    assert summary is not None
    assert summary["exit_reason"] == "mean_return"
    assert summary["rejected"] == 0


@pytest.mark.parametrize("autoreset", ["NextStep", "SameStep"])
def test_vector_environments_of_either_autoreset(site: Site, autoreset: str) -> None:
    train(
        site,
        "env.id=impala_async.envs.probes:CountingVector",
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
