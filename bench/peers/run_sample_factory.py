"""Sample Factory: `python -m bench.peers.run_sample_factory GAME appo SEED`.

Runs in its own virtual environment, with its asynchronous APPO and one worker per core. CartPole
has the settings of its example for gymnasium, with the learning rate that suits two cores. Pong
has the network and the batch of its Atari example, but each row is trained on once, as we do, and
not four times, and nothing is normalised but the range of the image.
"""

import sys
from typing import Any

import gymnasium as gym
from sample_factory.algo.utils.misc import LEARNER_ENV_STEPS, ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

from bench.peers.games import make
from bench.peers.say import mean_of, say

NO_END = 1_000_000_000
BOTH: dict[str, Any] = {
    "algo": "APPO", "device": "cpu", "train_dir": "runs", "experiment": "peer", "num_workers": 2,
    "worker_num_splits": 2, "policy_workers_per_policy": 1, "async_rl": True, "use_rnn": False,
    "recurrence": 1, "num_epochs": 1, "num_batches_per_epoch": 1, "save_every_sec": 3600,
    "train_for_env_steps": NO_END, "summaries_use_frameskip": False,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "cartpole": {
        "num_envs_per_worker": 20, "batch_size": 512, "with_vtrace": False, "reward_scale": 0.1,
        "learning_rate": 1e-3, "encoder_mlp_layers": [64, 64], "nonlinearity": "tanh",
    },
    "pong": {
        "num_envs_per_worker": 8, "batch_size": 256, "rollout": 32, "with_vtrace": False,
        "encoder_conv_architecture": "convnet_atari", "nonlinearity": "relu", "obs_scale": 255.0,
        "normalize_input": False, "gamma": 0.99, "learning_rate": 2.5e-4, "max_grad_norm": 0.5,
        "exploration_loss_coeff": 0.01, "env_frameskip": 4,
    },
}  # fmt: skip


def make_env(game: str, *_: Any, **__: Any) -> Any:
    return make(game) if game in SETTINGS else gym.make(game)


def tell(runner: Any, message: dict[str, int], policy: int) -> None:
    """The learner has trained on a batch: it counts the rows that went through its update."""
    returns = runner.policy_avg_stats.get("reward", [[]])[policy]
    say(message[LEARNER_ENV_STEPS], mean_of(returns))


def main() -> None:
    game, _, seed = sys.argv[1:]
    train(game, BOTH | SETTINGS[game] | {"seed": seed})


def train(env: str, settings: dict[str, Any]) -> None:
    """Train, and say how far it is, until somebody ends it."""
    register_env(env, make_env)
    flags = [f"--env={env}"]
    for name, value in settings.items():
        values = [str(each) for each in value] if isinstance(value, list) else [str(value)]
        flags += [f"--{name}", *values]
    parser, _ = parse_sf_args(argv=flags)
    _, runner = make_runner(parse_full_cfg(parser, flags))
    runner.policy_msg_handlers[LEARNER_ENV_STEPS].append(tell)
    # It would run on after settings that it does not take, and wait for ever.
    if runner.init() != ExperimentStatus.SUCCESS:
        raise SystemExit("it does not take these settings")
    runner.run()


if __name__ == "__main__":
    main()
