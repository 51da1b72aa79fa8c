"""A nested observation and a composite action: a Dict of Dicts in, a Dict of two kinds out.

    python examples/nested_spaces.py [flags of train]

Nothing has to be flattened by hand: an observation's leaves get names such as `parcel/kind`, each
part of the action gets a distribution of its own, and what an environment is given has the shape of
its own action space. Tuples nest in the same way. docs/environments.md has the spaces that are
supported.

A perfect arm earns 10; the run ends at 7.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

NUM_PARCELS = 10
NUM_BINS = 3


class SortingArm(gym.Env[Any, Any]):
    """One parcel after the other lies on a belt. An arm goes to it and names a bin.

    The right bin gives 1, less the distance by which the arm has missed the parcel; a wrong one
    gives nothing.
    """

    def __init__(self) -> None:
        place = Box(-1, 1, (2,), np.float32)
        self.observation_space = Dict(
            {
                "arm": Dict({"at": place}),
                "parcel": Dict({"at": place, "kind": Discrete(NUM_BINS)}),
            }
        )
        self.action_space = Dict({"go_to": place, "bin": Discrete(NUM_BINS)})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._arm = np.zeros(2, np.float32)
        self._num_left = NUM_PARCELS
        self._next_parcel()
        return self._look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._arm = np.clip(action["go_to"], -1, 1)
        missed_by = float(np.abs(self._arm - self._parcel).max())
        reward = max(0.0, 1.0 - missed_by) if action["bin"] == self._kind else 0.0
        self._num_left -= 1
        self._next_parcel()
        return self._look(), reward, self._num_left == 0, False, {}

    def _next_parcel(self) -> None:
        self._parcel = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        self._kind = int(self.np_random.integers(NUM_BINS))

    def _look(self) -> dict[str, Any]:
        return {"arm": {"at": self._arm}, "parcel": {"at": self._parcel, "kind": self._kind}}


SETTINGS = (
    "env.id=examples.nested_spaces:SortingArm",
    "algorithm.lr=2e-3",
    "algorithm.gamma=0.0",
    "algorithm.entropy_cost=0.001",
    "model.initial_std=0.5",
    "trajectory.rows=20",
    "stop.mean_return=7",
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
