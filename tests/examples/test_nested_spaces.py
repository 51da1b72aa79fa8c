"""The example of nested spaces keeps gymnasium's contract, and what its text says."""

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from examples.nested_spaces import NUM_BINS, NUM_PARCELS, SortingArm
from impala_async.config.run import EnvSection
from impala_async.envs.make import build_envs


def test_leaves_and_parts_have_the_names_that_the_text_says():
    check_env(SortingArm(), skip_render_check=True)
    envs = build_envs("auto", EnvSection(id="examples.nested_spaces:SortingArm"), num_envs=2)
    assert [leaf.name for leaf in envs.obs_spec.leaves] == ["arm/at", "parcel/at", "parcel/kind"]
    kinds = {part.name: (part.kind, part.choices) for part in envs.action_spec.parts}
    assert kinds == {"bin": ("discrete", (NUM_BINS,)), "go_to": ("continuous", ())}
    envs.close()


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
