"""Stable-Baselines3, with rl-zoo's settings: `python -m bench.peers.run_sb3 GAME a2c|ppo SEED`.

Runs in its own virtual environment. It learns in one process; on Pong, the environments are
processes of their own and torch has two threads, since learning waits while they are stepped.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from bench.peers.games import make
from bench.peers.say import learn_and_say

NUM_STEPS = 1_000_000_000


def falling(start: float, env_steps: float) -> Callable[[float], float]:
    """Linearly to nothing after so many steps, however long the training goes on."""

    def value(remaining: float) -> float:
        done = (1 - remaining) * NUM_STEPS
        return start * max(0.0, 1 - done / env_steps)

    return value


SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("cartpole", "a2c"): {"num_envs": 8, "ent_coef": 0.0},
    ("cartpole", "ppo"): {
        "num_envs": 8, "n_steps": 32, "batch_size": 256, "n_epochs": 20, "gae_lambda": 0.8,
        "gamma": 0.98, "ent_coef": 0.0, "learning_rate": falling(1e-3, 1e5),
        "clip_range": falling(0.2, 1e5),
    },
    ("pong", "a2c"): {
        "num_envs": 16, "ent_coef": 0.01, "vf_coef": 0.25, "policy_kwargs": {
            "optimizer_class": RMSpropTFLike, "optimizer_kwargs": {"eps": 1e-5}},
    },
    ("pong", "ppo"): {
        "num_envs": 8, "n_steps": 128, "batch_size": 256, "n_epochs": 4, "vf_coef": 0.5,
        "ent_coef": 0.01, "learning_rate": falling(2.5e-4, 1e7), "clip_range": falling(0.1, 1e7),
    },
}  # fmt: skip


def main() -> None:
    game, algorithm, seed = sys.argv[1:]
    settings = dict(SETTINGS[game, algorithm])
    is_pong = game == "pong"
    torch.set_num_threads(2 if is_pong else 1)
    envs = make_vec_env(
        partial(make, game),
        n_envs=settings.pop("num_envs"),
        seed=int(seed),
        vec_env_cls=SubprocVecEnv if is_pong else DummyVecEnv,
    )
    kind = {"a2c": A2C, "ppo": PPO}[algorithm]
    policy = "CnnPolicy" if is_pong else "MlpPolicy"
    model = kind(policy, envs, seed=int(seed), device="cpu", **settings)
    learn_and_say(model, NUM_STEPS)


if __name__ == "__main__":
    main()
