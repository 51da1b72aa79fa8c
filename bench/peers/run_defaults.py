"""A training with nothing set: `python -m bench.peers.run_defaults ours|sb3|sf ENV_ID STEPS SEED`.

SB3's is its PPO, in its own virtual environment, as its documentation begins: one environment. It
is one thread that never waits, and says what it took of a processor: work beside it costs it none.
Sample Factory's is its asynchronous APPO, on a CPU; whoever started it ends it.
"""

import sys
import time

from bench.peers.say import learn_and_say


def main() -> int:
    system, env_id, num_steps, seed = sys.argv[1:]
    return {"ours": ours, "sb3": sb3, "sf": sf}[system](env_id, int(num_steps), int(seed))


def ours(env_id: str, num_steps: int, seed: int) -> int:
    from bench.peers.run_ours import train_and_say

    settings = [f"env.id={env_id}", f"stop.env_steps={num_steps}", f"seed={seed}"]
    return train_and_say(settings)


def sb3(env_id: str, num_steps: int, seed: int) -> int:
    from importlib.metadata import entry_points

    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    # gymnasium imports what a package announces, and does not call it.
    namespace = env_id.partition(":")[2].partition("/")[0]
    for announced in entry_points(group="gymnasium.envs", name=namespace) if namespace else ():
        announced.load()()
    # It learns while it does not step: with two threads it is no faster on small networks.
    torch.set_num_threads(1)
    model = PPO("MlpPolicy", make_vec_env(env_id, seed=seed), seed=seed, device="cpu")
    learn_and_say(model, num_steps, time.process_time)
    return 0


def sf(env_id: str, num_steps: int, seed: int) -> int:
    from bench.peers.run_sample_factory import train

    settings = {"algo": "APPO", "device": "cpu", "train_dir": "runs", "experiment": "peer"}
    train(env_id, settings | {"seed": seed, "train_for_env_steps": num_steps})
    return 0


if __name__ == "__main__":
    sys.exit(main())
