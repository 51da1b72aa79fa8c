"""RLlib: `python -m bench.peers.run_rllib GAME impala|appo SEED`.

Runs in its own virtual environment, with the settings of its examples for the two games, the
networks that the others have, and two env runners. Frames are stacked by its connectors, as its
example does, so that each is sent once.
"""

import os
import sys
from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
import ray
from numpy.typing import NDArray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.connectors.env_to_module.frame_stacking import FrameStackingEnvToModule
from ray.rllib.connectors.env_to_module.mean_std_filter import MeanStdFilter
from ray.rllib.connectors.learner.frame_stacking import FrameStackingLearner
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import register_env
from ray.tune.trainable import trainable

from bench.peers.games import make
from bench.peers.say import NUM_EPISODES, mean_of, say

MODELS = {
    "cartpole": DefaultModelConfig(
        vf_share_layers=True, fcnet_hiddens=[64, 64], fcnet_activation="tanh"
    ),
    "pong": DefaultModelConfig(
        vf_share_layers=True,
        conv_filters=[(32, 8, 4), (64, 4, 2), (64, 3, 1)],
        conv_activation="relu",
        head_fcnet_hiddens=[512],
    ),
}
TRAINING: dict[tuple[str, str], dict[str, Any]] = {
    ("cartpole", "impala"): {
        "train_batch_size_per_learner": 500, "grad_clip": 40.0, "grad_clip_by": "global_norm",
        "lr": 5e-4, "vf_loss_coeff": 0.05, "entropy_coeff": 0.0,
    },
    ("cartpole", "appo"): {
        "circular_buffer_iterations_per_batch": 2, "vf_loss_coeff": 0.05, "entropy_coeff": 0.0,
    },
    ("pong", "impala"): {
        "train_batch_size_per_learner": 500, "grad_clip": 30.0, "grad_clip_by": "global_norm",
        "lr": 9e-4, "vf_loss_coeff": 1.0, "entropy_coeff": 0.02,
    },
    ("pong", "appo"): {
        "train_batch_size_per_learner": 500, "target_network_update_freq": 2, "lr": 5e-4,
        "vf_loss_coeff": 1.0, "entropy_coeff": 0.01, "broadcast_interval": 5,
        "circular_buffer_num_batches": 4, "circular_buffer_iterations_per_batch": 2,
    },
}  # fmt: skip
ENVS_PER_RUNNER = {
    ("cartpole", "impala"): 16, ("cartpole", "appo"): 16, ("pong", "impala"): 5, ("pong", "appo"): 2
}  # fmt: skip
RETURNS = "returns"


class Scaled(gym.ObservationWrapper[NDArray[np.float32], int, NDArray[np.uint8]]):
    """A frame as RLlib's own Atari wrapper hands it on: a last axis of one, around zero."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-1, 1, (84, 84, 1), np.float32)

    def observation(self, observation: NDArray[np.uint8]) -> NDArray[np.float32]:
        return observation[..., None].astype(np.float32) / np.float32(128) - np.float32(1)


def stacking(env: Any, spaces: Any, device: Any) -> Any:
    return FrameStackingEnvToModule(num_frames=4)


def stacking_to_learn(input_observation_space: Any, input_action_space: Any) -> Any:
    return FrameStackingLearner(num_frames=4)


def normalising(env: Any, spaces: Any, device: Any) -> Any:
    return MeanStdFilter()


def configure(game: str, algorithm: str, seed: int) -> AlgorithmConfig:
    """The configuration of its example, on two cores without a GPU."""
    register_env("pong", lambda _: Scaled(make("pong", is_stacked=False)))
    config = {"impala": IMPALAConfig, "appo": APPOConfig}[algorithm]()
    runners: dict[str, Any] = {}
    training = TRAINING[game, algorithm]
    if game == "pong":
        runners["env_to_module_connector"] = stacking
        training["learner_connector"] = stacking_to_learn
    elif algorithm == "impala":
        runners["env_to_module_connector"] = normalising
    return (
        config.environment("CartPole-v1" if game == "cartpole" else "pong")
        .env_runners(
            num_env_runners=2,
            num_envs_per_env_runner=ENVS_PER_RUNNER[game, algorithm],
            **runners,
        )
        .learners(num_learners=0)
        .training(**training)
        .rl_module(model_config=MODELS[game])
        .callbacks(on_episode_end=keep_return)
        # It reports between iterations only; its ten seconds each would hide the goal.
        .reporting(min_time_s_per_iteration=0.5, min_sample_timesteps_per_iteration=0)
        .debugging(seed=seed)
    )


def keep_return(*, episode: Any, metrics_logger: Any, **_: Any) -> None:
    """Every return, as RLlib's own mean is one of an iteration's episodes, however few they are."""
    metrics_logger.log_value(RETURNS, float(episode.get_return()), reduce="item_series")


class TrainedRows:
    """Counts the rows that the learner thread draws: each once, padding and bootstrap rows not.

    RLlib's own count has a batch's padding in it, and APPO's batches as often as they are drawn.
    """

    def __init__(self, algorithm: Any) -> None:
        self.count = 0
        self._queue = algorithm.learner_group._learner._learner_thread_in_queue
        self._get = self._queue.get
        self._queue.get = self._count

    def _count(self, *args: Any, **kwargs: Any) -> Any:
        item = self._get(*args, **kwargs)
        batch = item[0] if isinstance(item, tuple) else None
        if batch is not None and not hasattr(batch, "was_drawn"):
            batch.was_drawn = True
            [rows] = batch.policy_batches.values()
            self.count += int(rows["loss_mask"].sum())
        return item


def main() -> None:
    game, name, seed = sys.argv[1:]
    # Everything that it writes goes with the turn, nothing into the home folder.
    trainable.DEFAULT_STORAGE_PATH = os.getcwd()
    ray.init(num_cpus=4, include_dashboard=False, _temp_dir=os.getcwd())
    algorithm = configure(game, name, int(seed)).build_algo()
    trained = TrainedRows(algorithm)
    returns: deque[float] = deque(maxlen=NUM_EPISODES)
    while True:
        ended = algorithm.train()["env_runners"].get(RETURNS)
        # Before the first episode has ended it is NaN and no list.
        returns.extend(ended if isinstance(ended, list | tuple | deque) else ())
        say(trained.count, mean_of(returns))


if __name__ == "__main__":
    main()
