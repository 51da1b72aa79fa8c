"""Your own environment, trained by one learner and two actors on this machine.

    python examples/custom_env.py [flags of train]

An environment is named `package.module:Name`, where `Name` is a class or a function that makes
one. Every process imports it by that name, so its module must be where Python finds it: installed,
in the folder that you start from, or on PYTHONPATH. docs/environments.md has the spaces that are
supported.

The best that can be done here is a mean return of about 0.67; the run ends at 0.6.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

MOVES = ((0, 1), (0, -1), (1, 0), (-1, 0))


class Courier(gym.Env[Any, np.int64]):
    """A courier walks over a square of `size` by `size` places to a door.

    A step costs 0.1, the door gives 1 and ends the episode. Who has not found it after `max_steps`
    is called back: that is a truncation, so the value of the place where it happens still counts.
    """

    def __init__(self, size: int = 5, max_steps: int = 40) -> None:
        self.observation_space = Dict(
            {"courier": Box(0, 1, (2,), np.float32), "door": Box(0, 1, (2,), np.float32)}
        )
        self.action_space = Discrete(len(MOVES))
        self._size = size
        self._max_steps = max_steps

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        places = self.np_random.choice(self._size**2, 2, replace=False)
        self._courier, self._door = (np.array(divmod(int(p), self._size)) for p in places)
        self._num_steps = 0
        return self._look(), {}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._courier = np.clip(self._courier + MOVES[action], 0, self._size - 1)
        self._num_steps += 1
        is_there = bool((self._courier == self._door).all())
        is_late = self._num_steps >= self._max_steps
        return self._look(), float(is_there) - 0.1, is_there, is_late, {}

    def _look(self) -> dict[str, Any]:
        places = {"courier": self._courier, "door": self._door}
        return {name: np.array(at / (self._size - 1), np.float32) for name, at in places.items()}


SETTINGS = (
    "env.id=examples.custom_env:Courier",
    "env.kwargs.size=5",
    "algorithm.lr=2e-3",
    "trajectory.rows=20",
    "stop.mean_return=0.6",
    "stop.env_steps=1_000_000",
)


def main(flags: Sequence[str] = ()) -> int:
    """Do what `python -m impala_async.train --set env.id=... --set ...` does in a shell."""
    from impala_async.train import main as train

    here = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    return train([part for setting in SETTINGS for part in ("--set", setting)] + list(flags))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
