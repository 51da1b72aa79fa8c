"""Every runner prints one line of JSON whenever more has been trained on.

Imported in the peers' virtual environments: the standard library only.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

LAUNCHED_AT = "PEERS_LAUNCHED_AT"
"""A variable of a runner's environment: the clock at its launch, which all processes share."""
NUM_EPISODES = 100


def since_launch_s() -> float:
    return time.monotonic() - float(os.environ[LAUNCHED_AT])


def say(
    trained: int, mean_return: float | None, clock: Callable[[], float] = since_launch_s
) -> None:
    """Say how many env steps have been trained on by now, each counted once."""
    elapsed_s = clock()
    line = {"elapsed_s": elapsed_s, "trained": trained, "mean_return": mean_return}
    print(json.dumps(line), flush=True)


def learn_and_say(model: Any, num_steps: int, clock: Callable[[], float] = since_launch_s) -> None:
    """Let a model of SB3's learn so long, and say after each of its updates how far it is."""
    learn = model.train

    def train() -> None:
        learn()
        done = mean_of([episode["r"] for episode in model.ep_info_buffer])
        say(model.num_timesteps, done, clock)

    model.train = train
    model.learn(num_steps)


def mean_of(returns: Sequence[float]) -> float | None:
    """The mean of the last 100 episodes; none before there are as many."""
    last = list(returns)[-NUM_EPISODES:]
    return float(sum(last)) / NUM_EPISODES if len(last) == NUM_EPISODES else None
