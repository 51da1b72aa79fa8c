"""A training with nothing set: `python -m bench.peers.run_defaults ours|sb3 ENV_ID STEPS SEED`.

SB3's is its PPO, in its own virtual environment, as its documentation begins: one environment.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from bench.peers.say import mean_of, say

POLL_S = 0.05


def main() -> int:
    system, env_id, num_steps, seed = sys.argv[1:]
    return {"ours": ours, "sb3": sb3}[system](env_id, int(num_steps), int(seed))


def ours(env_id: str, num_steps: int, seed: int) -> int:
    from bench.peers.one_turn import Tail

    settings = [f"env.id={env_id}", f"stop.env_steps={num_steps}", f"seed={seed}"]
    flags = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "impala_async.train", "--run-dir", "run", *flags]
    with subprocess.Popen(command) as training:
        metrics, has_ended = Tail(Path("run/metrics.jsonl")), False
        while not has_ended:
            time.sleep(POLL_S)
            # Asked before: the last report is written before the end.
            has_ended = training.poll() is not None
            for report in map(json.loads, metrics.new_lines()):
                say(report["env_steps_trained"], report["mean_return_100"])
    return training.returncode


def sb3(env_id: str, num_steps: int, seed: int) -> int:
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    # It learns while it does not step: with two threads it is no faster on small networks.
    torch.set_num_threads(1)
    model = PPO("MlpPolicy", make_vec_env(env_id, seed=seed), seed=seed, device="cpu")
    learn = model.train

    def learn_and_say() -> None:
        learn()
        say(model.num_timesteps, mean_of([episode["r"] for episode in model.ep_info_buffer]))

    model.train = learn_and_say
    model.learn(num_steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
