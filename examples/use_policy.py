"""Train from a program, then use the policy in a loop of one's own.

    python examples/use_policy.py

It trains CartPole to a mean return of 200, shows how the return grew, and plays an episode by
`env.step` alone: a loop such as a simulator, a robot or a web service has one too.
"""

from collections.abc import Mapping
from typing import Any

import gymnasium as gym

import impala_async

GOAL = {"stop.mean_return": 200}


def play(policy: impala_async.LoadedPolicy, env: gym.Env[Any, Any], seed: int) -> float:
    """The return of one greedy episode."""
    obs, _ = env.reset(seed=seed)
    state, reward, total, is_over = None, 0.0, 0.0, False
    while not is_over:
        # Only a policy with a memory has something in its state, but the loop is the same.
        action, _, state = policy.act(obs, state, last_reward=reward)
        obs, given, terminated, truncated, _ = env.step(action)
        reward = float(given)
        total += reward
        is_over = terminated or truncated
    return total


def main(overrides: Mapping[str, Any] = GOAL) -> float:
    run = impala_async.run("cartpole", overrides)
    returns = run.metrics["mean_return"]
    print(f"mean return of each report: {returns.round(1).tolist()}")
    print(f"{run.summary['env_steps_trained']:,} env steps, lag {run.summary['lag_quantiles'][2]}")
    policy = impala_async.load_policy(run.folder)
    print(f"{policy.checkpoint.name}: {policy.observation_space} -> {policy.action_space}")
    total = play(policy, gym.make("CartPole-v1"), seed=7)
    print(f"return of one greedy episode: {total:g}")
    return total


if __name__ == "__main__":
    main()
