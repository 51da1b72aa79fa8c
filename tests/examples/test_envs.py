"""The example environments keep gymnasium's contract, and what their texts say."""

import threading
from itertools import count

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from examples.custom_env import MOVES, Courier
from examples.nested_spaces import NUM_BINS, NUM_PARCELS, SortingArm
from examples.reset_ahead import ResetAhead, slow_pole
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


class Told(gym.Env):
    """Its episodes have two steps and show its number; it is reset when it may be."""

    observation_space = action_space = gym.spaces.Discrete(9)

    def __init__(self, number, may_reset, threads):
        self.number, self.may_reset, self.threads = number, may_reset, threads
        self.seeds = []
        self.note()

    def note(self):
        self.threads.setdefault(self.number, set()).add(threading.get_ident())

    def reset(self, *, seed=None, options=None):
        assert self.may_reset.wait(30)
        self.note()
        self.seeds.append(seed)
        self.num_steps = 0
        return self.number, {}

    def step(self, action):
        self.note()
        self.num_steps += 1
        return self.number, 0.0, self.num_steps == 2, False, {}

    def close(self):
        self.note()


def test_nobody_waits_for_the_reset_of_a_spare():
    numbers, gates, made, threads = count(), [threading.Event() for _ in range(3)], [], {}

    def make():
        number = next(numbers)
        made.append(Told(number, gates[number], threads))
        return made[-1]

    env = ResetAhead(make, num_spares=2)
    gates[0].set()
    # The others are still being reset.
    assert env.reset(seed=5)[0] == 0
    assert [env.step(0)[:3] for _ in range(2)] == [(0, 0.0, False), (0, 0.0, True)]
    for gate in gates[1:]:
        gate.set()
    # However quick the first is, their turn is the same.
    assert [env.reset()[0] for _ in range(4)] == [1, 2, 0, 1]
    assert env.reset(seed=5)[0] == 0
    env.close()
    # Each has a thread of its own, and a seed that follows from the one that was given.
    assert sorted(map(len, threads.values())) == [1, 1, 1]
    assert len(set.union(*threads.values())) == 3
    first = [each.seeds[0] for each in made]
    assert len({*first}) == 3
    assert all(each.seeds[-1] == seed for each, seed in zip(made, first, strict=True))


@pytest.mark.filterwarnings("ignore:.*A Box observation space:UserWarning")
@pytest.mark.parametrize("num_spares", [0, 1])
def test_a_pole_with_a_spare_is_a_pole(num_spares):
    env = slow_pole(reset_s=0.0, num_spares=num_spares)
    check_env(env, skip_render_check=True)
    obs, _ = env.reset(seed=1)
    second, _ = env.reset()
    again = env.reset(seed=1)[0], env.reset()[0]
    assert np.array_equal(again, (obs, second))
    assert not np.array_equal(obs, second)
    env.close()
    section = EnvSection(
        id="examples.reset_ahead:slow_pole", kwargs={"reset_s": 0.0, "num_spares": num_spares}
    )
    envs = build_envs("auto", section, num_envs=2)
    assert envs.reset(1)[""].shape == (2, 4)
    idle = [envs.step({"": np.zeros(2, np.int32)}).idle for _ in range(30)]
    assert any(each is not None and each.any() for each in idle), "some episode has ended"
    envs.close()
