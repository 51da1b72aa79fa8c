"""The example environments keep gymnasium's contract, and what their texts say."""

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from examples.custom_env import MOVES, Courier
from examples.nested_spaces import NUM_BINS, NUM_PARCELS, SortingArm
from impala_async.config.run import EnvSection
from impala_async.envs.make import build_envs

NAMES = {
    "custom_env:Courier": (["courier", "door"], {"": ("discrete", (len(MOVES),))}),
    "nested_spaces:SortingArm": (
        ["arm/at", "parcel/at", "parcel/kind"],
        {"bin": ("discrete", (NUM_BINS,)), "go_to": ("continuous", ())},
    ),
}


def test_the_package_finds_them_by_name_with_the_leaves_and_parts_of_their_texts():
    # The checker steps them with the random actions of their own spaces.
    check_env(Courier(size=4), skip_render_check=True)
    check_env(SortingArm(), skip_render_check=True)
    for name, (leaves, parts) in NAMES.items():
        envs = build_envs("auto", EnvSection(id=f"examples.{name}"), num_envs=2)
        assert [leaf.name for leaf in envs.obs_spec.leaves] == leaves
        assert {p.name: (p.kind, p.choices) for p in envs.action_spec.parts} == parts
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


def test_a_perfect_arm_earns_what_the_text_says_and_another_less():
    env = SortingArm()
    obs, _ = env.reset(seed=0)
    total, is_over = 0.0, False
    while not is_over:
        parcel = obs["parcel"]
        obs, reward, is_over, _, _ = env.step({"go_to": parcel["at"], "bin": parcel["kind"]})
        total += reward
    assert total == pytest.approx(10) == NUM_PARCELS
    parcel = env.reset(seed=1)[0]["parcel"]
    wrong = (parcel["kind"] + 1) % NUM_BINS
    assert env.step({"go_to": parcel["at"], "bin": wrong})[1] == 0
    parcel = env.reset(seed=1)[0]["parcel"]
    missed = np.clip(parcel["at"] + np.float32([0.25, -0.25]), -1, 1)
    reward = env.step({"go_to": missed, "bin": parcel["kind"]})[1]
    assert reward == pytest.approx(0.75)
