"""Every runner prints one line of JSON whenever more has been trained on.

Imported in the peers' virtual environments: the standard library only.
"""

import json
import os
import time
from collections.abc import Sequence

LAUNCHED_AT = "PEERS_LAUNCHED_AT"
"""A variable of a runner's environment: the clock at its launch, which all processes share."""
NUM_EPISODES = 100


def say(trained: int, mean_return: float | None) -> None:
    """Say how many env steps have been trained on by now, each counted once."""
    elapsed_s = time.monotonic() - float(os.environ[LAUNCHED_AT])
    line = {"elapsed_s": elapsed_s, "trained": trained, "mean_return": mean_return}
    print(json.dumps(line), flush=True)


def mean_of(returns: Sequence[float]) -> float | None:
    """The mean of the last 100 episodes; none before there are as many."""
    last = list(returns)[-NUM_EPISODES:]
    return float(sum(last)) / NUM_EPISODES if len(last) == NUM_EPISODES else None
