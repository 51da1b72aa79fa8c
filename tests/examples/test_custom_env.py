"""The example environment keeps gymnasium's contract, and what its text says."""

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from examples.custom_env import MOVES, Courier
from impala_async.config.run import EnvSection
from impala_async.envs.make import build_envs


def test_the_package_finds_an_environment_by_its_name():
    # The checker steps it with the random actions of its own spaces.
    check_env(Courier(), skip_render_check=True)
    section = EnvSection(id="examples.custom_env:Courier", kwargs={"size": 4})
    envs = build_envs("auto", section, num_envs=2)
    assert [leaf.name for leaf in envs.obs_spec.leaves] == ["courier", "door"]
    assert [part.choices for part in envs.action_spec.parts] == [(len(MOVES),)]
    envs.close()


def test_the_best_return_is_what_the_text_says_and_who_is_late_is_truncated():
    """The shortest way has |dx| + |dy| steps."""
    env = Courier(max_steps=3)
    returns = []
    for seed in range(2000):
        obs, _ = env.reset(seed=seed)
        num_steps = np.abs(obs["courier"] - obs["door"]).sum() * 4
        returns.append(1 - 0.1 * num_steps)
    assert np.mean(returns) == pytest.approx(0.67, abs=0.015)
    env.reset(seed=0)
    ends = [env.step(np.int64(0))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]
